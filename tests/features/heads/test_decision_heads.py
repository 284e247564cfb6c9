"""Decision heads with random weights: against transformers if it reads them, else against their formulas."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace

import pytest
import torch
import transformers
from adapters import write_adapter
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from tiny import SIZES, randomise, reference, tiny_checkpoint, write_tokenizer
from tokenizers import AddedToken, Tokenizer

from prefold import LLM, CheckpointError, InputError, UnsupportedModelError
from prefold.cli import main

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
    with pytest.raises(InputError, match="reads text"):
        llm.decide([[{"type": "image_url", "image_url": "x"}]], QUESTIONS)
    with pytest.raises(InputError, match="does not work with vLLM's prompt"):
        llm.decide("x", QUESTIONS, prompt_style="vllm")
    llm.close()
    del judge["adapter_subfolder"]
    (folder / "judge_config.json").write_text(json.dumps(judge))
    with pytest.raises(CheckpointError, match="names the folder 'adapter', which does not exist"):
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
        ({"attention_mode": "noncausal_full_attention"}, "see the tokens behind them"),
        ({"prompt": "other"}, "prompt is 'other'"),
        ({"pooling": "mean"}, "pooling is 'mean'; only 'last' works"),
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
    with pytest.raises(InputError, match="reads text only"):
        llm.decide("x", QUESTIONS, images=["a.png"])
    with pytest.raises(InputError, match="first works with the default prompt"):
        llm.decide("x", QUESTIONS, first="question")
    llm.close()


def test_heads_that_do_not_fit_are_refused_at_load(tmp_path):
    folder = tiny_checkpoint(tmp_path, "qwen3")
    write_kev(folder, option_isolation=True)
    with pytest.raises(UnsupportedModelError, match="option_isolation of head"):
        LLM(str(folder))
    write_kev(folder, head_dim=9)
    with pytest.raises(CheckpointError, match=r"'k.bias': the file has the shape \[8\], the head needs .* \[9\]"):
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


def test_a_job_with_a_head(tmp_path, monkeypatch):
    """A table, its plan, and a batch line."""
    folder = tiny_checkpoint(tmp_path, "qwen3", max_position_embeddings=2048)
    with_tokens(folder, DELIMITERS)
    write_kev(folder)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "q.json").write_text(json.dumps(QUESTIONS))
    (tmp_path / "in.csv").write_text("text\nI was charged\nthanks\n")
    line = {"custom_id": "1", "method": "POST", "url": "/v1/systemone"}
    line["body"] = {"state": "thanks", "questions": QUESTIONS}
    (tmp_path / "batch.jsonl").write_text(json.dumps(line) + "\n")
    model = ("-m", str(folder), "--dtype", "float32")

    def run(*arguments):
        done = CliRunner().invoke(main, [*arguments, *model])
        assert done.exit_code == 0, done.output
        return done.output

    run("decide", "in.csv", "--state", "text", "--questions", "q.json", "-o", "out.jsonl")
    run("run", "batch.jsonl", "-o", "answers.jsonl")
    found = [json.loads(text)["answers"] for text in (tmp_path / "out.jsonl").read_text().splitlines()]
    body = json.loads((tmp_path / "answers.jsonl").read_text())["response"]["body"]
    with LLM(str(folder), dtype="float32") as llm:
        expected = llm.decide(["I was charged", "thanks"], QUESTIONS)
    for answers, decision in zip(found, expected, strict=True):
        for name, one in answers.items():
            assert one["value"] == pytest.approx(decision[name].value, abs=1e-4) and one.get("label_mass") is None
    noul = expected[1]["refund"].probabilities["true"]
    assert body["answers"]["refund"] == {"type": "noul", "noul": pytest.approx(noul, abs=1e-4)}
    assert body["usage"]["input_tokens"] == expected[1].num_tokens
    task = ("--task", "decide", "--state", "text", "--questions", "q.json", "--json")
    assert json.loads(run("plan", "in.csv", *task)).get("other_order") is None


def test_a_head_without_its_weights_is_not_left_out(tmp_path):
    folder = tiny_checkpoint(tmp_path, "qwen3")
    write_kev(folder)
    with LLM(str(folder), load_format="dummy") as llm, pytest.raises(UnsupportedModelError, match="head of its head"):
        llm.decide("x", QUESTIONS)


# ------------------------------------------------------------------------------------- Decision 2.0


class CandidateHead(torch.nn.Module):
    """The head by its published formula."""

    def __init__(self, size):
        super().__init__()
        self.candidate_norm, self.query_norm = torch.nn.LayerNorm(HIDDEN), torch.nn.LayerNorm(HIDDEN)
        self.key, self.query, self.query_mlp = (torch.nn.Linear(HIDDEN, size, bias=False) for _ in range(3))
        self.candidate_mlp, self.scalar = torch.nn.Linear(HIDDEN, size), torch.nn.Linear(size, 1, bias=False)

    def forward(self, options, end):
        c, q = self.candidate_norm(options), self.query_norm(end)
        mixed = torch.nn.functional.gelu(self.candidate_mlp(c) + self.query_mlp(q))
        return self.key(c) @ self.query(q) / self.key.out_features**0.5 + self.scalar(mixed)[:, 0]


HYBRID = {"num_hidden_layers": 4, "num_attention_heads": 4, "head_dim": 16, "linear_num_key_heads": 2,
          "linear_num_value_heads": 4, "linear_key_head_dim": 6, "linear_value_head_dim": 10}  # fmt: skip
DECISION2_ROWS = {
    "refund": ("noul", "money back?", [("false", "No"), ("true", "yes it is")]),
    "tone": ("choice", '{"ask":"tone"}', [("calm", None), ("angry", "loud"), ("sad", "")]),
    "urgency": ("score", "null", [("0", "can wait"), ("1", "today"), ("2", {"now": 1})]),
}


def write_decision2(tmp_path, family="qwen3", size=8):
    package = tmp_path / "package"
    if family == "qwen3_5":
        model = transformers.Qwen3_5TextModel(
            transformers.Qwen3_5TextConfig(**SIZES | HYBRID | {"max_position_embeddings": 2048})
        )
        randomise(model, 0, norm=0)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("linear_attn.norm.weight"):  # which is not stored less one
                    parameter.add_(1)
        model.save_pretrained(package / "backbone")
        write_tokenizer(package / "backbone")
    else:
        shutil.copytree(
            tiny_checkpoint(tmp_path, family, head="bare", max_position_embeddings=2048), package / "backbone"
        )
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (package / "backbone" / name).rename(package / name)
    torch.manual_seed(3)
    head = CandidateHead(size).double()
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    save_file(
        {name: tensor.float() for name, tensor in head.state_dict().items()}, package / "decision_head.safetensors"
    )
    files = {
        "config.json": {"decision_format": "vllm-sr-decision", "format_version": 2, "model_type": "decision2"},
        "decision_config.json": {
            "prompt_version": "decision2-segmented-options-global-query-v1", "head_dim": size, "max_options": 5,
        },
        "MODEL_MANIFEST.json": {
            "profile": "qwen-full", "max_input_tokens": 700, "calibration": {"file": "heat.json"},
            "score_bias": {"file": "bias.json"},
        },
        "heat.json": {"temperature_by_type": {"noul": 2.0, "choice": 1.5, "score": 0.7}},
        "bias.json": {"offsets": {"3": [0.1, -0.2, 0.4], "2": [9.0, 0.0]}},
    }  # fmt: skip
    for name, value in files.items():
        (package / name).write_text(json.dumps(value))
    return package, head


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5"])
def test_a_head_of_decision_2(tmp_path, family):
    package, head = write_decision2(tmp_path, family)
    tokenizer = Tokenizer.from_file(str(package / "tokenizer.json"))
    llm = LLM(str(package), dtype="float32")

    def encode(text):
        return tokenizer.encode(text, add_special_tokens=False).ids

    def dumps(value):
        return json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(",", ":"))

    for state, text in [("I was charged", "I was charged"), ({"b": "é", "a": [1, None]}, '{"a":[1,null],"b":"é"}')]:
        found = probabilities(llm.decide([state], QUESTIONS)[0])
        for name, (kind, asked, options) in DECISION2_ROWS.items():
            ids, ends = encode(f"Context:\n{text}\n\nTask type: {kind}\nQuestion:\n{asked}\nOptions:"), []
            for key, said in options:
                ids += encode("\n<option>\n" + dumps({"key": key, "description": said}) + "\n</option>")
                ends.append(len(ids) - 1)
            ids += encode("\n\nSelect the single option best supported by the context and instructions.\nDecision:")
            states = hidden_states(package / "backbone", ids)
            scores = head(states[ends], states[-1]) + (torch.tensor([0.1, -0.2, 0.4]) if kind == "score" else 0)
            expected = (scores / {"noul": 2.0, "choice": 1.5, "score": 0.7}[kind]).softmax(0).tolist()
            of = list(found[name].values())
            assert (of[::-1] if name == "refund" else of) == pytest.approx(expected, abs=1e-4), (state, name)
    with pytest.raises(InputError, match="the model's limit is 700"):
        llm.decide("long " * 300, QUESTIONS)
    with pytest.raises(InputError, match="at most 5"):
        llm.decide("x", {"q": {"type": "choice", "criteria": dict.fromkeys("abcdef")}})
    identity = llm.identity
    llm.close()
    weights = package / "backbone" / "model.safetensors"
    save_file({name: tensor * 1.5 for name, tensor in load_file(weights).items()}, weights)
    with LLM(str(package), dtype="float32") as other:
        assert other.identity != identity


def test_packages_that_cannot_be_read_are_refused(tmp_path):
    package, _ = write_decision2(tmp_path)
    for name, key, value in [
        ("MODEL_MANIFEST.json", "profile", "qwen-adapter"), ("config.json", "format_version", 1),
        ("decision_config.json", "head_variant", "type-separated"), ("decision_config.json", "prompt_version", "v2"),
    ]:  # fmt: skip
        content = json.loads((package / name).read_text())
        (package / name).write_text(json.dumps(content | {key: value}))
        with pytest.raises(UnsupportedModelError, match=f"{key} is {value!r}"):
            LLM(str(package))
        (package / name).write_text(json.dumps(content))
    (package / "backbone" / "config.json").unlink()
    with pytest.raises(CheckpointError, match="needs backbone/config"):
        LLM(str(package))


# ------------------------------------------------------------------------------------- clef

CLEF = {"hidden_size": HIDDEN, "width": 12, "routing_layers": 2, "layers": 2, "heads": 3, "feedforward": 20}


class JointHead(torch.nn.Module):
    """The head by its published description, of torch's modules."""

    def __init__(self, hidden_size, width, routing_layers, layers, heads, feedforward):
        super().__init__()
        nn, names = torch.nn, ("memory", "question", "option_question", "global", "option_context", "option_lexical")
        self.hidden_norm = nn.LayerNorm(hidden_size)
        for name in names:
            setattr(self, f"{name}_projection", nn.Linear(hidden_size, width, bias=False))
        self.type_embedding = nn.Embedding(3, width)
        self.evidence_layers = nn.ModuleList()
        for _ in range(routing_layers):
            layer = nn.Module()
            layer.query_norm, layer.memory_norm, layer.feedforward_norm = (nn.LayerNorm(width) for _ in range(3))
            layer.attention = nn.MultiheadAttention(width, heads, batch_first=True)
            parts = (nn.Linear(width, feedforward), nn.GELU(), nn.Identity(), nn.Linear(feedforward, width))
            layer.feedforward = nn.Sequential(*parts)
            self.evidence_layers.append(layer)
        self.option_summary_norm, self.field_norm, self.option_norm = (nn.LayerNorm(width) for _ in range(3))
        kind = {"dropout": 0.0, "activation": "gelu", "batch_first": True, "norm_first": True}
        blocks = (nn.TransformerDecoderLayer(width, heads, feedforward, **kind) for _ in range(layers))
        self.layers = nn.ModuleList(blocks)
        self.residual_scorer = nn.Sequential(nn.Linear(4 * width, width), nn.GELU(), nn.Identity(), nn.Linear(width, 1))
        for name in ("prior_logit_scale", "joint_logit_scale", "residual_gate"):
            setattr(self, name, nn.Parameter(torch.zeros(())))

    def forward(self, states, lexical, questions):
        """questions: (type, span, spans of options); lexical: a row for each option."""
        states = self.hidden_norm(states)
        memory, last = self.memory_projection(states)[None], states[-1]
        vectors = torch.stack([states[slice(*span)].mean(0) for _, span, _ in questions])
        out, place, options, fields = [], 0, [], []
        counts = [len(spans) for _, _, spans in questions]
        for vector, (_, _, spans) in zip(vectors, questions, strict=True):
            context = torch.stack([states[slice(*span)].mean(0) for span in spans])
            own = lexical[place : place + len(spans)]
            place += len(spans)
            options.append(
                self.option_context_projection(context) + self.option_lexical_projection(own)
                + self.option_question_projection(vector)
            )  # fmt: skip
        options = torch.cat(options)[None]
        for layer in self.evidence_layers:
            seen = layer.memory_norm(memory)
            options = options + layer.attention(layer.query_norm(options), seen, seen, need_weights=False)[0]
            options = options + layer.feedforward(layer.feedforward_norm(options))
        options = options[0].split(counts)
        for (kind, _, _), vector, own in zip(questions, vectors, options, strict=True):
            base = self.question_projection(vector)
            summary = (own @ base / len(base) ** 0.5).softmax(0) @ own
            field = base + self.option_summary_norm(summary) + self.global_projection(last)
            fields.append(field + self.type_embedding(torch.tensor(kind)))
        fields = torch.stack(fields)[None]
        for layer in self.layers:
            fields = layer(fields, memory)
        fields, place = self.field_norm(fields[0]), 0
        similar = torch.nn.functional.cosine_similarity
        for vector, field, own in zip(vectors, fields, options, strict=True):
            meant = lexical[place : place + len(own)]
            place += len(own)
            prior = self.prior_logit_scale.clamp(max=math.log(100)).exp() * similar(meant, (vector + last)[None])
            own, same = self.option_norm(own), field.expand(len(own), -1)
            features = torch.cat([same, own, same * own, (same - own).abs()], -1)
            joint = self.joint_logit_scale.clamp(max=math.log(100)).exp() * similar(same, own)
            joint = joint + self.residual_scorer(features)[:, 0]
            out.append(prior + torch.sigmoid(self.residual_gate) * joint)
        return out


def write_clef(folder):
    torch.manual_seed(5)
    head = JointHead(**CLEF).double().eval()
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.5 + (1.0 if name.endswith("norm.weight") else 0.0))
        head.prior_logit_scale.fill_(6.0)  # more than the most that it may be
    save_file({name: tensor.float() for name, tensor in head.state_dict().items()}, folder / "joint_head.safetensors")
    (folder / "joint_head_config.json").write_text(json.dumps(CLEF))
    return head


def clef_layout(work):
    """The ids of a prompt of all questions, and [type, span, spans of options] of each as the marks say."""
    ((_, _, (marks, _)),) = work.note["prompts"]
    pairs = [list(pair) for pair in zip(marks[::2], marks[1::2], strict=True)]
    layout = []
    for _, kind, options, _ in work.note["questions"]:
        first, *spans = [pairs.pop(0) for _ in range(1 + len(options))]
        layout.append([["noul", "choice", "score"].index(kind), first, spans])
    return [work.requests[-1].tokens.tolist(), layout]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_joint_schema_head(tmp_path, dtype):
    folder = tiny_checkpoint(tmp_path, "qwen3", max_position_embeddings=2048)
    head = write_clef(folder)
    questions = QUESTIONS | {"other": {"type": "choice", "instructions": "", "criteria": {"b": None, "a": "x"}}}
    # Only the file is in another type: the rows of the LM head are read from it.
    stored = {name: tensor.to(dtype) for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    with LLM(str(folder), dtype="float32") as llm:
        for state in STATES if dtype == torch.float32 else STATES[:1]:
            (work,) = llm.task("decide").prepare([{"state": state, "questions": questions}])
            ids, layout = clef_layout(work)
            assert [request.tokens.size for request in work.requests] == [*range(1, len(ids) + 1)]
            states = hidden_states(folder, ids)
            table = stored["lm_head.weight"].double()
            spans = [span for _, _, spans in layout for span in spans]
            lexical = torch.stack([table[ids[first:end]].mean(0) for first, end in spans])
            with torch.no_grad():
                expected = dict(zip(questions, head(states, lexical, layout), strict=True))
            before = replace(llm.stats)
            decision = llm.decide([state], questions)[0]
            assert llm.stats.rows_computed - before.rows_computed == len(ids) == decision.num_tokens
            for name, scores in expected.items():
                given = [str(option) for option in decision[name].probabilities]
                # The head reads the options of a choice in alphabetical order.
                shown = sorted(given) if questions[name]["type"] == "choice" else given
                found = [probabilities(decision)[name][option] for option in shown]
                assert found == pytest.approx(scores.softmax(0).tolist(), abs=1e-4), (state, name)
        text = llm.tokenizer.decode(ids)
        assert text.startswith("<|im_start|>system\nRead the complete state") and text.endswith(
            "JOINT SCHEMA DECISIONS:"
        )
        assert "FIELD 4\nID: other\nTYPE: choice\nINSTRUCTION: other\nALLOWED OPTIONS:\nOPTION 1: {" in text
        alone = probabilities(llm.decide(STATES[0], {"tone": questions["tone"]}))
        assert alone["tone"] != probabilities(llm.decide([STATES[0]], questions)[0])["tone"]
