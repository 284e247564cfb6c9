"""The path that a GPU takes through the engine: in Triton's interpreter beside the CPU's own, and on tensors without
data, of which none may be asked for a value: that is what would make the host wait for the device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from adapters import write_adapter
from ahead import ASKED, generated, watch_steps
from running import as_request, prompts, run
from tiny import tiny_checkpoint
from torch.overrides import TorchFunctionMode
from tritons import DEVICE, on_triton, triton_on  # noqa: F401 (a fixture)

from prefold import LLM
from prefold.engine import EngineOptions, GenerateOptions, ModelEngine
from prefold.engine.meter import Meter
from prefold.engine.schedule.steps import SlotStep
from prefold.engine.schedule.windows import WindowPlanner
from prefold.errors import OutOfMemoryError
from prefold.spec.requests import Readout, Request, Sampling
from prefold.trie import Spool
from prefold.worker.readouts import read_stream
from prefold.worker.torch import device
from prefold.worker.torch.arrays import TorchArrays
from prefold.worker.torch.lora import load_adapter
from prefold.worker.torch.model import CausalLM
from prefold.worker.torch.rows import Path, forward_stream, prepare, row_attention_of
from prefold.worker.torch.slots import SlotAttend, make_store, prepare_slots
from prefold.worker.torch.worker import TorchWorker, batch_rows

# Greedy, drawn with and without filters, and with what the host has to know. Few tokens: the interpreter is slow.
DRAWN = [
    Sampling(max_tokens=2, repetition_penalty=1.3),
    Sampling(max_tokens=3, ignore_eos=True),
    Sampling(max_tokens=3, temperature=1.0, seed=1, ignore_eos=True),
    Sampling(max_tokens=2, temperature=1.3, top_k=9, top_p=0.9, seed=2, n=2, ignore_eos=True),
]


@pytest.fixture(params=["qwen3", "gemma3"])
def llm(request, tmp_path) -> LLM:
    folder = str(tiny_checkpoint(tmp_path, request.param))
    return LLM(folder, dtype="float32", device=DEVICE, executor="torch", cache="off")


def engine_of(model: CausalLM, depth: int | None = None) -> ModelEngine:
    options = EngineOptions(max_batch_rows=24, generation=GenerateOptions(kv_memory=1 << 20))
    return ModelEngine(TorchWorker(model, depth=depth), options)


def greedy(llm: LLM, some: list[list[int]]) -> list[tuple[int, ...]]:
    engine = engine_of(llm.model)
    found: dict[int, tuple[int, ...]] = {}
    for number, prompt in enumerate(some):
        request = Request(np.array(prompt, np.int32), sampling=Sampling(max_tokens=3, ignore_eos=True))
        engine.generator.add(request, None, lambda answer, number=number: found.update({number: answer[0].tokens}))
    while engine.generator.step():
        pass
    return [found[number] for number in range(len(some))]


@pytest.mark.parametrize(
    ("llm", "mode"),
    [
        ("gemma3", "full"),
        ("qwen3", "mlp"),
        ("qwen3", "off"),
        pytest.param("qwen3", "full", marks=pytest.mark.slow),
        pytest.param("gemma3", "mlp", marks=pytest.mark.slow),
        pytest.param("gemma3", "off", marks=pytest.mark.slow),
    ],
    indirect=["llm"],
)
def test_read_outs_are_those_of_the_cpu(llm, mode, request):
    requests = [as_request(prompt) for prompt in prompts(3, count=4)]
    wanted = run(llm, requests, Readout("last"), sharing=mode, rows=25)
    request.getfixturevalue("on_triton")
    found = run(llm, requests, Readout("last"), sharing=mode, rows=25)
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_allclose(a.values, b.values, atol=2e-4)


def test_generated_tokens_are_those_of_the_cpu(llm, request):
    some = prompts(4, count=3)
    wanted = greedy(llm, some)
    request.getfixturevalue("on_triton")
    assert greedy(llm, some) == wanted


@pytest.mark.parametrize(
    ("llm", "samplings"),
    [
        ("qwen3", DRAWN),
        *(pytest.param(family, ASKED[::-1], marks=pytest.mark.slow) for family in ("qwen3", "gemma3")),
    ],
    indirect=["llm"],
)
def test_a_step_is_planned_while_the_one_before_runs(llm, samplings, on_triton, monkeypatch):  # noqa: F811
    """Tokens are drawn by the kernel, and go from step to step without the host. (More in test_generate_ahead.)"""
    wanted, _ = generated(llm, samplings, ahead=False)
    begun = watch_steps(monkeypatch)
    found, _ = generated(llm, samplings, ahead=True)
    assert found == wanted
    assert any(begun), "no step was begun before the one before was over"


# On tensors without data


class NoWaiting(TorchFunctionMode):
    """Fails where something is sent to the device in a way that waits for it. (What waits for something from the
    device fails by itself: there is none.)"""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        made = func(*args, **kwargs)
        if isinstance(made, torch.Tensor) and made.device.type == "meta":
            numbers = func in (torch.tensor, torch.as_tensor, torch.asarray)
            moved = func is torch.Tensor.to and args[0].device.type == "cpu" and not kwargs.get("non_blocking")
            assert not numbers and not moved, f"{func.__name__} waits for the device"
        return made


def test_waiting_is_noticed():
    with NoWaiting():
        torch.zeros(2).to("meta", non_blocking=True)
        for call in (lambda: torch.as_tensor([1], device="meta"), lambda: torch.zeros(2).to("meta")):
            with pytest.raises(AssertionError, match="waits"):
                call()


@pytest.fixture
def without_data(llm, monkeypatch, no_kernels) -> Iterator[CausalLM]:
    """The model on the meta device, which stands for a GPU; launches of kernels do nothing."""
    if not device.has_triton():
        pytest.skip("Triton is not installed")
    from triton.runtime.interpreter import InterpretedFunction

    launches: list[str] = []
    monkeypatch.setattr(InterpretedFunction, "run", lambda self, *a, **k: launches.append(self.fn.__name__))
    fetched: list[torch.Tensor] = []

    def fetch(self, *given):
        fetched.extend(given)
        return lambda: tuple(np.full(tuple(one.shape), 7) for one in given)

    monkeypatch.setattr(TorchArrays, "fetch", fetch)
    with triton_on("meta"):
        model = CausalLM(llm.config, dtype=torch.bfloat16, device=torch.device("meta")).eval()
        model.launches, model.fetched = launches, fetched
        model.cos_sin(torch.zeros(1, dtype=torch.int64, device="meta"))  # its tables are made once
        yield model


def one_step(model: CausalLM, some: list[list[int]], sharing: str, readout: Readout):
    with Spool() as spool:
        for number, prompt in enumerate(some):
            targets = [1, 2][: len(prompt)] if readout.kind == "logprobs" else None
            spool.add(as_request(prompt, targets), str(number).encode())
        window = next(iter(spool.windows(max_tokens=1 << 20, share=sharing == "full")))
    scheduler = WindowPlanner(window, readout, sharing=sharing, max_batch_rows=1000)
    attention = row_attention_of(model.local, model.dtype, model.device)
    return prepare(scheduler.plan().message, model.config, attention)


@pytest.mark.skipif(DEVICE != "cpu", reason="in the interpreter")
@pytest.mark.parametrize("sharing", ["full", "mlp", "off"])
@pytest.mark.parametrize(
    "readout",
    [Readout("last"), Readout("mean"), Readout("logits", ids=(3, 5)), Readout("logprobs")],
    ids=lambda r: r.kind,
)
def test_a_step_never_waits(without_data, sharing, readout):
    model = without_data
    batch = one_step(model, prompts(5), sharing, readout)
    assert not model.launches, "what is prepared ahead launches nothing"
    with NoWaiting(), torch.inference_mode():
        hidden, kv = forward_stream(model, batch, Path(), {})
        read_stream(TorchArrays(model.device), model, batch, None, hidden)
    assert {one.device.type for one in model.fetched} == {"meta"}
    assert model.launches.count("_forward") == model.config.layers
    assert {"_add_rms_norm", "_rope", "_gate"} <= set(model.launches)
    if Path(kv).rows:
        assert kv[0][0].device.type == "meta"


@pytest.mark.skipif(DEVICE != "cpu", reason="in the interpreter")
def test_generation_never_waits_but_for_tokens(without_data):
    """Steps are begun while the one before runs, in whatever way their tokens are drawn."""
    model = without_data
    engine = engine_of(model, depth=2)
    answers = []
    for prompt, sampling in zip(prompts(4, count=6), ASKED[:6], strict=False):
        engine.generator.add(Request(np.array(prompt, np.int32), sampling=sampling), None, answers.append)
    with NoWaiting():
        while engine.generator.step():
            pass
    assert len(answers) == 6
    assert {"_draw", "_attend", "_write"} <= set(model.launches)


def decode_step(sequences: int, shared: int, own: int) -> SlotStep:
    """Every sequence's newest row, below a shared prefix; `own` rows each, from slot 1 + shared on."""
    query = np.arange(sequences)
    tail = 1 + shared + query * own
    one = np.ones(sequences, np.int64)
    runs = zip(
        np.array([[1, shared, 0, 0, sequences]]).T.tolist(),
        np.stack((tail, one * own, one * shared, query, query + 1)).tolist(),
        strict=True,
    )
    start, count, position, first, last = (np.array([*a, *b]) for a, b in runs)
    return SlotStep(
        tokens=(query % 7).astype(np.int32), positions=np.full(sequences, shared + own - 1, np.int32),
        slots=tail + own - 1, run_start=start, run_count=count, run_position=position, run_first=first, run_last=last,
        read_rows=query,
    )  # fmt: skip


@pytest.mark.skipif(DEVICE != "cpu", reason="in the interpreter")
def test_a_step_of_generation_never_waits(without_data):
    model = without_data
    config = model.config
    store = make_store(model, 64)
    with NoWaiting():
        batch = prepare_slots(decode_step(5, 12, 3), store, config, {})
    with NoWaiting(), torch.inference_mode():
        model(batch.tokens, batch.positions, SlotAttend(store, batch, config.planes, config.scale), batch.read_rows)
    assert model.launches.count("_write") == model.launches.count("_attend") == config.layers
    assert model.launches.count("_spread") == len({plane.window for plane in config.planes})


@pytest.mark.skipif(DEVICE != "cpu", reason="in the interpreter")
def test_adapters_do_not_wait_either(llm, without_data, tmp_path):
    """Rows of two adapters and of none, not all of them read."""
    model = without_data
    config = model.config
    base = llm.checkpoint.path
    adapters = {
        name: load_adapter(write_adapter(tmp_path / name, base), config, dtype=model.dtype, device="meta")
        for name in "ab"
    }
    step = decode_step(5, 12, 3)
    step = replace(step, adapters=np.array([0, 0, -1, 1, 0]), read_rows=np.array([1, 2, 4]))
    batch = prepare_slots(step, store := make_store(model, 64), config, adapters)
    with NoWaiting(), torch.inference_mode():
        attend = SlotAttend(store, batch, config.planes, config.scale)
        hidden = model(batch.tokens, batch.positions, attend, batch.read_rows, batch.adapters)
    assert hidden.shape == (3, config.hidden)


def test_results_of_a_step_while_the_next_one_runs(llm, monkeypatch):
    requests = [as_request(prompt) for prompt in prompts(8)]
    for kind in ("last", "mean"):
        wanted = run(llm, requests, Readout(kind), sharing="full", rows=9)
        steps = []
        ahead = SimpleNamespace(engine=ModelEngine(TorchWorker(llm.model, depth=2)))
        found = run(ahead, requests, Readout(kind), sharing="full", rows=9, on_step=steps.append)
        assert len(steps) > 2
        for a, b in zip(found, wanted, strict=True):
            np.testing.assert_array_equal(a.values, b.values)


# Memory


def memory_for(rows: int):
    """A hook of a model that has memory for passes of so many rows."""

    def check(model, arguments):
        if len(arguments[0]) > rows:
            raise torch.OutOfMemoryError("no more")

    return check


def test_a_step_that_does_not_fit_is_run_in_halves(llm, monkeypatch):
    if DEVICE != "cpu":
        pytest.skip("on a CPU")
    requests = [as_request(prompt) for prompt in prompts(6)]
    for mode in ("full", "mlp", "off"):
        wanted = run(llm, requests, Readout("last"), sharing=mode, rows=1000)
        with llm.model.register_forward_pre_hook(memory_for(20)):
            other = SimpleNamespace(engine=ModelEngine(TorchWorker(llm.model), EngineOptions(max_batch_rows=1000)))
            found = run(other, requests, Readout("last"), sharing=mode, rows=None)
        assert other.engine.max_batch_rows < 1000
        for a, b in zip(found, wanted, strict=True):
            np.testing.assert_allclose(a.values, b.values, atol=2e-4)


def test_what_never_fits_is_an_error(llm):
    llm.model.register_forward_pre_hook(memory_for(0))
    with pytest.raises(OutOfMemoryError, match="no more"):
        run(llm, [as_request([5, 6, 7])], Readout("last"), sharing="full", rows=10)
    with pytest.raises(OutOfMemoryError):
        greedy(llm, [[5, 6, 7]])


def test_generation_goes_on_with_smaller_steps(llm):
    some = prompts(7, count=6)
    wanted = greedy(llm, some)
    llm.model.register_forward_pre_hook(memory_for(5))
    assert greedy(llm, some) == wanted


def test_rows_of_a_step_where_nobody_says(llm, monkeypatch):
    assert batch_rows(llm.model) == 4096 or DEVICE == "cuda"
    model = CausalLM(llm.config, dtype=torch.bfloat16, device=torch.device("meta"))
    free = iter([1 << 23, 1 << 45, 0])
    monkeypatch.setattr("prefold.worker.torch.worker.available_memory", lambda device: next(free))
    some = batch_rows(model)
    assert some % 1024 == 0 and 1024 <= some < 65_536
    assert batch_rows(model) == 65_536
    assert batch_rows(model) == 1024


def test_what_compiling_takes_is_counted(monkeypatch):
    """By the listener that Triton calls, which is asked before ours was there as well."""
    if not device.has_triton():
        pytest.skip("Triton is not installed")
    from triton import knobs
    from triton.knobs import CompileTimes

    heard = []
    monkeypatch.setattr(knobs.compilation, "listener", lambda **told: heard.append(told["cache_hit"]))
    clock = device.CompileClock()
    assert clock.take() == 0
    for micros in (1_500_000, 500_000):
        times = CompileTimes(micros, [("ptx", 250_000)], 250_000)
        knobs.compilation.listener(src=None, metadata={}, metadata_group={}, times=times, cache_hit=False)
    meter = Meter()
    for _ in range(2):
        meter.add(seconds={"compile": clock.take()})
    assert meter.stats.seconds == {"compile": 3.0}
    assert heard == [False, False]
