"""Chunks of text that are reused at other positions: what is exact, what is told of the rest, and who is refused."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from books import check_books
from generating import ask, engine_of, generate, worker_of
from looped_dense import looped_checkpoint
from tiny import tiny_checkpoint

from prefold import LLM
from prefold.engine import GenerateOptions
from prefold.engine.cache import CacheOptions
from prefold.engine.schedule.steps import MakeStore, SlotStep
from prefold.errors import InputError
from prefold.features.shifted.chunks import MoveRows
from prefold.features.shifted.options import ShiftedReuse
from prefold.spec.requests import Readout

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 10000.0}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 64, "rope_theta": 500000.0}  # fmt: skip
# Each kind of rotary settings, sliding windows, and layers that differ in theta.
FAMILIES = {
    "llama": ("llama", {}),
    "linear": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 10000.0}}),
    "llama3": ("llama", {"rope_parameters": LLAMA3}),
    "yarn": ("llama", {"rope_parameters": YARN}),
    "mistral": ("mistral", {"sliding_window": 6}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "gemma3": ("gemma3", {}),
}
MANY = 10**6


@pytest.fixture(scope="module", params=FAMILIES)
def llm(request, tmp_path_factory):
    family, options = FAMILIES[request.param]
    return LLM(str(tiny_checkpoint(tmp_path_factory.mktemp(request.param), family, **options)), dtype="float32")


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return LLM(str(tiny_checkpoint(tmp_path_factory.mktemp("llama"), "llama")), dtype="float32")


def texts(seed: int, *sizes: int) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(3, 300, size).tolist() for size in sizes]


def shifted(**options) -> CacheOptions:
    given = {"min_tokens": 8, "recompute": 2, "min_share": 0.0, "trial": True} | options
    return CacheOptions(min_overlap=0, shifted=ShiftedReuse(**given))


def step_of(tokens: list[int], positions: np.ndarray, slots: np.ndarray) -> SlotStep:
    """A step of rows of which each sees itself alone, so that their K/V depends on token and position."""
    rows = np.arange(len(tokens))
    ones = np.ones(len(tokens), np.int64)
    return SlotStep(
        np.array(tokens, np.int32), positions.astype(np.int32), slots, slots, ones, positions, rows, rows + 1,
        rows[-1:], np.zeros(1, np.int64),
    )  # fmt: skip


def stored(worker, plane: int, slots: np.ndarray) -> list[torch.Tensor]:
    """The keys and values in slots, float32."""
    return [torch.from_numpy(part.astype(np.float32)) for part in worker.store.read(plane, slots)]


@pytest.mark.parametrize(("old", "new"), [(0, 37), (61, 5), (17, 17), (200, 480)])
def test_turned_keys_are_those_of_the_new_position(llm, old, new):
    """Rows that see themselves alone have values that do not depend on positions, and keys that only turn with them."""
    worker = worker_of(llm)
    worker.start(MakeStore(100))
    (tokens,) = texts(0, 20)
    rows = np.arange(len(tokens))
    for first, slots in ((old, 1 + rows), (new, 31 + rows)):
        worker.start(step_of(tokens, rows + first, slots)).result()
    worker.start(MoveRows(1 + rows, rows + old, 61 + rows[::-1], rows + new)).result()
    for plane in range(len(llm.config.planes)):
        computed = stored(worker, plane, 31 + rows)
        moved = stored(worker, plane, 61 + rows[::-1].copy())
        for exact, found in zip(computed, moved, strict=True):
            assert (exact - found).abs().max() <= 1e-5 * exact.abs().max()
        before = stored(worker, plane, 1 + rows)[0]
        assert old == new or (computed[0] - before).abs().max() > 0.1 * before.abs().max()


def test_turned_keys_in_bfloat16(tmp_path):
    """They are turned in float32, and rounded once more."""
    folder = tiny_checkpoint(tmp_path, "qwen3", dtype=torch.bfloat16)
    worker = worker_of(LLM(str(folder), dtype="bfloat16"))
    worker.start(MakeStore(70))
    (tokens,) = texts(0, 20)
    rows = np.arange(len(tokens))
    for first, slots in ((3, 1 + rows), (40, 22 + rows)):
        worker.start(step_of(tokens, rows + first, slots)).result()
    worker.start(MoveRows(1 + rows, rows + 3, 43 + rows, rows + 40)).result()
    exact, moved = (stored(worker, 0, first + rows) for first in (22, 43))
    assert (exact[0].float() - moved[0].float()).abs().max() < 0.02 * exact[0].float().abs().max()
    assert torch.equal(exact[1], moved[1])


def test_all_is_read_before_anything_is_written(llama):
    worker = worker_of(llama)
    worker.start(MakeStore(40))
    (tokens,) = texts(0, 20)
    rows = np.arange(20)
    worker.start(step_of(tokens, rows, 1 + rows)).result()
    before = stored(worker, 0, 1 + rows)[1]
    worker.start(MoveRows(1 + rows, rows, 6 + rows, rows)).result()
    assert torch.equal(stored(worker, 0, 6 + rows)[1], before)


def test_chunks_that_are_computed_whole_are_exact(llm):
    a, b, c = texts(1, 20, 30, 10)
    prompts = [[*a, *b, 5], [*c, *b, 6], [*b, *a, 7], [*a, *c, *b]]
    asked = [ask(prompt, max_tokens=8, logprobs=5, ignore_eos=True) for prompt in prompts]
    wanted = [generate(engine_of(llm, slots=800), [request])[0][0] for request in asked]
    engine = engine_of(llm, slots=800, cache=shifted(recompute=MANY))
    for request, exact in zip(asked, wanted, strict=True):
        found = generate(engine, [request])[0][0]
        assert found.tokens == exact.tokens and found.approximate_tokens == 0
        for one, other in zip(found.logprobs, exact.logprobs, strict=True):
            assert abs(one.logprob - other.logprob) < 1e-4


def test_what_is_copied_and_computed(llm):
    """The same rows by hand: those of the first prompt, turned, stand for the chunk, and all others are computed."""
    a, b, c = texts(2, 16, 24, 9)
    engine = engine_of(llm, slots=400, cache=shifted(recompute=3))
    first, second = [*a, *b, 5], [*c, *b, 6, 7]
    generate(engine, [ask(first, max_tokens=1)])
    rows = engine.stats.rows_computed
    (found,) = generate(engine, [ask(second, max_tokens=1, logprobs=20)])[0]
    assert found.approximate_tokens == 21
    assert engine.stats.rows_computed - rows == len(second) - 21
    assert engine.stats.generation.copied_rows == engine.stats.unique_tokens - engine.stats.rows_computed == 21
    worker = worker_of(llm)
    worker.start(MakeStore(200))
    worker.start(whole(first, 0, np.arange(len(first)) + 1)).result()
    slots = np.arange(len(second)) + 101
    worker.start(MoveRows(np.arange(21) + 20, np.arange(21) + 19, slots[12:33], np.arange(21) + 12)).result()
    worker.start(whole(second[:12], 0, slots[:12])).result()
    ids = np.array([token for token, _ in found.logprobs[0].top])
    logits = worker.start(whole(second[33:], 33, slots, Readout("logits", ids=tuple(ids.tolist())))).result()
    values = logits.values[0].values[0]
    expected = [logprob for _, logprob in found.logprobs[0].top]
    assert np.abs((values - values[0]) - (np.array(expected) - expected[0])).max() < 1e-3


def whole(tokens: list[int], at: int, slots: np.ndarray, readout: Readout | None = None) -> SlotStep:
    """A step of rows that follow on the rows in the first `at` of some neighbouring slots."""
    from prefold.engine.schedule.steps import Reads

    rows = np.arange(len(tokens))
    own = slots[at:] if at else slots
    start = np.concatenate((slots[:1], own)) if at else own
    count = np.concatenate(([at], np.ones(len(rows), np.int64))) if at else np.ones(len(rows), np.int64)
    position = np.concatenate(([0], rows + at)) if at else rows
    first = np.concatenate(([0], rows)) if at else rows
    last = np.full(len(start), len(rows))
    first_read = np.zeros(1, np.int64)
    read_outs = () if readout is None else (Reads(readout, first_read, consumers=first_read),)
    return SlotStep(
        np.array(tokens, np.int32), (rows + at).astype(np.int32), own, start, count, position, first, last,
        rows[-1:], first_read, read_outs=read_outs,
    )  # fmt: skip


def test_a_later_request_is_exact(llama):
    """Nothing that was copied, or computed behind it, is met by others: neither the prompt nor its answer."""
    a, b, c = texts(3, 20, 30, 10)
    engine = engine_of(llama, slots=800, cache=shifted(recompute=0))
    generate(engine, [ask([*a, *b, 5], max_tokens=1)])
    (approximate,) = generate(engine, [ask([*c, *b, 6], max_tokens=12, ignore_eos=True, logprobs=20)])[0]
    assert approximate.approximate_tokens == 30
    again = [*c, *b, 6, *approximate.tokens, 9]
    for prompt in ([*c, *b, 6], again):
        # From here on nothing is shifted, while the cache stays.
        engine.generator.scheduler.chunks.find = lambda *asked: []
        (exact,) = generate(engine_of(llama, slots=800), [ask(prompt, max_tokens=8, ignore_eos=True, logprobs=20)])[0]
        (found,) = generate(engine, [ask(prompt, max_tokens=8, ignore_eos=True, logprobs=20)])[0]
        assert found.tokens == exact.tokens and found.approximate_tokens == 0
        far = [abs(x.logprob - y.logprob) for x, y in zip(found.logprobs, exact.logprobs, strict=True)]
        assert max(far) < 1e-4
    far = abs(approximate.logprobs[0].logprob - dict(exact.logprobs[0].top).get(approximate.tokens[0], -99))
    assert far > 1e-3, "a chunk behind other tokens gave the same"


def test_numbers_are_exact(llama):
    a, b, c = texts(4, 20, 30, 10)
    engine = engine_of(llama, slots=800, cache=shifted())
    generate(engine, [ask([*a, *b, 5], max_tokens=1)])
    request = ask([*c, *b, 6], max_tokens=1)
    told: list = []
    for sharing in (True, False):
        asked = replace(request, sampling=None)
        engine.generator.add(asked, None, told.append, readout=Readout("last"), sharing=sharing)
        while engine.generator.step():
            pass
    assert np.abs(told[0].values - told[1].values).max() < 1e-4


def test_many_at_once_in_little_memory(llama):
    """Preempted requests go on from rows that are computed; all end, and the books agree (`generate` checks)."""
    rng = np.random.default_rng(5)
    parts = texts(5, 20, 25, 30, 35, 22, 28)
    prompts = []
    for i in range(30):
        order = rng.permutation(len(parts))[:4]
        prompts.append([t for n in order for t in parts[n]] + [3 + i])
    engine = engine_of(llama, rows=64, slots=420, cache=shifted(), reserve_output=False)
    found = generate(engine, [ask(p, max_tokens=30, ignore_eos=True, n=2, temperature=1.0, seed=1) for p in prompts])
    assert all(len(one.tokens) == 30 for samples in found for one in samples)
    assert sum(samples[0].approximate_tokens > 0 for samples in found) > 10
    assert all(a.approximate_tokens == b.approximate_tokens for a, b in found)
    assert engine.stats.generation.preemptions > 0


def test_a_request_that_is_held_is_told_of_what_it_was_made_from(llama):
    a, b, c = texts(6, 20, 30, 10)
    engine = engine_of(llama, slots=800, cache=shifted())
    generate(engine, [ask([*a, *b, 5], max_tokens=1)])
    told, generator = [], engine.generator
    key = generator.add(ask([*c, *b, 6], max_tokens=6, ignore_eos=True), None, told.append)
    for _ in range(3):
        generator.step()
    generator.hold(key)
    generator.release(key)
    while not told:
        generator.step()
    assert told[0][0].approximate_tokens == 28 and len(told[0][0].tokens) == 6


@pytest.mark.parametrize("kind", [MoveRows, SlotStep])
def test_a_copy_or_step_that_is_interrupted(llama, start_by, kind):
    """All is computed anew then, and exact, since what chunks could be copied from is gone."""
    a, b, c = texts(8, 20, 30, 10)
    engine = engine_of(llama, slots=400, cache=shifted())
    generate(engine, [ask([*a, *b, 5], max_tokens=1)])
    request = ask([*c, *b, 6], max_tokens=8, ignore_eos=True)
    (exact,) = generate(engine_of(llama, slots=400), [request])[0]
    told, generator, moves, lost = [], engine.generator, [], []

    class Lost:
        def result(self):
            raise RuntimeError("lost")

    def interrupted(start, message, prepared=None):
        moves.extend([message] if isinstance(message, MoveRows) else [])
        if moves and isinstance(message, kind) and not lost:
            lost.append(message)
            return Lost()
        return start(message, prepared)

    start_by(engine.worker, interrupted)
    generator.add(request, None, told.append)
    with pytest.raises(RuntimeError, match="lost"):
        while not told:
            generator.step()
    assert len(moves) == 1
    while not told:
        generator.step()
    check_books(generator.scheduler)
    assert told[0][0].tokens == exact.tokens and told[0][0].approximate_tokens == 0


def test_two_ranks(tmp_path):
    """Each rank turns the keys of its own heads."""
    folder = str(tiny_checkpoint(tmp_path, "llama"))
    a, b, c = texts(7, 20, 30, 10)
    found = []
    for ranks in (1, 2):
        options = {"dtype": "float32", "kv_memory": 1 << 22, "threads": 1}
        with LLM(folder, tensor_parallel=ranks, cache=shifted(), **options) as llm:
            llm.generate([*a, *b, 5], max_tokens=1)
            found.append(llm.generate([*c, *b, 6], max_tokens=8, logprobs=5, ignore_eos=True))
    one, two = found
    assert one.approximate_tokens == two.approximate_tokens == 28
    assert one.tokens == two.tokens
    assert all(abs(x.logprob - y.logprob) < 1e-4 for x, y in zip(one.logprobs, two.logprobs, strict=True))


def test_refused_models(tmp_path):
    llm = LLM(str(tiny_checkpoint(tmp_path, "gpt2")), dtype="float32")
    with pytest.raises(InputError, match="position embeddings are added"):
        engine_of(llm, cache=shifted())
    looped = LLM(str(looped_checkpoint(tmp_path, "ouro")), dtype="float32")
    with pytest.raises(InputError, match="it is looped"):
        engine_of(looped, cache=shifted())


def test_a_batch_invariant_model_copies_nothing(tmp_path):
    with pytest.raises(InputError, match="keys and values that are copied") as caught:
        LLM(str(tiny_checkpoint(tmp_path, "llama")), dtype="float32", invariant=True, cache=shifted())
    assert caught.value.field == "invariant"


@pytest.mark.parametrize("sharing", ["mlp", "off"])
def test_refused_sharing(llama, sharing):
    with pytest.raises(InputError, match=f"sharing '{sharing}'"):
        engine_of(llama, sharing=sharing, cache=shifted())


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"min_tokens": 1}, "min_tokens"),
        ({"recompute": -1}, "recompute"),
        ({"max_matches": 0}, "max_matches"),
        ({"min_share": 1.5}, "min_share"),
        ({"window": 2.5}, "window"),
    ],
)
def test_settings_out_of_range(options, match):
    with pytest.raises(InputError, match=match):
        ShiftedReuse(**options)


def test_chunks_are_no_shorter_than_prefixes():
    with pytest.raises(InputError, match="min_overlap is 20"):
        CacheOptions(min_overlap=20, shifted=ShiftedReuse(min_tokens=19))
    GenerateOptions(cache=CacheOptions(min_overlap=20, shifted=ShiftedReuse(min_tokens=20)))
