"""Keys and values that are kept in another dtype than rows have."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from running import prompts
from tiny import reference, tiny_checkpoint

from prefold import LLM
from prefold.errors import InputError

HOW = {"max_tokens": 12, "ignore_eos": True, "logprobs": 1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return str(tiny_checkpoint(tmp_path_factory.mktemp("model"), "qwen3"))


class RoundingCache:
    """A cache of transformers' that rounds what it is given, as a store does."""

    def __new__(cls):
        import transformers

        cache = transformers.DynamicCache()
        update = cache.update
        cache.update = lambda k, v, *more, **named: update(*(x.bfloat16().float() for x in (k, v)), *more, **named)
        return cache


@torch.inference_mode()
def logprobs_by_transformers(folder: str, prompt: list[int], tokens: list[int], **cache: object) -> np.ndarray:
    ids = torch.tensor([[*prompt, *tokens]])
    logits = reference(folder)(input_ids=ids, **cache).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1)[torch.arange(len(tokens)), torch.tensor(tokens)].numpy()


@pytest.mark.parametrize("compiled", [True, False], indirect=True)
@pytest.mark.parametrize("rows", [7, 256])
def test_generation_is_that_of_keys_and_values_that_were_rounded(folder, compiled, rows):
    differences = []
    with LLM(folder, dtype="float32", device="cpu", kv_dtype="bfloat16", max_batch_rows=rows) as llm:
        asked = [np.asarray(prompt).tolist() for prompt in prompts(3, count=6)]
        for prompt, output in zip(asked, llm.generate(asked, **HOW), strict=True):
            logprobs = np.array([token.logprob for token in output.logprobs])
            for cache in ({"past_key_values": RoundingCache()}, {}):
                differences.append(abs(logprobs - logprobs_by_transformers(folder, prompt, output.tokens, **cache)))
    rounded, not_rounded = np.concatenate(differences[::2]), np.concatenate(differences[1::2])
    # A number that lies between two of bfloat16 may be rounded to the other one.
    assert np.median(rounded) < 1e-4 and rounded.max() < 2e-3
    assert np.median(not_rounded) > 3 * np.median(rounded)


def test_a_slot_takes_half_of_the_memory(folder):
    sizes = []
    for kv_dtype in ("auto", "bfloat16"):
        with LLM(folder, dtype="float32", device="cpu", kv_dtype=kv_dtype) as llm:
            sizes.append(llm.engine.worker.facts.slot_bytes)
            assert ("kv_dtype" in llm.identity) == ("K/V in bfloat16" in llm.passes) == (kv_dtype != "auto")
    assert sizes[1] < 0.6 * sizes[0]


@pytest.mark.parametrize("dtype", ["float16"])
def test_a_dtype_that_is_kept_as_it_is(folder, dtype):
    with pytest.raises(InputError, match="kv_dtype bfloat16 is not supported with dtype float16 on cpu") as error:
        LLM(folder, dtype=dtype, device="cpu", kv_dtype="bfloat16")
    assert error.value.field == "kv_dtype"
