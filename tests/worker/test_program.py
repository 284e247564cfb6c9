"""A forward pass as one call gives what the operations give one by one, by the same kernels."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from adapters import write_adapter
from generating import ask, engine_of, generate, tokens_of
from tiny import FAMILIES, MIXTURES, MORE, reference, tiny_checkpoint

from prefold import LLM, kernels
from prefold.model import CausalLM, MediaRows, RowAdapters
from prefold.model.layers import Linear
from prefold.model.products import Panels, Product
from prefold.spec.requests import Namespace, Request
from prefold.worker.local import LocalWorker
from prefold.worker.program import Program, program_of
from prefold.worker.readouts import greedy as likeliest_of_slots
from prefold.worker.rows import forward_stream
from prefold.worker.slots import forward, make_store
from prefold.worker.torch.arrays import TorchArrays

EVERY = (*FAMILIES, *(family for family in MORE if family not in MIXTURES))
# Gate and up in whole vectors: other widths have no program.
WIDTH = {"intermediate_size": 64, "n_inner": 64, "shared_intermediate_size": 64}


pytestmark = pytest.mark.usefixtures("own_products")


def load(tmp_path, family="llama", dtype="float32", rows=None, sharing="full", **sizes) -> LLM:
    """rows: the most of a step"""
    folder = tiny_checkpoint(tmp_path, family, **WIDTH | sizes)
    return LLM(
        str(folder),
        dtype=dtype,
        device="cpu",
        executor="torch",
        kv_memory=1 << 20,
        max_batch_rows=rows,
        sharing=sharing,
    )


def requests(seed: int) -> list[Request]:
    """Some that begin alike, of which the second and the fifth ask for nothing new."""
    rng = np.random.default_rng(seed)
    first = rng.integers(3, 300, 9).tolist()
    prompts = [first + rng.integers(3, 300, n).tolist() for n in (1, 4, 7, 2)]
    return [ask(prompt, max_tokens=6, ignore_eos=True) for prompt in (*prompts, prompts[1], first)]


def assert_near(found: torch.Tensor, expected: torch.Tensor) -> None:
    """As rows are on the whole: in bfloat16 the modules round what the program sums in float32."""
    most = {torch.float32: 1e-5, torch.bfloat16: 0.05}[found.dtype]
    assert (found - expected).float().norm() <= most * expected.float().norm()


def assert_same(llm: LLM, found: torch.Tensor, expected: torch.Tensor) -> None:
    """To the last bit, but for what the modules compute by PyTorch: LayerNorms, MLPs without a gate, factors."""
    config = llm.model.config
    if config.norm == "layer" or config.mlp == "plain" or config.residual_scale != 1:
        assert_near(found, expected)
    else:
        assert torch.equal(found, expected)


class WithoutGreedy(Program):
    """Every pass over slots gives hidden states, also if only the most likely tokens are wanted."""

    def greedy(self, batch, store, media=None):
        return None


def use(worker: LocalWorker, kind: type[Program]) -> None:
    """Let a worker run its passes by a program of another class."""
    worker.program = kind(worker.model, kernels.load())


def check_generating(llm: LLM) -> None:
    """Compares all steps of a job over slots with those of the modules."""
    rows, engine = [], engine_of(llm, slots=200, rows=7)
    engine.generator  # noqa: B018 (makes the store)
    other = make_store(llm.model, engine.worker.store.slots)

    class Compared(WithoutGreedy):
        def over_slots(self, batch, store, media=None):
            # As if the first row were that of an image.
            ones = torch.ones(1, llm.model.config.hidden, dtype=llm.model.dtype)
            of_image = MediaRows(torch.zeros(1, dtype=torch.int64), ones)
            for some in (of_image, media):
                expected = forward(llm.model, other, batch, {"media": some})
                found = super().over_slots(batch, store, some)
                assert_same(llm, found, expected)
            rows.append(len(batch.tokens))
            return found

    use(engine.worker, Compared)
    generate(engine, requests(1))
    assert len(rows) > 6 and max(rows) == 7  # prompts in parts, and outputs beside them


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", EVERY)
def test_hidden_states_are_those_of_the_modules(tmp_path, family, dtype):
    check_generating(load(tmp_path, family, dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "differs",
    [
        {"norm": "layer", "mlp": "plain", "activation": "gelu_tanh"},  # as StarCoder2 has them
        {"mlp": "plain", "activation": "silu", "rope": None, "embedding_scale": 3.0},
        {"activation": "gelu_tanh"},
        {"sinks": True, "attention_cap": 4.0},
    ],
)
def test_biases_norms_and_mlps_in_other_combinations(tmp_path, differs, dtype):
    llm = load(tmp_path)
    config = replace(llm.model.config, qkv_bias=True, o_bias=True, mlp_bias=True, **differs)
    model = CausalLM(config, dtype=dtype, device=torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / parameter.shape[-1] ** 0.5)
    for module in model.modules():
        if isinstance(module, Linear):
            module.pack()
    model.requires_grad_(False)
    check_generating(SimpleNamespace(model=model, checkpoint=llm.checkpoint, engine=llm.engine))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2", "granite", "cohere2"])
def test_greedy_tokens_are_those_of_the_logits(tmp_path, family, dtype):
    llm, rows = load(tmp_path, family, dtype), []

    class Compared(Program):
        def greedy(self, batch, store, media=None):
            found = super().greedy(batch, store, media)
            hidden = self.over_slots(batch, store)
            assert found.tolist() == likeliest_of_slots(TorchArrays(hidden.device), llm.model, hidden).tolist()
            rows.append(len(found))
            return found

    use(llm.engine.worker, Compared)
    weight = torch.randn(llm.model.config.vocab_size, 36).to(llm.model.dtype)
    for head in (llm.model.product_of_head(), Panels(weight, kernels.load())):
        llm.model.head_product = head  # another one of the same kind is used
        llm.generate(["some text", "some other text", "another"], max_tokens=6, ignore_eos=True)
    assert len(rows) > 8 and max(rows) == 3


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", EVERY)
@pytest.mark.parametrize("task", ["embed", "score"])
@pytest.mark.parametrize("sharing", ["full", "mlp"])
def test_steps_of_a_stream_and_their_paths_are_those_of_the_modules(tmp_path, family, dtype, task, sharing):
    rows = {"full": 9, "mlp": 150}[sharing]
    llm, paths, folded = load(tmp_path, family, dtype, rows, sharing), [], []

    class Compared(Program):
        def over_rows(self, batch, path, media=None):
            expected, kv = forward_stream(llm.model, batch, path, {})
            found, kept = super().over_rows(batch, path, media)
            assert_same(llm, found, expected)
            assert kept.keys() == kv.keys()
            for plane, tensors in kv.items():
                for pair in zip(kept[plane], tensors, strict=True):
                    assert_same(llm, *pair)
            paths.append(path.rows)
            folded.append(0 if batch.scatter is None else len(batch.scatter) - len(batch.tokens))
            return found, kept

    use(llm.engine.worker, Compared)
    texts = ["the same beginning of each, and then the first end", "the same beginning of each, and another", "others"]
    if task == "embed":
        llm.embed(texts, pooling="mean")
    else:
        llm.score(texts, [" yes and no"] * 3)
    assert max(folded) > 9 if sharing == "mlp" else len(paths) > 4 and max(paths) > 9


@pytest.mark.parametrize("family", EVERY)
def test_scores_and_tokens_are_those_of_transformers(tmp_path, family):
    llm = load(tmp_path, family, rows=9)
    assert "one compiled call" in llm.passes
    oracle, first = reference(llm.checkpoint.path), list(range(20, 34))
    prompts = [[*first, *range(n, n + 5)] for n in (40, 60, 80)]

    def expected(prompt: list[int], text: list[int]) -> torch.Tensor:
        with torch.no_grad():
            return oracle(torch.tensor([prompt + text])).logits[0].log_softmax(-1)[len(prompt) - 1 :]

    texts = [[1, 2, 7], [8], [9, 10]]
    for prompt, text, found in zip(prompts, texts, llm.score(prompts, texts), strict=True):
        own = expected(prompt, text)[range(len(text)), text]
        np.testing.assert_allclose(found.logprobs, own.numpy(), atol=1e-4)
    asked = [ask(prompt, max_tokens=3, ignore_eos=True) for prompt in prompts]
    for prompt, made in zip(prompts, tokens_of(generate(engine_of(llm, slots=200), asked)), strict=True):
        assert made == expected(prompt, made)[:-1].argmax(-1).tolist()


def test_many_rows_after_few_and_few_after_many(tmp_path):
    llm = load(tmp_path, "qwen3")
    engine = engine_of(llm, slots=2000)
    small, large = requests(2)[:1], [ask(np.arange(3, 203), max_tokens=2)]
    found = [tokens_of(generate(engine, some)) for some in (small, large, small)]
    plain = engine_of(llm, slots=2000)
    plain.generator  # noqa: B018 (makes the store)
    plain.worker.program = None
    assert found == [tokens_of(generate(plain, some)) for some in (small, large, small)]


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_rows_that_follow_those_of_the_step_before_see_the_same_as_by_a_new_plan(tmp_path, monkeypatch, family):
    monkeypatch.setattr("prefold.model.rotary_tables.FIRST_ROWS", 1)  # so that the tables grow while rows follow
    llm, hidden, kept = load(tmp_path, family), [], []

    class Noted(WithoutGreedy):
        def over_slots(self, batch, store, media=None):
            hidden.append(super().over_slots(batch, store, media))
            return hidden[-1]

        def follow(self, step):
            batch = super().follow(step)
            kept.append(batch)
            return batch

    class PlannedAnew(Noted):
        def follow(self, step):
            return None

    asked = [ask(request.tokens, max_tokens=40, ignore_eos=True) for request in requests(3)]
    engines = [engine_of(llm, slots=400) for _ in range(2)]
    use(engines[0].worker, Noted)
    use(engines[1].worker, PlannedAnew)
    followed = tokens_of(generate(engines[0], asked))
    grown, hidden = hidden, []
    assert followed == tokens_of(generate(engines[1], asked))
    assert len(grown) == len(hidden) and all(torch.equal(*pair) for pair in zip(grown, hidden, strict=True))
    # With few keys of its own a row has them in the list of its tile, and the plan is made anew; so is a window's.
    times = sum(batch is not None for batch in kept)
    assert times > 20 if family == "llama" else not times


def test_memory_is_that_of_the_widest_place_of_a_layer_and_is_used_again(tmp_path):
    """Three buffers of the residual stream's width, and the larger of attention's and the MLP's beside them."""
    llm = load(tmp_path, "qwen3")
    llm.embed(["a text of some tokens, which is longer than all others"])
    program, config = llm.engine.worker.program, llm.model.config
    memory, rows = program.memory, program.memory_rows
    numbers = 3 * config.hidden + max(2 * (config.q_size + config.kv_size), config.intermediate) + config.head_dim
    assert rows > 50 and 4 * rows * numbers <= memory.nbytes < 4 * rows * numbers + 1024
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


def test_a_model_with_another_operation_has_no_program_and_says_why(tmp_path):
    llm = load(tmp_path, intermediate_size=50)
    assert program_of(llm.model) is None and "an MLP's width" in llm.passes
    other = load(tmp_path)
    assert program_of(other.model) is not None and other.passes == "each forward pass is one compiled call"


def load_adapted(tmp_path, family, dtype, rows=None) -> LLM:
    """Adapters of all modules, of other ranks, and of some modules of some layers."""
    folder = tiny_checkpoint(tmp_path, family, **WIDTH)
    paths = [
        write_adapter(tmp_path / "a", folder, seed=1),
        write_adapter(tmp_path / "b", folder, seed=2, r=40, rank_pattern={"q_proj": 3}),
        write_adapter(tmp_path / "c", folder, ("v_proj", "o_proj", "up_proj"), seed=3, layers=(0, 2)),
    ]
    adapters = {path.name: str(path) for path in paths}
    options = {"kv_memory": 1 << 20, "max_batch_rows": rows, "adapters": adapters}
    return LLM(str(folder), dtype=dtype, device="cpu", executor="torch", **options)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", EVERY)
def test_rows_with_adapters_are_those_of_the_modules(tmp_path, family, dtype):
    llm, kinds = load_adapted(tmp_path, family, dtype), []
    engine = engine_of(llm, slots=800, rows=40)
    engine.generator  # noqa: B018 (makes the store)
    other = make_store(llm.model, engine.worker.store.slots)

    class Compared(WithoutGreedy):
        def over_slots(self, batch, store, media=None):
            expected = forward(llm.model, other, batch)
            found = super().over_slots(batch, store, media)
            assert_near(found, expected)
            kinds.append(set(batch.adapters.numbers.tolist()))
            return found

    use(engine.worker, Compared)
    asked = [replace(request, namespace=Namespace(name)) for request in requests(4) for name in ("", "a", "b", "c")]
    tokens_of(generate(engine, asked))
    assert any(len(some) == 4 for some in kinds)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_row_has_the_same_bits_whatever_adapters_other_rows_have(tmp_path, dtype):
    llm, compared = load_adapted(tmp_path, "qwen3", dtype), []

    class Again(WithoutGreedy):
        def over_slots(self, batch, store, media=None):
            adapters, run = batch.adapters, super().over_slots
            if not adapters.adapters or len(set(adapters.numbers.tolist())) < 3:
                return run(batch, store)
            read = slice(None) if batch.read_rows is None else batch.read_rows.numpy()
            before = []
            for other in (-1, 1, 2):
                numbers = np.where(adapters.numbers <= 0, adapters.numbers, other)
                before.append(run(replace(batch, adapters=RowAdapters(adapters.adapters, numbers)), store))
            found = run(batch, store)
            same = torch.from_numpy(adapters.numbers[read] <= 0)
            assert all(torch.equal(found[same], other[same]) for other in before)
            compared.append(int(same.sum()))
            return found

    asked = [replace(request, namespace=Namespace(name)) for request in requests(4) for name in ("", "a", "b", "c")]
    engine = engine_of(llm, slots=800, rows=40)
    use(engine.worker, Again)
    generate(engine, asked)
    assert sum(compared) > 40


@pytest.mark.parametrize("task", ["embed", "score"])
def test_a_stream_with_an_adapter_is_that_of_the_modules(tmp_path, task):
    llm, paths = load_adapted(tmp_path, "qwen3", "float32", rows=9), []

    class Compared(Program):
        def over_rows(self, batch, path, media=None):
            expected, kv = forward_stream(llm.model, batch, path, {})
            found, kept = super().over_rows(batch, path, media)
            assert_near(found, expected)
            for plane, tensors in kv.items():
                for pair in zip(kept[plane], tensors, strict=True):
                    assert_near(*pair)
            paths.append(path.rows)
            return found, kept

    use(llm.engine.worker, Compared)
    texts = ["the same beginning of each, and then the first end", "the same beginning of each, and another", "others"]
    if task == "embed":
        llm.embed(texts, pooling="mean", adapter="b")
    else:
        llm.score(texts, [" yes and no"] * 3, adapter="b")
    assert len(paths) > 4 and max(paths) > 9


def test_a_product_that_is_put_in_later_is_used(tmp_path):
    """Another matrix of the same kind, then a product of another kind."""
    llm = load(tmp_path)
    before = llm.embed("some text")
    linear = llm.model.layers[1].o
    linear.use(Panels(torch.zeros(36, 36), kernels.load()))
    zero = llm.embed("some text")
    assert llm.engine.worker.program is not None and not np.array_equal(zero, before)

    class Zero(Product):
        def __call__(self, x, bias=None):
            return torch.zeros(len(x), 36)

    linear.use(Zero())
    np.testing.assert_array_equal(llm.embed("some text"), zero)
    assert llm.engine.worker.program is None


def test_python_calls_are_as_many_for_any_number_of_layers(tmp_path):
    counts, each = [], []

    def count(frame, event, argument):
        counts[-1] += event in ("call", "c_call")

    class Counted(Program):
        def greedy(self, batch, store, media=None):
            run = super().greedy
            counts.append(0)
            sys.setprofile(count)
            try:
                return run(batch, store, media)
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

    worker = llm.engine.worker
    worker.program = Program(worker.model, Counted(kernels.load().path))
    llm.generate(["some text, and some more of it"], max_tokens=30, ignore_eos=True)
    assert 30 < min(counts[8:20]) < 65


def test_tokens_of_a_step_that_follows_lie_where_they_were_given_or_elsewhere(tmp_path):
    llm, are_given = load(tmp_path), []
    prompts, options = ["some text", "other text, which is longer"], {"max_tokens": 24, "ignore_eos": True}
    given = [one.tokens for one in llm.generate(prompts, **options)]

    class Moved(Program):
        ids = None

        def greedy(self, batch, store, media=None):
            self.ids = super().greedy(batch, store, media)
            return self.ids

        def follow(self, step):
            are_given.append(step.tokens is self.ids)
            step.tokens = step.tokens.copy()
            return super().follow(step)

    use(llm.engine.worker, Moved)
    assert [one.tokens for one in llm.generate(prompts, **options)] == given
    assert sum(are_given) > 15, are_given


def test_no_step_follows_one_that_failed(tmp_path):
    llm, fails = load(tmp_path), []

    class Failing(Program):
        def greedy(self, batch, store, media=None):
            if fails:
                raise MemoryError("too small")
            return super().greedy(batch, store, media)

    use(llm.engine.worker, Failing)
    llm.generate(["some text"], max_tokens=4, ignore_eos=True)
    assert llm.engine.worker.last_run is llm.engine.worker.program
    fails.append(True)
    with pytest.raises(MemoryError, match="too small"):
        llm.generate(["other text"], max_tokens=4)
    assert llm.engine.worker.last_run is None


def test_a_slot_that_is_not_there_is_an_error(tmp_path):
    llm = load(tmp_path)

    class Wrong(Program):
        def greedy(self, batch, store, media=None):
            batch.slots[-1] = 1 << 40
            return super().greedy(batch, store, media)

    use(llm.engine.worker, Wrong)
    with pytest.raises(ValueError, match="a slot that is not there"):
        llm.generate(["some text"], max_tokens=2)


def test_the_reading_path_of_the_design_is_the_path_that_runs():
    """`scripts/reading_path.py` traces a step and writes the table in docs/design.md."""
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, str(root / "scripts" / "reading_path.py"), "--check"], capture_output=True)
    assert done.returncode == 0, f"run scripts/reading_path.py; {done.stderr.decode()[-500:]}"
