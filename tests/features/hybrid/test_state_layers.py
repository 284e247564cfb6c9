"""Mixers in PyTorch, over runs of any length that start anywhere, and the table of their states."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from prefold.checkpoint.settings import TILED
from prefold.features.hybrid.carry import Carry, tensor_table
from prefold.features.hybrid.steps import StateRuns
from prefold.model import config_from
from prefold.model.builders import MIXERS as MIXER_KINDS
from prefold.model.builders import LayerBuilder
from prefold.model.program import DELTA, X
from prefold.worker.torch.layer import Layer
from prefold.worker.torch.operations import Place
from prefold.worker.torch.ops import PYTORCH
from prefold.worker.torch.parallel import ALONE

CPU, SLOTS = torch.device("cpu"), 5
LFM2 = {"architectures": ["Lfm2ForCausalLM"], "layer_types": ["conv", "full_attention"]}
QWEN = {"architectures": ["Qwen3_5ForCausalLM"], "layer_types": ["linear_attention", "full_attention"]}

GRANITE = {
    "architectures": ["GraniteMoeHybridForCausalLM"], "layer_types": ["linear_attention", "full_attention"],
    "num_local_experts": 0, "shared_intermediate_size": 32,
}  # fmt: skip


FALCON = {
    "architectures": ["FalconH1ForCausalLM"], "mamba_d_ssm": 66, "mamba_n_heads": 6, "mamba_n_groups": 2,
    "mamba_d_state": 7, "ssm_multipliers": [0.7, 1.2, 0.8, 1.1, 1.5], "ssm_in_multiplier": 0.9,
}  # fmt: skip


def delta(key_heads: int, heads: int, key_dim: int, value_dim: int) -> dict:
    return QWEN | {
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": heads,
        "linear_key_head_dim": key_dim,
        "linear_value_head_dim": value_dim,
    }


def mamba(heads: int, groups: int, dim: int, state: int, **more) -> dict:
    hidden = {"hidden_size": heads * dim // 2, "mamba_n_heads": heads, "mamba_n_groups": groups, "mamba_d_state": state}
    return GRANITE | hidden | more


MIXERS = {
    "conv": LFM2 | {"conv_bias": True, "conv_L_cache": 3},
    "conv of five taps": LFM2 | {"conv_L_cache": 5},
    "delta, small": delta(2, 4, 6, 10),
    "delta, 128": delta(2, 2, 128, 128),
    "delta, odd": delta(1, 3, 33, 150),
    "delta, negative eigenvalues": delta(2, 4, 6, 10) | {"architectures": ["OlmoHybridForCausalLM"]},
    "delta, tiled": delta(3, 6, 9, 20) | {TILED: True},
    "mamba, small": mamba(6, 2, 10, 7),
    "mamba, 64": mamba(4, 1, 64, 128, mamba_conv_bias=False),
    "mamba, odd": mamba(2, 2, 75, 33, time_step_limit=[0.3, 1.5]),
    "mamba, no norm": FALCON,
    "mamba, the norm first": FALCON | {"mamba_rms_norm": True},
}


def mixer_of(settings: dict, dtype: torch.dtype) -> Layer:
    """The first layer's mixer, with random weights."""
    sizes = {"hidden_size": 40, "intermediate_size": 32, "vocab_size": 100, "num_hidden_layers": 2, "head_dim": 8,
             "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}  # fmt: skip
    config = config_from(sizes | settings)
    assert config.has_states
    builder = LayerBuilder(config, 0)
    builder.is_last = True
    (name,) = (one for one in config.mixers_of(0) if one != "attention")
    MIXER_KINDS[name].build(builder, X)
    mixer = Layer(builder.operations, Place(dtype, CPU, ALONE)).requires_grad_(False)
    mixer.config = config
    generator = torch.Generator().manual_seed(0)
    for parameter in mixer.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * (0.4 if parameter.ndim > 1 else 1))
    return mixer


def step_of(mixer: Layer, dtype: torch.dtype, seed: int, folded: bool = False) -> tuple[Carry, torch.Tensor]:
    """Random runs over random states, and the rows that the model computes; some runs go on from others."""
    rng, generator = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    lengths = rng.permutation([1, 1, 1, 2, 3, 4, 17, 40, *rng.integers(1, 6, 4)])
    count, rows = len(lengths), int(lengths.sum())
    source = np.array(
        [int(rng.integers(SLOTS)) if run == 0 or rng.random() < 0.5 else -1 - int(rng.integers(run))
         for run in range(count)]
    )  # fmt: skip
    fold = {}
    if folded:  # the stream has every run twice, the model once
        fold = {"scatter": torch.arange(2 * rows) % rows, "gather": torch.arange(rows)}
        lengths, source = np.tile(lengths, 2), np.append(source, np.where(source < 0, source - count, source))
    first = np.cumsum([0, *lengths[:-1]])
    ends = np.sort(rng.permutation(len(lengths))[:6])
    runs = StateRuns(first, source, ends, SLOTS + np.arange(len(ends)))
    table = tensor_table(mixer.config, SLOTS + len(ends), dtype, CPU)
    for part in table.tensors[0]:
        part.copy_(torch.randn(part.shape, generator=generator))
    h = torch.randn(rows, mixer.config.hidden, generator=generator).to(dtype)
    return Carry(table, runs, int(lengths.sum()), CPU, **fold), h


def mixed(mixer, carry: Carry, h: torch.Tensor, read: torch.Tensor | None = None) -> list[torch.Tensor]:
    """What a mixer gives, and the states at the ends."""
    with torch.inference_mode():
        out = mixer.result(DELTA, h, None, PYTORCH, read=read, states=carry)
    return [out, *(part[carry.to] for part in carry.table.tensors[0])]


def row_by_row(carry: Carry) -> Carry:
    """The same rows and states, each row as a run of its own."""
    runs, stop = carry.runs, np.append(carry.runs.first[1:], carry.rows)
    above = np.arange(carry.rows) - 1
    source = -1 - above
    last = stop[np.maximum(-1 - runs.source, 0)] - 1  # of the run that each goes on from
    source[runs.first] = np.where(runs.source < 0, -1 - last, runs.source)
    rows = StateRuns(np.arange(carry.rows), source, stop[runs.ends] - 1, runs.slots)
    return Carry(carry.table, rows, carry.rows, CPU, carry.scatter, carry.gather)


@pytest.mark.parametrize("name", MIXERS)
@pytest.mark.parametrize(("folded", "reads"), [(False, False), (False, True), (True, False), (True, True)])
@pytest.mark.parametrize("seed", range(2))
def test_runs_give_what_their_rows_give_one_by_one(name, folded, reads, seed):
    mixer = mixer_of(MIXERS[name], torch.float32)
    carry, h = step_of(mixer, torch.float32, seed, folded)
    read = torch.tensor([0, 3, len(h) - 1]) if reads else None
    found = mixed(mixer, carry, h, read)
    expected = mixed(mixer, row_by_row(step_of(mixer, torch.float32, seed, folded)[0]), h, read)
    assert len(found) == len(expected) == 1 + len(carry.table.tensors[0])
    for got, wanted in zip(found, expected, strict=True):
        assert (got - wanted).abs().max() < 2e-5 * wanted.abs().max()


@pytest.mark.parametrize("name", MIXERS)
def test_bfloat16_is_as_near_as_rounding_allows(name):
    mixer, wide = (mixer_of(MIXERS[name], dtype) for dtype in (torch.bfloat16, torch.float32))
    wide.load_state_dict(mixer.state_dict())
    (carry, h), (wide_carry, _) = (step_of(mixer, dtype, 1) for dtype in (torch.bfloat16, torch.float32))
    for got, wanted in zip(mixed(mixer, carry, h), mixed(wide, wide_carry, h.float()), strict=True):
        assert (got.float() - wanted).norm() / wanted.norm() < 0.02


@pytest.mark.parametrize("name", MIXERS)
def test_a_row_that_is_no_number_reaches_those_below_it_alone(name):
    mixer = mixer_of(MIXERS[name], torch.float32)
    carry, h = step_of(mixer, torch.float32, 3)
    expected = mixed(mixer, carry, h)[0]
    runs, below = carry.runs, {4}
    below |= {run for run in range(5, len(runs.first)) if -1 - runs.source[run] == 4}
    while more := {run for run in range(len(runs.first)) if -1 - runs.source[run] in below} - below:
        below |= more
    broken = h.clone()
    broken[runs.first[4]] = torch.nan
    found = mixed(mixer, step_of(mixer, torch.float32, 3)[0], broken)[0]
    stop = np.append(runs.first[1:], len(h))
    others = np.concatenate([np.arange(runs.first[i], stop[i]) for i in range(len(stop)) if i not in below])
    assert 0 < len(others) < len(h)
    torch.testing.assert_close(found[others], expected[others])
    assert found[runs.first[4]].isnan().all()


def test_a_state_takes_the_place_of_the_one_that_only_its_own_run_reads():
    mixer = mixer_of(MIXERS["delta, small"], torch.float32)
    table = tensor_table(mixer.config, 2, torch.float32, CPU)

    def step(source: list[int], ends: list[int], slots: list[int]) -> StateRuns:
        runs = StateRuns(np.arange(len(source)), *(np.array(x, np.int64) for x in (source, ends, slots)))
        placed = table.place(runs)
        for row, key in zip(placed.slots.tolist(), slots, strict=True):  # a state's number is its key
            table.tensors[0][1][row] = key
        table.store(runs, placed)
        return placed

    def held() -> dict[int, float]:
        return {key: table.tensors[0][1][row].mean().item() for key, row in table._row_of.items()}

    assert step([0, 0], [0, 1], [5, 6]).slots.tolist() == [1, 2]  # the table has grown
    assert step([5, 6], [0, 1], [5, 6]).slots.tolist() == [1, 2]  # as in decoding: in place
    branch = step([5, 5, -1], [1, 2], [5, 7])  # another run reads what was under 5
    assert branch.source.tolist() == [1, 1, -1]
    assert not {1, 2} & set(branch.slots.tolist())
    assert held() == {0: 0, 5: 5, 6: 6, 7: 7}
    further = step([6, -1], [0], [6])  # a run that goes on from another may still read its first columns
    assert 2 not in further.slots.tolist()
    table.keep(np.array([6]))
    assert held() == {0: 0, 6: 6}
    with pytest.raises(ValueError, match=r"not stored: \[5\]"):
        table.place(StateRuns(np.zeros(1, np.int64), np.array([5])))
    table.in_place = False  # as on a GPU: a step that fails has changed nothing
    before = table._row_of[6]
    assert before not in step([6], [0], [6]).slots.tolist()
    rows = [*table._free, *table._row_of.values()]
    assert sorted(rows) == list(range(table.rows))
