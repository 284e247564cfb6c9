"""What one request makes of NaN and infinity stays with it: its text ends with an error, and the others go on."""

from __future__ import annotations

import numpy as np
import pytest
from running import as_request, run
from safetensors.torch import load_file, save_file
from tiny import tiny_checkpoint

from prefold import LLM, InputError
from prefold.spec.requests import Readout
from prefold.tasks.sampling import seed_at

BAD = 50  # the id of a token whose embedding is poisoned

OPTIONS = {
    "greedy": {},
    "drawn": {"temperature": 1.0, "seed": 3},
    "filtered": {"temperature": 1.0, "top_p": 0.9, "seed": 3},
    "log-probabilities": {"logprobs": 2},
    "penalties": {"repetition_penalty": 1.2, "logit_bias": {7: 1.0}, "min_tokens": 2},
    "samples": {"temperature": 1.0, "n": 3, "seed": 3},
    "regex": {"grammar": {"regex": "[a-z]+"}},
}
PROMPTS = [[60, 61, 62], [60, 61, BAD, 63], [60, 61, 62, 64], [BAD], [90, 91]]


def poisoned(folder, value: float, head: float = 0.5) -> LLM:
    """A model whose embedding of BAD is `value`, and whose head's weights for token 5 are `head`."""
    path = tiny_checkpoint(folder, "llama", num_hidden_layers=2, tie_word_embeddings=False)
    weights = path / "model.safetensors"
    tensors = load_file(weights)
    (name,) = (name for name in tensors if name.endswith("embed_tokens.weight"))
    tensors[name][BAD] = value
    tensors["lm_head.weight"][5] = head
    save_file(tensors, weights, metadata={"format": "pt"})
    return LLM(str(path), dtype="float32", device="cpu")


@pytest.fixture(scope="module", params=[float("nan"), float("inf")], ids=str)
def llm(request, tmp_path_factory) -> LLM:
    return poisoned(tmp_path_factory.mktemp("poisoned"), request.param)


@pytest.mark.parametrize("name", OPTIONS)
def test_a_text_without_finite_logits_is_an_error(llm, name):
    options = {"max_tokens": 5, "ignore_eos": True, "logit_bias": {BAD: -100.0}} | OPTIONS[name]
    if "grammar" in options:
        pytest.importorskip("llguidance")
        del options["ignore_eos"]
    answers = llm.generate(PROMPTS, errors="return", **options)
    for place, (prompt, answer) in enumerate(zip(PROMPTS, answers, strict=True)):
        if BAD in prompt:
            assert isinstance(answer, InputError), name
            assert answer.code == "not_finite"
            assert "float32" in str(answer)
        else:
            seed = {"seed": seed_at(options["seed"], place)} if "seed" in options else {}
            assert str(answer) == str(llm.generate(prompt, **options | seed))


@pytest.mark.parametrize("sharing", ["full", "mlp", "off"])
@pytest.mark.parametrize("rows", [4096, 5, 1])
def test_means_of_other_texts_are_what_they_are_alone(llm, sharing, rows):
    found = run(llm, [as_request(prompt) for prompt in PROMPTS], Readout("mean"), sharing=sharing, rows=rows)
    for prompt, result in zip(PROMPTS, found, strict=True):
        if BAD in prompt:
            assert not np.isfinite(result.values).all()
        else:
            (alone,) = run(llm, [as_request(prompt)], Readout("mean"), sharing="off", rows=4096)
            np.testing.assert_allclose(result.values, alone.values, atol=1e-5)


def test_one_damaged_logit_is_enough(tmp_path):
    llm = poisoned(tmp_path, 0.5, head=float("nan"))
    for options in ({}, {"temperature": 1.0}):
        with pytest.raises(InputError, match="not finite") as caught:
            llm.generate([60, 61], **options)
        assert caught.value.code == "not_finite"


@pytest.mark.parametrize("method", ["embed", "classify", "score", "rerank"])
def test_a_result_that_is_no_number_is_the_error_of_its_item(llm, method):
    call = {
        "embed": llm.embed,
        "classify": lambda texts, **options: llm.classify(texts, ["yes", "no"], **options),
        "score": lambda texts, **options: llm.score(texts, [[65]] * len(texts), **options),
        "rerank": lambda texts, **options: llm.rerank([60], texts, template="{query}{document}", **options),
    }[method]
    with pytest.raises(InputError, match=r"item 1 of \w+: .*not a finite number.*float32") as caught:
        call(PROMPTS)
    assert caught.value.code == "not_finite"
    found = call(PROMPTS, errors="return")
    if method == "rerank":
        assert sorted(found.order) == [0, 2, 4] and set(found.errors) == {1, 3}
        assert np.isfinite(found.scores).tolist() == [True, False, True, False, True]
        alone = call([PROMPTS[i] for i in (0, 2, 4)])
        np.testing.assert_allclose(found.scores[[0, 2, 4]], alone.scores, rtol=1e-5)
        found = [found.errors.get(i) for i in range(len(PROMPTS))]
    for prompt, one in zip(PROMPTS, found, strict=True):
        assert isinstance(one, InputError) == (BAD in prompt)
        assert BAD not in prompt or one.code == "not_finite"


def test_a_calibration_that_is_no_number_is_an_error(tmp_path):
    llm = poisoned(tmp_path, 0.5, head=float("nan"))
    with pytest.raises(InputError, match="not a finite number"):
        llm.classify(["a"], ["yes", "no"], calibrate=True)
