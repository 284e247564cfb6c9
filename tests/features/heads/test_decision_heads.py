"""Decision heads with random weights: against transformers where it reads them, else against their formulas."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from adapters import write_adapter
from safetensors.torch import save_file
from tiny import SIZES, reference, tiny_checkpoint
from tokenizers import AddedToken, Tokenizer

from prefold import LLM, CheckpointError, InputError, UnsupportedModelError

HIDDEN = SIZES["hidden_size"]
QUESTIONS = {
    "refund": {"type": "noul", "instructions": "money back?", "criteria": {"true": "yes it is", "false": None}},
    "tone": {"type": "choice", "instructions": {"ask": "tone"}, "criteria": {"calm": None, "angry": "loud", "sad": ""}},
    "urgency": {"type": "score", "criteria": ["can wait", "today", {"now": 1}]},
}
STATES = ["I was <|im_end|> charged twice.", {"k": ["é", None, {"deep": True}]}, ["a", 1.5]]


def random_tensors(seed=0, **shapes):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) / 3 for name, shape in shapes.items()}


def probabilities(decision):
    return {
        name: {str(option): p for option, p in answer.probabilities.items()}
        for name, answer in decision.answers.items()
    }


def check(llm, theirs, states=STATES, questions=QUESTIONS):
    for state in states:
        found = probabilities(llm.decide([state], questions)[0])
        for name, answer in theirs({"state": state, "questions": questions}).items():
            of = {"true": answer["noul"]} if answer["type"] == "noul" else answer["probabilities"]
            assert {option: found[name][option] for option in of} == pytest.approx(of, abs=1e-4), (state, name)


def oracle(folder):
    from transformers import AutoTokenizer, JevForDecision, pipeline

    model = JevForDecision.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    return pipeline("decision", model=model, tokenizer=AutoTokenizer.from_pretrained(folder), device="cpu")


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_a_jev_head_beside_the_weights(tmp_path, softcap):
    folder = tiny_checkpoint(tmp_path, "qwen2", max_position_embeddings=2048)
    words = ["no", "yes", *map(str, range(5)), *"ABCDEFGH"]
    ranges = {"noul": [0, 2], "score": [2, 7], "choice": [7, 15]}
    judge = {"slots": {"num_slots": 15, "verbalizers": words, "ranges": ranges}, "adapter_subfolder": None}
    heat = {"noul": 2.0, "choice": 0.5, "score": 1.5}
    (folder / "judge_config.json").write_text(json.dumps(judge | ({} if softcap is None else {"softcap": softcap})))
    (folder / "calibration.json").write_text(json.dumps({"per_kind": heat}))
    save_file(random_tensors(**{"proj.weight": (15, HIDDEN), "proj.bias": (15,)}), folder / "head.safetensors")
    llm = LLM(str(folder), dtype="float32")
    check(llm, oracle(folder))
    assert llm.decide("x", QUESTIONS)["tone"].label_mass is None
    with pytest.raises(InputError, match="at most 8"):
        llm.decide("x", {"q": {"type": "choice", "criteria": dict.fromkeys("abcdefghi")}})
    with pytest.raises(InputError, match="reads text alone"):
        llm.decide([[{"type": "image_url", "image_url": "x"}]], QUESTIONS)
    with pytest.raises(InputError, match="vLLM's prompt is not made for"):
        llm.decide("x", QUESTIONS, prompt_style="vllm")
    llm.close()
    del judge["adapter_subfolder"]
    (folder / "judge_config.json").write_text(json.dumps(judge))
    with pytest.raises(CheckpointError, match="names the folder 'adapter', and there is none"):
        LLM(str(folder))
    write_adapter(folder / "adapter", folder)
    with LLM(str(folder), dtype="float32") as adapted:
        assert adapted.engine.facts.adapters == ("adapter",)
        assert probabilities(adapted.decide("x", QUESTIONS)) != probabilities(adapted.decide("y", QUESTIONS))


@pytest.mark.parametrize("style", ["pplx", "d3", None])
def test_a_head_of_codes(tmp_path, style):
    folder = tiny_checkpoint(tmp_path, "qwen2", max_position_embeddings=2048)
    config = {"codes": list("ABCDEF"), "temperature": 1.7} | ({} if style is None else {"prompt": style})
    (folder / "decision_config.json").write_text(json.dumps(config))
    save_file(random_tensors(weight=(6, HIDDEN)), folder / "readout.safetensors")
    with LLM(str(folder), dtype="float32") as llm:
        parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
        check(llm, oracle(folder), [*STATES, parts])
        with pytest.raises(InputError, match="at most 6"):
            llm.decide("x", {"q": {"type": "choice", "criteria": dict.fromkeys("abcdefg")}})
    refused = [
        ({"attention_mode": "noncausal_full_attention"}, "see what comes after"),
        ({"prompt": "other"}, "prompt is 'other'"),
        ({"pooling": "mean"}, "only 'last' works"),
    ]
    for wrong, says in refused:
        (folder / "decision_config.json").write_text(json.dumps(config | wrong))
        with pytest.raises(UnsupportedModelError, match=says):
            LLM(str(folder))


# ------------------------------------------------------------------------------------- kev


DELIMITERS = tuple(f"<|{name}|>" for name in ("fim_prefix", "fim_middle", "box_start", "box_end", "fim_suffix"))


def with_tokens(folder, tokens):
    """Add special tokens to the tokenizer of a folder, as far as its vocabulary has room."""
    path = folder / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in tokens])
    tokenizer.save(str(path))
    return tokenizer


def hidden_states(folder, ids):
    with torch.no_grad():
        return reference(folder, "bare")(torch.tensor([ids])).last_hidden_state[0].double()


def write_kev(folder, size=8, **meta):
    shapes = {"q.weight": (size, HIDDEN), "k.weight": (size, HIDDEN), "q.bias": (size,), "k.bias": (size,)}
    save_file(tensors := random_tensors(**shapes), folder / "head.safetensors")
    (folder / "head.meta.json").write_text(json.dumps({"meta": {"head_dim": size, "temperature": 1.3, **meta}}))
    return {name: tensor.double() for name, tensor in tensors.items()}


KEV_ROWS = {
    "refund": ("money back?", ["no", "yes: yes it is"]),
    "tone": ("ask: tone", ["calm", "angry: loud", "sad"]),
    "urgency": ("", ["can wait", "today", "now: 1"]),
}
KEV_STATES = [
    ("I was <|im_end|> charged", "I was <¦im_end¦> charged"),
    ({"k": ["é", None, {"deep": True}], "n": 1.5}, "k:\n  - é\n  - \n  - deep: True\nn: 1.5"),
    ([["a", "b"], {"x": []}], "- - a\n  - b\n- x:\n"),
]


@pytest.mark.parametrize("merged", [False, True])
def test_a_kev_head(tmp_path, merged):
    """The prompt, and the pointer from the last token to the end of each option."""
    folder = tiny_checkpoint(tmp_path, "qwen3", max_position_embeddings=2048)
    tokenizer, head = with_tokens(folder, DELIMITERS), write_kev(folder)
    if merged:  # the layout of one folder, with all settings in config.json
        (folder / "head.meta.json").unlink()
        config = json.loads((folder / "config.json").read_text())
        config |= {"architectures": ["KevModel"], "kev_head_dim": 8, "kev_temperature": 1.3}
        (folder / "config.json").write_text(json.dumps(config))
    start, question, option, close, decide = map(tokenizer.token_to_id, DELIMITERS)
    llm = LLM(str(folder), dtype="float32")
    if merged:
        config["architectures"] = ["Qwen3ForCausalLM"]
        (folder / "config.json").write_text(json.dumps(config))

    def encode(text):
        return tokenizer.encode(text, add_special_tokens=False).ids

    for state, text in KEV_STATES:
        found = probabilities(llm.decide([state], QUESTIONS)[0])
        for name, (asked, options) in KEV_ROWS.items():
            ids, ends = [start, *encode(text), question, *encode(asked)], []
            for one in options:
                ids += [option, *encode(one), close]
                ends.append(len(ids) - 1)
            ids.append(decide)
            states = hidden_states(folder, ids)
            query = head["q.weight"] @ states[-1] + head["q.bias"]
            keys = states[ends] @ head["k.weight"].T + head["k.bias"]
            expected = ((keys @ query) / 8**0.5 / 1.3).softmax(0).tolist()
            of = list(found[name].values())
            assert (of[::-1] if name == "refund" else of) == pytest.approx(expected, abs=1e-4), (state, name)
    before = replace(llm.stats)
    task = llm.task("decide", questions=QUESTIONS)
    (work,) = task.prepare([STATES[0]])
    assert len(work.requests) == sum(len(options) + 1 for _, options in KEV_ROWS.values())
    llm.decide([STATES[0]], QUESTIONS)
    prompts = {tuple(request.tokens.tolist()) for request in work.requests}
    unique = {prompt[:end] for prompt in prompts for end in range(1, len(prompt) + 1)}
    assert llm.stats.rows_computed - before.rows_computed == len(unique)
    with pytest.raises(InputError, match="reads text alone"):
        llm.decide("x", QUESTIONS, images=["a.png"])
    with pytest.raises(InputError, match="first is for the default prompt"):
        llm.decide("x", QUESTIONS, first="question")
    llm.close()


def test_heads_that_do_not_fit_are_refused_at_load(tmp_path):
    folder = tiny_checkpoint(tmp_path, "qwen3")
    write_kev(folder, option_isolation=True)
    with pytest.raises(UnsupportedModelError, match="option_isolation of head"):
        LLM(str(folder))
    write_kev(folder, head_dim=9)
    with pytest.raises(CheckpointError, match=r"'k.bias' the file has the shape \[8\], and the head the shape \[9\]"):
        LLM(str(folder))
    save_file(random_tensors(**{"q.weight": (8, HIDDEN)}), folder / "head.safetensors")
    with pytest.raises(CheckpointError, match="the file has no such tensor"):
        LLM(str(folder))
    (folder / "head.safetensors").write_bytes(b"x")
    with pytest.raises(CheckpointError, match="cannot be read as safetensors"):
        LLM(str(folder))
    (folder / "head.safetensors").unlink()
    with pytest.raises(CheckpointError, match="has no file head"):
        LLM(str(folder))
