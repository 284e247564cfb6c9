"""Layer by layer: what is read of a model is the same, bit for bit, as with all weights in memory; each weight is read
once a window, and one part of the weights is in memory at a time."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import psutil
import pytest
from adapters import write_adapter
from architectures import PROGRAMS, checkpoint_of
from blocks import write_model
from click.testing import CliRunner
from looped_dense import looped_checkpoint
from running import as_request, prompts, run
from tiny import tiny_checkpoint
from tiny_vision import tiny_vision

from prefold import LLM, InputError, kernels
from prefold.checkpoint import resolve
from prefold.cli import main
from prefold.engine import EngineOptions, ModelEngine
from prefold.errors import OutOfMemoryError, PrefoldError
from prefold.features.layerwise.engine import LayerwiseFacts, LayerwiseStep
from prefold.jobs.report.progress import format_bytes
from prefold.kernels import Arena
from prefold.model.families import config_from
from prefold.model.sources import open_source
from prefold.spec.requests import Namespace, Readout, Request
from prefold.worker.native.load import Loader, load_native, shapes_of, sizes_of, window_extents
from prefold.worker.native.worker import NativeWorker
from prefold.worker.parts import native_parts

pytestmark = pytest.mark.skipif(kernels.load() is None, reason="no kernels")
IDS = (3, 200, 17)
READOUTS = (Readout("last"), Readout("mean"), Readout("logits", IDS), Readout("logprobs"))
MANY = 1 << 20
# Of these layers read what is computed before, or are visited more than once: they are refused.
RESIDENT = ("gemma4_text", "dory")
# One of each kind of layer; the other families run with `-m slow`.
QUICK = (
    "qwen3", "gemma3", "gpt2", "GGUF", "deepseek_v3", "minimax_m2", "lfm2_moe", "qwen3_5_moe_text", "falcon_h1",
    "nemotron_h", "olmo_hybrid", "bamba", "gemma3n_text", "apertus",
)  # fmt: skip
KINDS = (
    *QUICK,
    *(
        pytest.param(one, marks=pytest.mark.slow)
        for one in ("qwen2-moe", *PROGRAMS)
        if not one.startswith((*RESIDENT, *QUICK))
    ),
)


def checkpoint(folder, kind: str):
    if kind == "GGUF":
        mix = lambda name: "Q6_K" if name.endswith(("attn_v", "ffn_down", "token_embd")) else "Q4_K"  # noqa: E731
        return write_model(folder / "m.gguf", mix, layers=3)
    return checkpoint_of(folder, kind, PROGRAMS[kind]) if kind in PROGRAMS else tiny_checkpoint(folder, kind)


def asked(readout: Readout, seed: int = 2) -> list[Request]:
    texts = prompts(seed, count=9)
    if readout.kind != "logprobs":
        return list(map(as_request, texts))
    return [as_request([*tokens, 7, 9], [*tokens[-1:], 7, 9]) for tokens in texts]


def bits(results: list) -> list[bytes]:
    return [one.values.tobytes() + (b"" if one.greedy is None else one.greedy.tobytes()) for one in results]


@pytest.fixture(scope="module", params=KINDS)
def path(request, tmp_path_factory):
    return checkpoint(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The folder of a small dense model."""
    return tiny_checkpoint(tmp_path_factory.mktemp("plain"), "qwen3", num_hidden_layers=3)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_results_are_the_same_bits(path, dtype):
    if config_from(resolve(str(path)).config).resident is not None:
        with pytest.raises(InputError, match="layers read the results of earlier layers, beside the residual stream"):
            LLM(str(path), dtype=dtype, layerwise="on")
        return
    with LLM(str(path), dtype=dtype) as whole, LLM(str(path), dtype=dtype, layerwise="on") as by_layer:
        assert "layer by layer" in by_layer.passes and "layer by layer" not in whole.passes
        for readout in READOUTS:
            requests = asked(readout)
            for sharing, rows, window in (("full", 7, MANY), ("full", 3, 20), ("off", 7, MANY), ("mlp", 30, 40)):
                options = {"sharing": sharing, "rows": rows, "window": window}
                expected = run(whole, requests, readout, **options)
                assert bits(run(by_layer, requests, readout, **options)) == bits(expected)
        assert by_layer.stats.rows_computed == whole.stats.rows_computed
        assert whole.stats.weight_reads == whole.stats.weight_bytes == 0
        assert by_layer.stats.weight_reads == by_layer.stats.steps < whole.stats.steps


def test_a_classification_head_and_an_adapter(tmp_path):
    folder = tiny_checkpoint(tmp_path, "llama", head="classifier", num_labels=3)
    adapter = write_adapter(tmp_path / "adapter", folder)
    request = [Request(np.arange(3, 20, dtype=np.int32) * 5, namespace=Namespace(adapter="a")), *asked(Readout("head"))]
    found = []
    for layerwise in ("off", "on"):
        with LLM(str(folder), adapters={"a": str(adapter)}, layerwise=layerwise) as llm:
            found.append(bits(run(llm, request[:1], Readout("head"), sharing="full", rows=5)))
            found[-1] += bits(run(llm, request[1:], Readout("head"), sharing="full", rows=5))
    assert found[0] == found[1]


def test_methods_give_the_same(plain):
    found = []
    for layerwise in ("off", "on"):
        with LLM(str(plain), layerwise=layerwise, dtype="float32", max_batch_rows=16) as llm:
            texts = ["yes the", "no the yes", "yes"]
            scores = [score.logprob for score in llm.score(texts, [" yes", " no", " the"])]
            labels = [repr(answer) for answer in llm.classify(texts, ["yes", "no"])]
            found.append((llm.embed(texts).tobytes(), scores, labels, repr(llm.rerank("yes", texts))))
    assert found[0] == found[1]


# Counts ---------------------------------------------------------------------------------------------------------------


class CountingLoader(Loader):
    """Counts how often each tensor is read; `fails` calls of `load_layers` end as if memory ran out."""

    def __init__(self, *arguments, fails=(), **options):
        super().__init__(*arguments, **options)
        self.read, self.loads, self.fails = Counter(), 0, set(fails)

    def count(self, weight):
        self.read.update(name for name, _ in weight.parts)
        super().count(weight)

    def load_layers(self, first, stop):
        self.loads += 1
        if self.loads in self.fails:
            raise MemoryError("made up")
        super().load_layers(first, stop)


def counted(path, **options):
    """An engine layer by layer, the loader, which counts, and the bytes of the model's weights."""
    found = resolve(str(path))
    config = config_from(found.config)
    model = load_native(found, config, dtype="float32", layerwise="on")
    source = open_source(found, config, shapes_of(model.program.weights), 0, {})
    loader = CountingLoader(model, source, {}, pool=Arena(), **options)
    sizes = sizes_of(model.program.weights, model.dtype, {})
    loader.check_memory(found, sizes)
    model.loader = loader
    worker = NativeWorker(model, parts=native_parts(model, found))
    return ModelEngine(worker, EngineOptions(max_batch_rows=5)), loader, sizes


class Holder:
    """What `run` needs of an LLM."""

    def __init__(self, engine):
        self.engine = engine


def test_each_weight_is_read_once_a_window(plain):
    engine, loader, sizes = counted(plain)
    names = {name for weight in sizes for name, _ in weight.parts}
    layers = {name for name in names if name.startswith("layers.")}
    run(Holder(engine), asked(Readout("last")), Readout("last"), sharing="full", rows=5)
    assert engine.stats.weight_reads == 1
    assert {loader.read[name] for name in names - {"lm_head.weight"}} == {1}
    assert not loader.read["lm_head.weight"], "no logits are read"
    before = loader.read.copy()
    run(Holder(engine), asked(READOUTS[2]), READOUTS[2], sharing="full", rows=5, window=20)
    windows = engine.stats.weight_reads - 1
    assert windows > 2
    read = loader.read - before
    assert {read[name] for name in layers} == {windows}
    assert read["embed_tokens.weight"] == read["lm_head.weight"] == windows
    assert engine.stats.weight_bytes == loader.bytes_read


def test_the_bytes_of_a_window_are_those_of_the_file(plain):
    found = resolve(str(plain))
    config = config_from(found.config)
    source = open_source(found, config, shapes_of(config.program().weights), 0, {})
    foreseen = sum(extent.size for extent in window_extents(source, config))
    with LLM(str(plain), layerwise="on") as llm:
        run(llm, asked(READOUTS[2]), READOUTS[2], sharing="full", rows=5)
        assert (llm.stats.weight_reads, llm.stats.weight_bytes) == (1, foreseen)
    data = (plain / "model.safetensors").stat().st_size
    assert data - 10_000 < foreseen < data, "all but the header"


def test_one_part_of_the_weights_is_in_memory(tmp_path):
    engine, loader, sizes = counted(tiny_checkpoint(tmp_path, "qwen3", num_hidden_layers=8))
    run(Holder(engine), asked(READOUTS[2]), READOUTS[2], sharing="full", rows=5)
    assert loader.most_bytes <= loader.needed < sum(sizes.values()) / 3
    assert engine.worker.model.memory.num_bytes == 0


def test_memory_is_used_again():
    arena = Arena()
    first = [arena.take((size,)) for size in (1 << 24, 100, 5)]
    addresses, held = [array.ctypes.data for array in first], arena.num_bytes
    arena.rewind()
    again = [arena.take((size,)) for size in (1 << 24, 100, 5)]
    assert [array.ctypes.data for array in again] == addresses
    assert arena.num_bytes == held
    arena.rewind()
    small, large = arena.take((10,)), arena.take((1 << 23,))
    small[:], large[:] = 1, 2
    assert (small == 1).all() and arena.num_bytes == held
    assert all(array.ctypes.data % 64 == 0 for array in (*again, small, large))


# Memory ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["qwen3", "lfm2_moe"])
def test_too_little_memory_changes_no_result(tmp_path, kind):
    """A window that fails runs again in halves, and goes on from where the window before it ended."""
    path, readout, results, reads = checkpoint(tmp_path, kind), Readout("mean"), [], []
    for fails in ((), (2, 6, 12)):
        engine, loader, _ = counted(path, fails=fails)
        results.append(run(Holder(engine), asked(readout), readout, sharing="full", rows=5, window=20))
        reads.append(engine.stats.weight_reads)
    for one, other in zip(*results, strict=True):  # the steps after a failure have fewer rows
        np.testing.assert_allclose(one.values, other.values, rtol=0, atol=1e-5)
    assert reads[1] > reads[0] and loader.loads > 12


def test_windows_have_as_many_rows_as_memory_holds(plain, free_memory):
    free_memory(1 << 30)
    with LLM(str(plain), layerwise="on") as llm:
        large = llm.worker.facts.of(LayerwiseFacts).max_rows
    free_memory(2_000_000)
    with LLM(str(plain), layerwise="on", max_batch_rows=5) as llm:
        small = llm.worker.facts.of(LayerwiseFacts).max_rows
        seen = []
        start = llm.worker.start
        llm.worker.start = lambda message, *given: seen.append(message) or start(message, *given)
        run(llm, [as_request([i % 300, *range(8)]) for i in range(600)], Readout("last"), sharing="off", rows=5)
    assert small < large == 1 << 16
    sizes = [message.num_rows for message in seen if isinstance(message, LayerwiseStep)]
    assert len(sizes) > 1 and max(sizes) <= small


def test_it_is_chosen_if_weights_do_not_fit(tmp_path, free_memory):
    folder = tiny_checkpoint(tmp_path, "qwen3", num_hidden_layers=12, tie_word_embeddings=True)
    size = (folder / "model.safetensors").stat().st_size
    with LLM(str(folder), dtype="float32") as llm:
        assert "layer by layer" not in llm.passes
        expected = llm.embed(["yes the"])
    free_memory(size * 3 // 4)
    with LLM(str(folder), dtype="float32") as llm:
        assert "layer by layer" in llm.passes
        assert llm.embed(["yes the"]).tobytes() == expected.tobytes()
        with pytest.raises(OutOfMemoryError, match=r"--layerwise.*generation.*GB are free"):
            llm.generate(["yes the"], max_tokens=2)
        assert llm.embed(["yes the"]).tobytes() == expected.tobytes()
    with pytest.raises(OutOfMemoryError, match="needs"):
        LLM(str(folder), dtype="float32", layerwise="off")
    free_memory(size // 100)
    with pytest.raises(OutOfMemoryError, match="largest part"):
        LLM(str(folder), dtype="float32")


def test_random_weights_are_not_read_layer_by_layer_by_themselves(free_memory):
    free_memory(300_000_000)
    with pytest.raises(OutOfMemoryError, match="needs"):
        LLM("smollm2-135m", load_format="dummy", dtype="float32")


# What it does not serve -----------------------------------------------------------------------------------------------


def test_what_needs_all_weights_is_refused_by_name(plain, tmp_path):
    with LLM(str(plain), layerwise="on") as llm, pytest.raises(InputError, match="generation") as error:
        llm.generate(["yes"], max_tokens=1)
    assert error.value.field == "layerwise"
    with LLM(str(plain), layerwise="on", cache_prefill=True) as llm, pytest.raises(InputError, match="cache_prefill"):
        llm.embed(["yes"])
    with pytest.raises(InputError, match="split over ranks"):
        LLM(str(plain), layerwise="on", tensor_parallel=2)
    with pytest.raises(InputError, match="holds all weights"):
        LLM(str(plain), layerwise="on", executor="torch")
    with pytest.raises(InputError, match="int8"):
        LLM(str(plain), layerwise="on", arithmetic="int8")


@pytest.mark.parametrize(("make", "reason"), [(looped_checkpoint, "looped"), (tiny_vision, "images")])
def test_models_that_need_all_weights_say_why(tmp_path, make, reason):
    folder = make(tmp_path, {"looped": "ouro", "images": "gemma3"}[reason])
    with pytest.raises(InputError, match=f"layerwise is on, and .*{reason}"):
        LLM(str(folder), layerwise="on")


# The command line -----------------------------------------------------------------------------------------------------


@pytest.fixture
def texts(tmp_path):
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(f'{{"text": "yes the {number} no"}}\n' for number in range(8)))
    return str(path)


def prefold(*arguments: str):
    result = CliRunner().invoke(main, arguments)
    assert result.exception is None or isinstance(result.exception, (SystemExit, PrefoldError)), result.exception
    return result


def test_a_job_says_what_it_read_and_a_plan_foretells_it(plain, texts, tmp_path):
    job = ["--task", "classify", "--labels", "yes,no", "-m", str(plain), texts, "--layerwise", "on"]
    planned = prefold("plan", *job, "--gflops", "1", "--json")
    layerwise = json.loads(planned.stdout)["layerwise"]
    ran = prefold("run", *job, "-o", str(tmp_path / "by-layer.jsonl"))
    assert ran.exit_code == 0, ran.output
    assert "layerwise 1 window went through the model layer by layer" in ran.output
    read = re.search(r"  read +(.*) of weights, once a window", ran.output)[1]
    assert (layerwise["windows"], format_bytes(layerwise["total"])) == (1, read)
    told = prefold("plan", *job, "--gflops", "1").stdout
    assert f"layer by layer: about 1 window, each reads {read} of weights; about 0.0 s at" in told
    job[-1] = "off"
    assert "layer by layer" not in prefold("plan", *job, "--gflops", "1").stdout
    assert prefold("run", *job, "-o", str(tmp_path / "whole.jsonl")).exit_code == 0
    assert (tmp_path / "whole.jsonl").read_bytes() == (tmp_path / "by-layer.jsonl").read_bytes()


def test_generation_and_a_server_name_the_option(plain, texts, tmp_path):
    ran = prefold("generate", texts, "-m", str(plain), "--layerwise", "on", "-o", str(tmp_path / "out.jsonl"))
    assert ran.exit_code != 0 and "--layerwise" in ran.output + str(ran.exception)
    ran = prefold("serve", "-m", str(plain), "--layerwise", "on")
    assert ran.exit_code != 0 and "--layerwise on" in ran.output + str(ran.exception)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(psutil, "RLIMIT_AS"), reason="no limits of a process")
def test_a_process_may_be_smaller_than_the_weights(tmp_path):
    """The benchmark runs a model whose weights are larger than the memory that its process may have."""
    script = Path(__file__).parents[3] / "benchmarks" / "layerwise.py"
    found = tmp_path / "found.json"
    done = subprocess.run([sys.executable, script, "--smoke", "--json", found], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(found.read_text())
    assert result["same bits"] and result["limit bytes"] < result["weight bytes"]
