"""Each variant of the kernels that this machine runs: whole models beside PyTorch without kernels, and all tests of
products and attention."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from blocks import VOCAB, write_model
from tiny import tiny_checkpoint

from prefold.kernels import loader
from prefold.kernels.compile import find_compiler, runnable, variants

pytestmark = [pytest.mark.slow, pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler")]

PARTS = ("products", "block_products", "int8_products", "elementwise", "logits")
# Prints what a model gives: embeddings, log-probabilities, and tokens that were drawn greedily for 1, 5 and 40 prompts,
# half of which begin as another prompt does.
SCRIPT = """
import json, sys
import numpy as np
from prefold import LLM, kernels

path, weights, vocabulary = sys.argv[1], sys.argv[2], int(sys.argv[3])
rng = np.random.default_rng(0)
prompts = [rng.integers(4, vocabulary, int(rng.integers(3, 60))).tolist() for _ in range(20)]
prompts += [prompt[: len(prompt) // 2] + rng.integers(4, vocabulary, 9).tolist() for prompt in prompts]
with LLM(path, device="cpu", dtype="float32", weights=weights) as llm:
    print(json.dumps({
        "kernels": kernels.status(),
        "passes": llm.passes,
        "embeddings": llm.embed(prompts, pooling="mean").tolist(),
        "scores": [one.logprob for one in llm.score(prompts, [prompt[:3] for prompt in reversed(prompts)])],
        "tokens": [
            [list(one.tokens) for one in llm.generate(prompts[:count], max_tokens=12, ignore_eos=True)]
            for count in (1, 5, len(prompts))
        ],
    }))
"""


def results(path: Path, weights: str, vocabulary: int, **environment: str) -> dict:
    plain = {name: value for name, value in os.environ.items() if name not in ("PREFOLD_ISA", "PREFOLD_KERNELS")}
    command = [sys.executable, "-c", SCRIPT, str(path), weights, str(vocabulary)]
    done = subprocess.run(command, env=plain | environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"exit status {done.returncode}: {done.stderr[-3000:]}"
    return json.loads(done.stdout)


def skip_unless_runnable(name: str) -> None:
    if name not in [variant.name for variant in runnable(loader.process.probe())]:
        pytest.skip(f"this machine cannot run {name}")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Paths of models with how their weights lie in memory, the size of the vocabulary, and what they give without
    kernels."""
    folder = tmp_path_factory.mktemp("variants")
    kinds = {"attn_v": "Q6_K", "ffn_down": "Q5_K", "attn_q": "Q8_0", "ffn_up": "Q4_0", "ffn_gate": "Q4_0"}
    mixed = write_model(folder / "mixed.gguf", lambda name: kinds.get(name.rpartition(".")[2], "Q4_K"))
    made = [(tiny_checkpoint(folder, family), "dtype", 100) for family in ("llama", "gemma3", "qwen3")]
    made.append((mixed, "file", VOCAB))

    @cache
    def expected(number: int) -> dict:
        path, _, vocabulary = made[number]
        return results(path, "dtype", vocabulary, PREFOLD_KERNELS="0")

    return made, expected


@pytest.mark.parametrize("number", range(4), ids=["llama", "gemma3", "qwen3", "gguf"])
@pytest.mark.parametrize("name", [variant.name for variant in variants()])
def test_a_model_gives_what_it_gives_without_kernels(models, name, number):
    skip_unless_runnable(name)
    made, expected = models
    found, wanted = results(*made[number], PREFOLD_ISA=name), expected(number)
    assert found["kernels"].endswith(f": {name}") and wanted["kernels"].startswith("PyTorch")
    assert ("as stored" in found["passes"]) == (made[number][1] == "file")
    np.testing.assert_allclose(found["embeddings"], wanted["embeddings"], rtol=0, atol=1e-4)
    np.testing.assert_allclose(found["scores"], wanted["scores"], rtol=0, atol=1e-3)
    assert found["tokens"] == wanted["tokens"]


@pytest.mark.parametrize("name", [variant.name for variant in variants()])
def test_products_and_attention_are_those_of_the_references(name):
    skip_unless_runnable(name)
    tests = Path(__file__).parents[1]
    files = [tests / "worker" / "attention", *(tests / "kernels" / f"test_{part}.py" for part in PARTS)]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", *map(str, files)]
    environment = os.environ | {"PREFOLD_ISA": name}
    done = subprocess.run(command, env=environment, cwd=tests.parent, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:]
    assert "is ignored" not in done.stdout + done.stderr
