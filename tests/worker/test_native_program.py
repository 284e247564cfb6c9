"""Programs that one call into the kernels runs, against PyTorch operation by operation, and against themselves."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from adapters import write_adapter
from architectures import PROGRAMS, checkpoint_of
from generating import ask, engine_of, generate, reference_tokens, tokens_of
from running import as_request, prompts
from tiny import FAMILIES, MORE, reference, tiny_checkpoint

from prefold import LLM, kernels
from prefold.engine import EngineOptions, GenerateOptions, ModelEngine
from prefold.spec.requests import Namespace, Readout, Request
from prefold.trie import Spool
from prefold.worker.native.arrays import NumpyArrays
from prefold.worker.native.program import NativeProgram
from prefold.worker.native.worker import NativeWorker
from prefold.worker.readouts import greedy as likeliest_of_rows

EVERY = (*FAMILIES, *MORE)
pytestmark = pytest.mark.skipif(kernels.load() is None, reason="no kernels")


def load(tmp_path, family="llama", dtype="float32", rows=None, adapters=None, executor="native", **sizes) -> LLM:
    """rows: the most of a step"""
    return LLM(
        str(tiny_checkpoint(tmp_path, family, **sizes)),
        dtype=dtype,
        device="cpu",
        executor=executor,
        kv_memory=1 << 20,
        max_batch_rows=rows,
        adapters=adapters,
    )


def load_adapted(tmp_path, family, dtype, **options) -> LLM:
    """Adapters of all modules, of other ranks, and of some modules of some layers."""
    folder = tiny_checkpoint(tmp_path, family)
    if not (tmp_path / "a").exists():
        write_adapter(tmp_path / "a", folder, seed=1)
        write_adapter(tmp_path / "b", folder, seed=2, r=40, rank_pattern={"q_proj": 3})
        write_adapter(tmp_path / "c", folder, ("v_proj", "o_proj"), seed=3, layers=(0, 2))
    adapters = {name: str(tmp_path / name) for name in "abc"}
    return load(tmp_path, family, dtype, adapters=adapters, **options)


def requests(seed: int) -> list[Request]:
    """Some that begin alike, of which the second and the fifth ask for nothing new."""
    rng = np.random.default_rng(seed)
    first = rng.integers(3, 300, 9).tolist()
    many = [first + rng.integers(3, 300, n).tolist() for n in (1, 4, 7, 2)]
    return [ask(prompt, max_tokens=6, ignore_eos=True) for prompt in (*many, many[1], first)]


def read(llm: LLM, asked: list[Request], kind: str, *, rows: int, sharing="full") -> np.ndarray:
    """What is read of each request by another engine over the worker of `llm`."""
    worker, found = llm.engine.worker, [None] * len(asked)
    generation = GenerateOptions(kv_memory=800 * worker.facts.slot_bytes)
    engine = ModelEngine(worker, EngineOptions(sharing=sharing, max_batch_rows=rows, generation=generation))
    with Spool() as spool:
        for number, request in enumerate(asked):
            spool.add(request, str(number).encode())
        for tag, result in engine.run(spool.windows(max_tokens=1 << 20, share=sharing == "full"), Readout(kind)):
            found[int(tag)] = result.values
    return np.array(found, np.float32)


def assert_near(found: np.ndarray, expected: np.ndarray, dtype: str) -> None:
    """As rows are on the whole: in bfloat16 PyTorch rounds what the kernels sum in float32."""
    most = {"float32": 1e-5, "bfloat16": 0.06}[dtype]
    assert np.linalg.norm(found - expected) <= most * np.linalg.norm(expected)


def use(worker: NativeWorker, kind: type[NativeProgram]) -> None:
    """Let a worker run its passes by a program of another class."""
    worker._program = kind(worker.model, list(worker.adapters.values()))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", EVERY)
def test_rows_are_those_of_the_other_executor(tmp_path, family, dtype):
    """Steps of a stream that go on from a path, folded steps, and means."""
    llms = [load(tmp_path, family, dtype, executor=executor) for executor in ("native", "torch")]
    asked = [as_request(prompt) for prompt in prompts(3, 8, 250)]
    for kind, sharing, rows in (("last", "full", 9), ("mean", "full", 9), ("last", "mlp", 150)):
        found, expected = (read(llm, asked, kind, rows=rows, sharing=sharing) for llm in llms)
        assert_near(found, expected, dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", EVERY)
def test_rows_in_slots_are_those_of_a_stream(tmp_path, family, dtype):
    """Prompts in parts, with outputs beside them, give the log-probabilities that scoring the whole text does."""
    llm = load(tmp_path, family, dtype)
    asked = [replace(one, sampling=replace(one.sampling, logprobs=1)) for one in requests(1)]
    made = [samples[0] for samples in generate(engine_of(llm, slots=200, rows=7), asked)]
    scores = llm.score([one.tokens.tolist() for one in asked], [list(one.tokens) for one in made])
    bound = 1e-4 if dtype == "float32" else 0.3
    for one, score in zip(made, scores, strict=True):
        np.testing.assert_allclose([token.logprob for token in one.logprobs], score.logprobs, atol=bound)


@pytest.mark.parametrize("family", EVERY)
def test_scores_and_tokens_are_those_of_transformers(tmp_path, family):
    llm = load(tmp_path, family, rows=9)
    assert "each forward pass is one compiled call" in llm.passes
    oracle, first = reference(llm.checkpoint.path), list(range(20, 34))
    asked = [[*first, *range(n, n + 5)] for n in (40, 60, 80)]

    def expected(prompt: list[int], text: list[int]) -> torch.Tensor:
        with torch.no_grad():
            return oracle(torch.tensor([prompt + text])).logits[0].log_softmax(-1)[len(prompt) - 1 :]

    texts = [[1, 2, 7], [8], [9, 10]]
    for prompt, text, found in zip(asked, texts, llm.score(asked, texts), strict=True):
        own = expected(prompt, text)[range(len(text)), text]
        np.testing.assert_allclose(found.logprobs, own.numpy(), atol=1e-4)
    wanted = [ask(prompt, max_tokens=3, ignore_eos=True) for prompt in asked]
    for prompt, made in zip(asked, tokens_of(generate(engine_of(llm, slots=200), wanted)), strict=True):
        assert made == expected(prompt, made)[:-1].argmax(-1).tolist()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2", "granite", "cohere2"])
def test_greedy_tokens_are_those_of_the_logits(tmp_path, family, dtype):
    llm, rows = load(tmp_path, family, dtype), []
    worker = llm.engine.worker

    class Compared(NativeProgram):
        def greedy(self, batch, store, *given):
            hidden = super().over_slots(batch, store, *given)
            expected = likeliest_of_rows(NumpyArrays(worker.model.kernels), worker.model, hidden)
            found = super().greedy(batch, store, *given)
            assert found is not None and found.tolist() == expected.tolist()
            rows.append(len(found))
            return found

    use(worker, Compared)
    llm.generate(["some text", "some other text", "another"], max_tokens=6, ignore_eos=True)
    assert max(rows) == 3


def test_many_rows_after_few_and_few_after_many(tmp_path):
    llm = load(tmp_path, "qwen3")
    small, large = requests(2)[:1], [ask(np.arange(3, 203), max_tokens=2)]
    engine = engine_of(llm, slots=2000)
    found = [tokens_of(generate(engine, some)) for some in (small, large, small)]
    assert found == [tokens_of(generate(engine_of(llm, slots=2000), some)) for some in (small, large, small)]


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_rows_that_follow_those_of_the_step_before_see_the_same_as_by_a_new_plan(tmp_path, monkeypatch, family):
    monkeypatch.setattr("prefold.model.rotary.FIRST_ROWS", 1)  # so that the tables grow while rows follow
    llm, hidden, kept = load(tmp_path, family), [], []

    class Noted(NativeProgram):
        """Gives hidden states also if only the most likely tokens are wanted."""

        def greedy(self, batch, store, *given):
            return None

        def over_slots(self, batch, store, *given):
            hidden.append(super().over_slots(batch, store, *given))
            return hidden[-1]

        def follow(self, step, *given):
            batch = super().follow(step, *given)
            kept.append(batch)
            return batch

    class PlannedAnew(Noted):
        def follow(self, step, *given):
            return None

    asked = [ask(request.tokens, max_tokens=40, ignore_eos=True) for request in requests(3)]
    engines = [engine_of(llm, slots=400) for _ in range(2)]
    use(engines[0].worker, Noted)
    use(engines[1].worker, PlannedAnew)
    followed = tokens_of(generate(engines[0], asked))
    grown, hidden = hidden, []
    assert followed == tokens_of(generate(engines[1], asked))
    assert len(grown) == len(hidden)
    assert all(one.tobytes() == other.tobytes() for one, other in zip(grown, hidden, strict=True))
    # With few keys of its own a row has them in the list of its tile, and the plan is made anew; so is a window's.
    times = sum(batch is not None for batch in kept)
    assert times > 20 if family == "llama" else not times


def test_keys_of_prompts_are_expanded_while_other_rows_decode(tmp_path):
    """Steps with both forms of latent attention give the tokens of transformers."""
    folder = checkpoint_of(tmp_path, "youtu", PROGRAMS["youtu"] | {"kv_lora_rank": 64})
    rng, groups = np.random.default_rng(0), list[tuple[int, int]]()
    shared = rng.integers(3, 300, 40).tolist()
    asked = [rng.integers(3, 300, 5).tolist(), *(shared + rng.integers(3, 300, n).tolist() for n in (60, 9, 30))]

    class Noted(NativeProgram):
        def greedy(self, batch, store, *given):
            split = batch.plans[None].split
            groups.append((len(batch.tokens), 0) if split is None else (len(split.absorbed), len(split.expanded)))
            return super().greedy(batch, store, *given)

    with LLM(str(folder), dtype="float32") as llm:
        engine = engine_of(llm, rows=48, slots=400)
        use(engine.worker, Noted)
        found = tokens_of(generate(engine, [ask(tokens, max_tokens=12, ignore_eos=True) for tokens in asked]))
    assert found == reference_tokens(reference(folder), asked, 12)
    assert any(absorbed and expanded > 20 for absorbed, expanded in groups)
    assert any(not expanded for _, expanded in groups)


def test_memory_is_that_of_the_widest_place_of_a_layer_and_is_used_again(tmp_path):
    """Three buffers of the residual stream's width, and the larger of attention's and the MLP's beside them."""
    llm = load(tmp_path, "qwen3")
    llm.embed([[*range(3, 67)]])  # whole cache lines of each buffer
    program, model = llm.engine.worker.program, llm.model
    memory, rows, config = program.memory, program.memory_rows, model.config
    numbers = 3 * config.hidden + max(2 * (config.q_size + config.kv_size), model.widths["wide"]) + config.head_dim
    assert rows == 64 and memory.nbytes == 4 * rows * numbers
    llm.embed(["a short text", "and two"])
    llm.score(["a prompt"], [" yes"])
    llm.generate(["a text"], max_tokens=3)
    assert program.memory is memory


def test_two_engines_of_one_process_give_what_each_gives_alone(tmp_path):
    llms = [load(tmp_path, family, dtype) for family, dtype in (("qwen3", "bfloat16"), ("gemma2", "float32"))]
    texts = ["some text", "some other text", "another"]

    def made(llm: LLM) -> list[str]:
        return [llm.generate(texts, max_tokens=24, ignore_eos=True) for _ in range(4)][-1]

    alone = [made(llm) for llm in llms]
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(made, llms)) == alone


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", [family for family in EVERY if "moe" not in family])
def test_rows_with_adapters_are_those_of_the_other_executor(tmp_path, family, dtype):
    """Rows of several adapters, and of none, in steps over slots and in streams."""
    llms = [load_adapted(tmp_path, family, dtype, executor=executor) for executor in ("native", "torch")]
    for name in ("b", "c"):
        asked = [replace(as_request(prompt), namespace=Namespace(name)) for prompt in prompts(3, 8, 250)]
        found, expected = (read(llm, asked, "last", rows=9) for llm in llms)
        assert_near(found, expected, dtype)
    asked = [replace(request, namespace=Namespace(name)) for request in requests(4) for name in ("", "a", "b", "c")]
    asked = [replace(one, sampling=replace(one.sampling, logprobs=1, max_tokens=1)) for one in asked]
    found, expected = (generate(engine_of(llm, slots=800, rows=40), asked) for llm in llms)
    firsts = [np.array([samples[0].logprobs[0].logprob for samples in made]) for made in (found, expected)]
    np.testing.assert_allclose(*firsts, atol=1e-4 if dtype == "float32" else 0.3)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_row_has_the_same_bits_whatever_adapters_other_rows_have(tmp_path, dtype):
    llm, compared = load_adapted(tmp_path, "qwen3", dtype), []

    class Again(NativeProgram):
        def greedy(self, batch, store, *given):
            return None

        def over_slots(self, batch, store, *given):
            numbers, run = batch.adapters, super().over_slots
            if numbers is None or len(set(numbers.tolist())) < 3:
                return run(batch, store, *given)
            read_rows = slice(None) if batch.read_rows is None else batch.read_rows
            before = [
                run(replace(batch, adapters=np.where(numbers <= 0, numbers, other)), store, *given)
                for other in (-1, 1, 2)
            ]
            found = run(batch, store, *given)
            same = numbers[read_rows] <= 0
            assert all(found[same].tobytes() == other[same].tobytes() for other in before)
            compared.append(int(same.sum()))
            return found

    asked = [replace(request, namespace=Namespace(name)) for request in requests(4) for name in ("", "a", "b", "c")]
    engine = engine_of(llm, slots=800, rows=40)
    use(engine.worker, Again)
    generate(engine, asked)
    assert sum(compared) > 40


def test_python_calls_are_as_many_for_any_number_of_layers(tmp_path):
    counts, each = [], []

    def count(frame, event, argument):
        counts[-1] += event in ("call", "c_call")

    class Counted(NativeProgram):
        def greedy(self, *given):
            run = super().greedy
            counts.append(0)
            sys.setprofile(count)
            try:
                return run(*given)
            finally:
                sys.setprofile(None)

    for layers in (2, 6):
        llm = load(tmp_path, num_hidden_layers=layers)
        use(llm.engine.worker, Counted)
        llm.generate(["some text"], max_tokens=4, ignore_eos=True)
        each.append(counts[-1])
        counts.clear()
    assert each[0] == each[1] < 150


def test_a_step_that_follows_another_takes_few_calls_of_python(tmp_path):
    """Between two passes of one sequence's decoding; the code that runs then is not in the caches, so each counts."""
    llm, counts = load(tmp_path), []

    def count(frame, event, argument):
        counts[-1] += event == "call"

    class Counted(kernels.Kernels):
        def run_program(self, call):
            sys.setprofile(None)
            try:
                super().run_program(call)
            finally:
                counts.append(0)
                sys.setprofile(count if len(counts) < 24 else None)

    llm.model.kernels = Counted(llm.model.kernels.path)
    llm.generate(["some text, and some more of it"], max_tokens=30, ignore_eos=True)
    assert 30 < min(counts[8:20]) < 65


def test_tokens_of_a_step_that_follows_lie_where_they_were_given_or_elsewhere(tmp_path):
    llm, are_given = load(tmp_path), []
    texts, options = ["some text", "other text, which is longer"], {"max_tokens": 24, "ignore_eos": True}
    given = [one.tokens for one in llm.generate(texts, **options)]

    class Moved(NativeProgram):
        ids = None

        def greedy(self, *more):
            self.ids = super().greedy(*more)
            return self.ids

        def follow(self, step, *more):
            are_given.append(step.tokens is self.ids)
            step.tokens = step.tokens.copy()
            return super().follow(step, *more)

    use(llm.engine.worker, Moved)
    assert [one.tokens for one in llm.generate(texts, **options)] == given
    assert sum(are_given) > 15, are_given


def test_no_step_follows_one_that_failed(tmp_path):
    llm, fails = load(tmp_path), []

    class Failing(NativeProgram):
        def greedy(self, *given):
            if fails:
                raise ValueError("wrong")
            return super().greedy(*given)

    worker = llm.engine.worker
    use(worker, Failing)
    llm.generate(["some text"], max_tokens=4, ignore_eos=True)
    assert worker.last_run is worker.program
    fails.append(True)
    with pytest.raises(ValueError, match="wrong"):
        llm.generate(["other text"], max_tokens=4)
    assert worker.last_run is None


def test_a_slot_that_is_not_there_is_an_error(tmp_path):
    llm = load(tmp_path)

    class Wrong(NativeProgram):
        def greedy(self, batch, *given):
            batch.slots[-1] = 1 << 40
            return super().greedy(batch, *given)

    use(llm.engine.worker, Wrong)
    with pytest.raises(ValueError, match="a slot does not exist"):
        llm.generate(["some text"], max_tokens=2)


def test_the_reading_path_of_the_design_is_the_path_that_runs():
    """`scripts/reading_path.py` traces a step and writes the table in docs/design.md."""
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, str(root / "scripts" / "reading_path.py"), "--check"], capture_output=True)
    assert done.returncode == 0, f"run scripts/reading_path.py; {done.stderr.decode()[-500:]}"
