"""A mixture of experts in PyTorch, what configs say of one, and its tensors."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from adapters import MODULES, write_adapter
from safetensors.torch import load_file, save_file
from tiny import MIXTURES, SIZES, DenseAttend, reference, tiny_checkpoint
from torch.nn import functional as F

from prefold.checkpoint import resolve
from prefold.errors import CheckpointError, UnsupportedModelError
from prefold.model import Mixture, ModelConfig, Plane, config_from, mixture
from prefold.model.builders import LayerBuilder
from prefold.model.program import DELTA, X
from prefold.worker.torch.layer import Layer
from prefold.worker.torch.load import load_model
from prefold.worker.torch.lora import load_adapter
from prefold.worker.torch.operations import Place
from prefold.worker.torch.ops import PYTORCH, choose_ops
from prefold.worker.torch.parallel import ALONE

CPU = torch.device("cpu")


def config_of(hidden: int, width: int, experts: int, chosen: int, **own) -> ModelConfig:
    dense = ModelConfig(
        vocab_size=30, hidden=hidden, layers=1, heads=1, kv_heads=1, head_dim=2, intermediate=width, norm_eps=1e-6,
        rope=None, max_positions=8, planes=(Plane(),), activation=own.pop("activation", "silu"),
    )  # fmt: skip
    return mixture(dense, count=experts, chosen=chosen, **own)


def module_of(config: ModelConfig, dtype: torch.dtype, seed: int = 0) -> Layer:
    """A mixture with random weights."""
    builder = LayerBuilder(config, 0)
    builder.mlp(X, DELTA)
    module = Layer(builder.operations, Place(dtype, CPU, ALONE)).requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        values = torch.randn(parameter.shape, generator=generator)
        parameter.copy_(1.5 * values / parameter.shape[1] ** 0.5 if parameter.ndim == 2 else values)
    return module


def by_the_book(module, config: ModelConfig, h: torch.Tensor) -> torch.Tensor:
    """Row by row, in float64."""
    module, mixture = module.experts, config.experts
    gate_up, down = module.gate_up.matrices().double(), module.down.matrices().double()
    out = torch.zeros(h.shape, dtype=torch.float64)
    biases = [0.0, torch.zeros(len(gate_up)), torch.zeros(len(down))]
    if mixture.biases:
        biases = [x.double() for x in (module.router.bias, module.gate_up.biases, module.down.biases)]
    for row, x in enumerate(h.double()):
        logits = module.router.weight.double() @ x + biases[0]
        shares = logits.softmax(0)
        chosen = logits.argsort(descending=True)[: mixture.chosen]
        total = shares[chosen].sum() if mixture.normalised else 1.0
        for expert in chosen:
            gate, up = (gate_up[expert] @ x + biases[1][expert]).chunk(2)
            if mixture.clamped:
                gate, up = gate.clamp(max=7), up.clamp(-7, 7) + 1
                inner = gate * torch.sigmoid(1.702 * gate)
            else:
                inner = F.silu(gate) if config.activation == "silu" else F.gelu(gate, approximate="tanh")
            out[row] += shares[expert] / total * (down[expert] @ (inner * up) + biases[2][expert])
    return out


SHAPES = [(64, 32, 8, 2, 1), (36, 50, 5, 3, 45), (96, 48, 2, 1, 450), (130, 17, 3, 2, 300), (48, 1, 1, 1, 7)]


@pytest.mark.parametrize("normalised", [True, False])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize(("hidden", "width", "experts", "chosen", "rows"), SHAPES)
def test_what_is_written_is_computed(hidden, width, experts, chosen, rows, activation, normalised):
    config = config_of(hidden, width, experts, chosen, activation=activation, normalised=normalised)
    module = module_of(config, torch.float32)
    h = torch.randn(rows, hidden, generator=torch.Generator().manual_seed(1))
    expected = by_the_book(module, config, h).float()
    with torch.inference_mode():
        for ops in (choose_ops(h.dtype, h.device), PYTORCH):
            torch.testing.assert_close(module.result(DELTA, h, None, ops), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("clamped", [True, False])
@pytest.mark.parametrize(("hidden", "width", "experts", "chosen", "rows"), SHAPES)
def test_biases_and_the_activation_of_gpt_oss(hidden, width, experts, chosen, rows, clamped):
    config = config_of(hidden, width, experts, chosen, biases=True, clamped=clamped)
    module = module_of(config, torch.float32)
    h = 4 * torch.randn(rows, hidden, generator=torch.Generator().manual_seed(1))
    expected = by_the_book(module, config, h).float()
    with torch.inference_mode():
        for ops in (choose_ops(h.dtype, h.device), PYTORCH):
            torch.testing.assert_close(module.result(DELTA, h, None, ops), expected, rtol=1e-5, atol=1e-4)
    assert clamped == (
        not torch.equal(
            by_the_book(module, replace(config, experts=replace(config.experts, clamped=False)), h).float(), expected
        )
    )


def test_bfloat16_is_as_near_as_rounding_allows():
    module = module_of(config := config_of(64, 48, 8, 3), torch.bfloat16)
    h = torch.randn(200, 64, generator=torch.Generator().manual_seed(3)).bfloat16()
    with torch.inference_mode():
        found, expected = (
            module.result(DELTA, h, None, choose_ops(h.dtype, CPU)).double(),
            by_the_book(module, config, h),
        )
    assert (found - expected).norm() / expected.norm() < 0.01


def test_a_row_that_is_no_number_does_not_reach_others():
    module = module_of(config_of(36, 50, 5, 3), torch.float32)
    h = torch.randn(40, 36, generator=torch.Generator().manual_seed(4))
    broken = h.clone()
    broken[7], broken[8] = float("nan"), float("inf")
    others = torch.tensor([i for i in range(40) if i not in (7, 8)])
    with torch.inference_mode():
        ops = choose_ops(h.dtype, CPU)
        found = module.result(DELTA, broken, None, ops)
        torch.testing.assert_close(found[others], module.result(DELTA, h, None, ops)[others])
    assert not found[[7, 8]].isfinite().any()


def hidden_of(folder, tokens):
    model = load_model(resolve(str(folder)), dtype=torch.float32, device="cpu")
    with torch.inference_mode():
        return model(tokens, torch.arange(len(tokens)), DenseAttend(model.config))


@pytest.mark.parametrize("family", ["qwen2-moe", "qwen3-moe", "olmoe", "mixtral"])
def test_experts_that_are_stored_as_stacks(tmp_path, family):
    """As transformers holds them: a tensor of gate and up of all experts, and a tensor of down."""
    folder = tiny_checkpoint(tmp_path, family, tokenizer=False)
    tokens = torch.arange(40) * 7 % 300
    expected, held = hidden_of(folder, tokens), reference(folder).state_dict()
    stored = load_file(folder / "model.safetensors")
    stacks = {name: tensor.contiguous() for name, tensor in held.items() if ".mlp.experts." in name}
    assert {tensor.ndim for tensor in stacks.values()} == {3}
    kept = {name: tensor for name, tensor in stored.items() if ".experts." not in name}
    save_file(kept | stacks, folder / "model.safetensors", metadata={"format": "pt"})
    assert torch.equal(hidden_of(folder, tokens), expected)
    save_file(stored | stacks, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="twice"):
        hidden_of(folder, tokens)
    flat = {name: tensor.flatten(1) for name, tensor in stacks.items()}
    save_file(kept | flat, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"must be \[experts, outputs, inputs\]"):
        hidden_of(folder, tokens)


def test_adapters_of_experts_are_refused_by_name(tmp_path):
    base = tiny_checkpoint(tmp_path, "qwen3-moe", tokenizer=False)
    folder = write_adapter(tmp_path / "attention", base, MODULES[:4])
    config = config_from(resolve(str(base)).config)
    place = {"dtype": torch.float32, "device": "cpu"}
    assert load_adapter(folder, config, **place).layers
    tensors = load_file(folder / "adapter_model.safetensors")
    for name, width in (("mlp.experts.3.up_proj", 22), ("mlp.gate", 7)):
        path = f"base_model.model.model.layers.1.{name}"
        own = {f"{path}.lora_A.weight": torch.zeros(4, 36), f"{path}.lora_B.weight": torch.zeros(width, 4)}
        save_file(tensors | own, folder / "adapter_model.safetensors")
        with pytest.raises(UnsupportedModelError, match=name.replace(".", r"\.")):
            load_adapter(folder, config, **place)


BASE = {key: value for key, value in SIZES.items() if not key.endswith("_token_id")}


def config(architecture: str, **settings) -> ModelConfig:
    found = config_from(BASE | {"architectures": [architecture]} | settings)
    assert found.experts is not None
    return found


def test_what_configs_say_of_experts():
    qwen = config("Qwen3MoeForCausalLM", num_experts=128, moe_intermediate_size=24, norm_topk_prob=True)
    assert qwen.experts == Mixture(128, 8, 24)
    assert not config("Qwen3MoeForCausalLM", num_experts=16).experts.normalised
    assert config("Qwen3MoeForCausalLM", num_local_experts=16).experts.count == 16  # as transformers writes it
    some = config("Qwen3MoeForCausalLM", mlp_only_layers=[1], moe_intermediate_size=24)
    assert (some.mlp, some.intermediate, some.experts.width) == (("experts", "gated", "experts"), 50, 24)
    assert config("Qwen3MoeForCausalLM", decoder_sparse_step=2).mlp == ("gated", "experts", "gated")
    qwen2 = config("Qwen2MoeForCausalLM", shared_expert_intermediate_size=34)
    assert qwen2.experts == Mixture(60, 4, 1408, normalised=False, shared=34, shared_gate=True)
    assert qwen2.qkv_bias
    mixtral = config("MixtralForCausalLM", num_local_experts=4)
    assert mixtral.experts == Mixture(4, 2, 50)
    assert (mixtral.rope.theta, mixtral.planes[0].window) == (1e6, None)
    granite = config("GraniteMoeSharedForCausalLM", shared_intermediate_size=34, residual_multiplier=0.5)
    assert (granite.experts, granite.residual_scale) == (Mixture(8, 2, 50, shared=34), 0.5)


@pytest.mark.parametrize(
    ("architecture", "settings", "message"),
    [
        ("Qwen3MoeForCausalLM", {"mlp_only_layers": 1}, "mlp_only_layers is 1"),
        ("Qwen3MoeForCausalLM", {"num_experts": 4}, "chosen is 8; it must be from 1 to the number of experts, 4"),
        ("Qwen3MoeForCausalLM", {"num_experts": 0}, "without experts"),
        ("MixtralForCausalLM", {"num_experts": 4, "num_local_experts": 8}, "num_local_experts is 8"),
        ("OlmoeForCausalLM", {"clip_qkv": 8.0}, "clip_qkv is 8.0"),
        ("MixtralForCausalLM", {"num_shared_experts": 2}, "num_shared_experts is 2"),
        ("GraniteMoeForCausalLM", {"routed_scaling_factor": 2.5}, "routed_scaling_factor is 2.5"),
        ("OlmoeForCausalLM", {"quantization_config": {"quant_method": "mxfp4"}}, "quantised.*'mxfp4'"),
    ],
)
def test_refusals(architecture, settings, message):
    with pytest.raises(CheckpointError, match=message):
        config(architecture, **settings)


@pytest.mark.parametrize("family", MIXTURES)
def test_operations_are_those_of_the_experts_that_a_row_meets(tmp_path, family):
    folder = tiny_checkpoint(tmp_path, family, tokenizer=False)
    found, parameters = config_from(resolve(str(folder)).config), dict(reference(folder).named_parameters())
    assert found.num_parameters == sum(p.numel() for p in parameters.values())
    linears = {name: p for name, p in parameters.items() if p.ndim > 1 and "layers." in name}
    linears = {name: p for name, p in linears.items() if not name.endswith("_bias")}
    met = sum(p.numel() * (found.experts.chosen / found.experts.count if p.ndim == 3 else 1) for p in linears.values())
    assert found.linear_flops == round(2 * met)
    doubled = replace(found, experts=replace(found.experts, count=2 * found.experts.count))
    assert doubled.linear_flops == found.linear_flops + 2 * 3 * 36 * found.experts.count


def test_a_settings_file_says_which_experts_there_are(tmp_path):
    """Fewer experts than the config says are an error that names tensors."""
    folder = tiny_checkpoint(tmp_path, "qwen3-moe", tokenizer=False)
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | {"num_local_experts": 8, "num_experts": 8}))
    with pytest.raises(CheckpointError, match=r"missing: layers\.0\.mlp\.experts\.7\.down_proj"):
        hidden_of(folder, torch.arange(3))
