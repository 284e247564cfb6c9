"""GGUF files of hybrids, as llama.cpp's converter writes them: tensors under the names of the gguf package's table, in
the orders, shapes and signs that llama.cpp reads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from architectures import PROGRAMS, checkpoint_of
from blocks import stored_bytes
from hybrids import hidden_states, hybrid_checkpoint
from running import as_request, prompts, run
from tiny import reference

from prefold import LLM, kernels
from prefold.checkpoint import resolve
from prefold.errors import CheckpointError, UnsupportedModelError
from prefold.kernels import BLOCK_TYPES, Blocks
from prefold.model import ModelConfig, config_from
from prefold.model.program import Experts, Linear
from prefold.model.sources import open_source
from prefold.spec.requests import SHARING_MODES, Readout

Tensors = dict[str, np.ndarray]


@dataclass(frozen=True)
class Case:
    """A tiny checkpoint.

    family  of hybrids, or a model_type
    older   whether Qwen3-Next's file is as first written
    fused   whether gate and up of experts are one tensor, which the converter writes if it is told to
    """

    arch: str
    family: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    older: bool = False
    fused: bool = False

    def folder(self, path: Path) -> Path:
        if self.family in PROGRAMS:
            return checkpoint_of(path / self.family, self.family, PROGRAMS[self.family] | self.settings)
        return hybrid_checkpoint(path, self.family, **self.settings)


CASES = {
    "lfm2": Case("lfm2", "lfm2", {"conv_bias": False}),
    "lfm2moe": Case("lfm2moe", "lfm2_moe"),
    "qwen35": Case("qwen35", "qwen3_5", {"linear_num_key_heads": 2, "linear_num_value_heads": 2}),
    "qwen35, tiled": Case("qwen35", "qwen3_5", {"linear_num_key_heads": 2, "linear_num_value_heads": 6}),
    "qwen35moe": Case("qwen35moe", "qwen3_5_moe_text"),
    "qwen35moe, fused": Case("qwen35moe", "qwen3_5_moe_text", fused=True),
    "qwen3next": Case("qwen3next", "qwen3_next", {"mlp_only_layers": []}),
    "qwen3next, older": Case("qwen3next", "qwen3_next", {"mlp_only_layers": []}, older=True),
    "granitehybrid": Case("granitehybrid", "granite4_h"),
    "granitehybrid, experts": Case("granitehybrid", "granitemoehybrid"),
}


def tensors_of(folder: Path) -> tuple[ModelConfig, Tensors]:
    """The tensors of a folder by their names here."""
    checkpoint = resolve(str(folder))
    config = config_from(checkpoint.config)
    shapes = {name: shape for weight in config.program().weights for name, shape in weight.shapes.items()}
    source = open_source(checkpoint, config, shapes, 0, {})
    return config, {name: np.array(source.read(name), np.float32) for name in shapes}


def tiled(values: np.ndarray, keys: int, heads: int, axis: int = 0) -> np.ndarray:
    """Values [heads * dim, ...] with the heads of each key head apart: of all key heads the first, then the second."""
    values = np.moveaxis(values, axis, 0)
    split = values.reshape(keys, heads // keys, -1, *values.shape[1:])
    return np.moveaxis(split.swapaxes(0, 1).reshape(values.shape), 0, axis)


def by_key_head(parts: list[np.ndarray], keys: int) -> np.ndarray:
    """The rows of all parts that belong to the first key head, then those of the second."""
    rows = [part.reshape(keys, -1, part.shape[-1]) for part in parts]
    return np.concatenate(rows, 1).reshape(-1, parts[0].shape[-1])


def as_converted(case: Case, config: ModelConfig, tensors: Tensors) -> Iterator[tuple[str, np.ndarray]]:
    """Yield tensors as the file has them, by names that the table of the gguf package maps."""
    sizes, stacks = config.sizes, dict[str, list[np.ndarray]]()
    is_qwen = case.arch.startswith("qwen")
    keys, heads = sizes.get("key_heads", 1), sizes.get("value_heads", 1)
    parts: dict[str, list[np.ndarray]] = {}
    for name, values in tensors.items():
        layer, _, module = name.partition(".linear_attn.")
        if ".experts." in name:
            front, _, rest = name.partition(".experts.")
            stacks.setdefault(f"{front}.experts.{rest.partition('.')[2]}", []).append(values)
            continue
        if case.arch == "qwen3next" and module.startswith("in_proj_"):
            parts.setdefault(layer, []).append(values)
            continue
        if case.arch in ("qwen35", "qwen35moe") and module:
            values = in_tiles(module, values, keys, heads, 2 * keys * sizes["key_dim"])
        if ".conv1d.weight" in name or "conv.conv.weight" in name:
            values = values[:, 0]
        elif name.endswith("A_log"):
            values = -np.exp(values)
        elif is_qwen and name.endswith("norm.weight") and not module:
            values = values + 1
        if ".mamba." in name and name.endswith(("A_log", "mamba.D")):
            values = values[:, None]
        elif name.endswith("mamba.norm.weight"):
            values = values.reshape(sizes["groups"], -1)
        if case.arch == "granitehybrid" and name.endswith(("q_proj.weight", "k_proj.weight")):  # halves in turn
            values = values.reshape(-1, 2, config.head_dim // 2, config.hidden).swapaxes(1, 2).reshape(values.shape)
        yield name.replace("dt_bias", "dt_proj.bias").replace("gate.correction", "gate.e_score_correction.bias"), values
    every = {name: np.stack(matrices) for name, matrices in stacks.items()}
    for name in [name for name in every if case.fused and "gate_proj" in name]:
        gate, up = every.pop(name), every.pop(name.replace("gate_proj", "up_proj"))
        every[name.replace("gate_proj", "gate_up_proj")] = np.concatenate([gate, up], 1)
    yield from every.items()
    for layer, (q, k, v, z, b, a) in parts.items():
        yield f"{layer}.linear_attn.in_proj_ba.weight", by_key_head([b, a], keys)
        if case.older:
            yield f"{layer}.linear_attn.in_proj_qkvz.weight", by_key_head([q, k, v, z], keys)
        else:
            yield f"{layer}.linear_attn.in_proj_qkv.weight", np.concatenate([q, k, v])
            yield f"{layer}.linear_attn.in_proj_z.weight", z


def in_tiles(module: str, values: np.ndarray, keys: int, heads: int, first: int) -> np.ndarray:
    """A tensor of a gated delta net with its value heads tiled. first: the rows of q and k"""
    if module.startswith(("in_proj_qkv", "conv1d")):
        return np.concatenate([values[:first], tiled(values[first:], keys, heads)])
    if module.startswith("out_proj"):
        return tiled(values, keys, heads, 1)
    return values if module.startswith("norm") else tiled(values, keys, heads)


def write_hybrid_gguf(folder: Path, path: Path, case: Case, type_of: Callable[[str], str] | None = None, **more: int):
    """The checkpoint of a folder as a GGUF file. type_of: the type of each matrix by its name in the file, of random
    numbers then; None: the checkpoint's, as float32. more: further keys of the architecture, and their numbers"""
    config, tensors = tensors_of(folder)
    kind = next(kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == case.arch)
    names = gguf.get_tensor_name_map(kind, config.layers)
    writer = gguf.GGUFWriter(path, case.arch)
    write_metadata(writer, case, config, more)
    for name, values in as_converted(case, config, tensors):
        name = "model.embedding_norm.weight" if name == "norm.weight" and "lfm2" in case.arch else f"model.{name}"
        stored = names.get_name(name.replace("model.lm_head", "lm_head"), (".weight", ".bias"))
        assert stored, name
        if values.ndim < 2 or type_of is None or "conv" in stored or "ssm_norm" in stored or "gate_inp" in stored:
            writer.add_tensor(stored, np.ascontiguousarray(values))
            continue
        of_file = type_of(stored)
        rows = stored_bytes(of_file, int(np.prod(values.shape[:-1])), values.shape[-1], len(stored))
        rows = rows.reshape(*values.shape[:-1], -1)
        writer.add_tensor(stored, rows, raw_dtype=gguf.GGMLQuantizationType[of_file])
    for number in range(more.get("nextn_predict_layers", 0)):
        writer.add_tensor(f"blk.{config.layers + number}.nextn.eh_proj.weight", np.ones((3, 5), np.float32))
        writer.add_tensor(f"blk.{config.layers + number}.attn_q.weight", np.ones((3, 5), np.float32))
        writer.add_tensor(f"blk.{config.layers + number}.ffn_up_exps.weight", np.ones((2, 3, 5), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_metadata(writer: gguf.GGUFWriter, case: Case, config: ModelConfig, more: Mapping[str, int]) -> None:
    sizes, experts, arch = config.sizes, config.experts, case.arch
    kv_heads = [config.kv_heads if mixer == "attention" else 0 for mixer in config.mixers]
    writer.add_block_count(config.layers + more.get("nextn_predict_layers", 0))
    writer.add_context_length(config.max_positions)
    writer.add_embedding_length(config.hidden)
    writer.add_head_count(config.heads)
    writer.add_head_count_kv(config.kv_heads if arch.startswith("qwen") else kv_heads)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_rope_freq_base(config.rope.settings.get("rope_theta", config.rope.theta))
    writer.add_vocab_size(config.vocab_size)
    if arch != "qwen35moe":  # whose config has no width but that of experts
        writer.add_feed_forward_length(config.intermediate)
    if experts is not None:
        writer.add_expert_count(experts.count)
        writer.add_expert_used_count(experts.chosen)
        if arch != "granitehybrid":
            writer.add_expert_feed_forward_length(experts.width)
        if experts.shared:
            writer.add_expert_shared_feed_forward_length(experts.shared)
    if "lfm2" in arch:
        writer.add_shortconv_l_cache(sizes["taps"])
        if arch == "lfm2moe":
            writer.add_leading_dense_block_count(config.mlp.index("experts"))
            writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    else:
        writer.add_ssm_conv_kernel(sizes["taps"])
    if arch == "granitehybrid":
        writer.add_rope_scaling_finetuned(False)
        writer.add_rope_dimension_count(config.head_dim)
        writer.add_ssm_state_size(sizes["state"])
        writer.add_ssm_group_count(sizes["groups"])
        writer.add_ssm_time_step_rank(sizes["heads"])
        writer.add_ssm_inner_size(sizes["heads"] * sizes["dim"])
        writer.add_embedding_scale(config.embedding_scale)
        writer.add_residual_scale(config.residual_scale)
        writer.add_attention_scale(config.scale)
        writer.add_logit_scale(1 / config.logit_scale)
    elif arch.startswith("qwen"):
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
        writer.add_rope_dimension_count(config.rotated_dim)
        if arch != "qwen3next":
            writer.add_rope_dimension_sections([1, 1, 0, 0])
        writer.add_ssm_state_size(sizes["key_dim"])
        writer.add_ssm_group_count(sizes["key_heads"])
        writer.add_ssm_time_step_rank(sizes["value_heads"])
        writer.add_ssm_inner_size(sizes["value_dim"] * sizes["value_heads"])
        writer.add_uint32(f"{arch}.full_attention_interval", config.mixers.index("attention") + 1)
    for key, value in more.items():
        writer.add_uint32(f"{arch}.{key}", value)
    writer.add_tokenizer_model("no_vocab")


@pytest.fixture(scope="module", params=CASES)
def folder(request, tmp_path_factory):
    return CASES[request.param], CASES[request.param].folder(tmp_path_factory.mktemp("checkpoint"))


@pytest.mark.parametrize("executor", ["native", "torch"])
def test_a_file_gives_what_its_checkpoint_does(folder, tmp_path, executor):
    case, of_case = folder
    path = tmp_path / "m.gguf"
    write_hybrid_gguf(of_case, path, case)
    ours, theirs = (config_from(resolve(str(one)).config) for one in (path, of_case))
    heads = theirs.sizes.get("value_heads"), theirs.sizes.get("key_heads")
    tiles = {"tiled": True} if case.arch.startswith("qwen35") and heads[0] != heads[1] else {}
    assert (ours.mixers, ours.sizes, ours.rotated_dim) == (theirs.mixers, {**theirs.sizes, **tiles}, theirs.rotated_dim)
    assert ours.experts == theirs.experts
    llm, texts = LLM(str(path), dtype="float32", executor=executor), prompts(6)
    expected = hidden_states(reference(of_case), texts)
    for sharing in SHARING_MODES:
        for result, states in zip(
            run(llm, list(map(as_request, texts)), Readout("last"), sharing=sharing, rows=9), expected, strict=True
        ):
            assert np.abs(result.values - states[-1]).max() < 1e-4


@pytest.mark.parametrize("name", ["qwen35, tiled", "qwen35moe"])
def test_layers_that_predict_further_tokens_are_left_out(tmp_path, name):
    """A file's block count has them."""
    case = CASES[name]
    folder = case.folder(tmp_path)
    configs, vectors, tokens = [], [], [5, 9, 200, 7]
    for number, more in enumerate(({}, {"nextn_predict_layers": 1})):
        path = tmp_path / f"{number}.gguf"
        write_hybrid_gguf(folder, path, case, **more)
        configs.append(config_from(resolve(str(path)).config))
        vectors.append(LLM(str(path), dtype="float32").embed([tokens]))
    assert configs[0] == configs[1]
    assert np.array_equal(*vectors)


def test_adapters_of_tiled_heads_are_refused(tmp_path):
    """They are made for the checkpoint's order. Attention and MLPs may be adapted."""
    names = {}
    for name in ("qwen35", "qwen35, tiled"):
        case = CASES[name]
        path = tmp_path / f"{name}.gguf"
        write_hybrid_gguf(case.folder(tmp_path / name), path, case)
        program = config_from(resolve(str(path)).config).program()
        names[name] = {linear.name for number in range(len(program.layers)) for linear in program.linears(number)}
    assert names["qwen35"] - names["qwen35, tiled"] == {"in_proj", "out_proj"}
    assert {"qkv", "o", "gate_up", "down"} & names["qwen35"] == {"qkv", "o", "gate_up", "down"} & names["qwen35, tiled"]
    assert names["qwen35, tiled"]


# Rows that are whole blocks of all types.
WIDE = {"hidden_size": 256, "moe_intermediate_size": 256, "shared_expert_intermediate_size": 256, "head_dim": 64}
WIDE |= {"linear_key_head_dim": 32, "linear_value_head_dim": 64, "linear_num_key_heads": 2}


def of_q4_k_m(stored: str) -> str:
    """The types of a usual file, with those of small matrices that are not quantised."""
    kinds = {"ssm_alpha": "F32", "ssm_beta": "F32", "attn_gate": "Q5_K", "attn_v": "Q6_K", "ffn_down_exps": "Q6_K"}
    kinds |= {"shexp": "Q8_0", "token_embd": "Q6_K", "ssm_out": "Q5_K"}
    return next((kind for part, kind in kinds.items() if part in stored), "Q4_K")


@pytest.mark.skipif(kernels.load() is None, reason="no kernels")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_all_matrices_stay_as_stored(tmp_path, dtype):
    """Where parts of a linear are of several types, too. Results are those of the numbers that the blocks stand for."""
    case = Case("qwen35moe", "qwen3_5_moe_text", WIDE)
    path = tmp_path / "m.gguf"
    write_hybrid_gguf(case.folder(tmp_path), path, case, of_q4_k_m)
    found = []
    for weights in ("file", "dtype"):
        with LLM(str(path), dtype=dtype, weights=weights) as llm:
            memory, program = llm.engine.worker.model.memory, llm.engine.worker.model.program
            if weights == "file":
                large = [one for one in program.operations if isinstance(one, Linear) and one.weight.rows > 1]
                stacks = [one for one in program.operations if isinstance(one, Experts)]
                assert all(isinstance(memory.matrices[one.weight], Blocks) for one in large)
                types = [memory.stacks[weight].types for one in stacks for weight in (one.gate_up, one.down)]
                assert types == [{BLOCK_TYPES["Q4_K"]}, {BLOCK_TYPES["Q6_K"]}] * len(stacks)
                assert memory.num_bytes < 1.2 * path.stat().st_size
            texts = list(map(as_request, prompts(6)))
            found.append(np.stack([one.values for one in run(llm, texts, Readout("last"), sharing="full", rows=9)]))
    tolerance = 1e-4 if dtype == "float32" else 0.1
    np.testing.assert_allclose(found[0], found[1], rtol=0, atol=tolerance * np.abs(found[1]).max())


REFUSED = {
    "ssm.time_step_rank": ("qwen35, tiled", {"ssm.time_step_rank": 5}, "a multiple of 2"),
    "expert_gating_func": ("qwen35moe", {"expert_gating_func": 2}, "expert_gating_func 2"),
    "sigmoid": ("lfm2moe", {"expert_gating_func": 1}, "only 2 is supported"),
    "normalised": ("qwen35moe", {"expert_weights_norm": 0}, "expert_weights_norm is false"),
    "rotated": ("granitehybrid", {"rope.scaling.finetuned": 1}, "like Bamba"),
    "inner": ("granitehybrid", {"ssm.inner_size": 70}, "ssm.inner_size"),
    "further": ("qwen35moe", {"nextn_predict_layers": 9, "block_count": 3}, "nextn_predict_layers"),
}


@pytest.mark.parametrize("problem", REFUSED)
def test_what_a_file_cannot_have_is_refused_by_name(tmp_path, problem):
    name, keys, words = REFUSED[problem]
    folder, path = CASES[name].folder(tmp_path), tmp_path / "m.gguf"
    write_hybrid_gguf(folder, path, CASES[name])
    metadata = resolve(str(path)).gguf.metadata
    assert resolve(str(path)).config
    overwrite(path, {f"{metadata['general.architecture']}.{key}": value for key, value in keys.items()})
    with pytest.raises((UnsupportedModelError, CheckpointError), match=words):
        resolve(str(path))


def overwrite(path: Path, keys: Mapping[str, int]) -> None:
    """Write a file's metadata anew, with other numbers under some keys; its tensors are left out."""
    reader = gguf.GGUFReader(path)
    arch = reader.fields["general.architecture"].contents()
    values = {name: entry.contents() for name, entry in reader.fields.items() if name.startswith(arch)} | keys
    shapes = {tensor.name: tensor.shape[::-1].tolist() for tensor in reader.tensors}
    del reader
    path.unlink()
    writer = gguf.GGUFWriter(path, arch)
    for name, value in values.items():
        add = {float: writer.add_float32, bool: writer.add_bool, list: writer.add_array}
        add.get(type(value), writer.add_uint32)(name, value)
    for name, shape in shapes.items():
        writer.add_tensor(name, np.zeros(shape, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("heads", [[2, 0, 3, 0], [2, 0], 2, [0, 0, 0, 0]])
def test_heads_of_layers_are_one_number_or_none(tmp_path, heads):
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "lfm2")
    for key, value in {"block_count": 4, "context_length": 64, "embedding_length": 32, "feed_forward_length": 64,
                       "attention.head_count": 4, "shortconv.l_cache": 3}.items():  # fmt: skip
        writer.add_uint32(f"lfm2.{key}", value)
    writer.add_float32("lfm2.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_head_count_kv(heads)
    for name in ("token_embd.weight", "blk.1.attn_q.weight"):
        writer.add_tensor(name, np.zeros((32, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match=r"lfm2\.attention\.head_count_kv"):
        resolve(str(tmp_path / "m.gguf"))
