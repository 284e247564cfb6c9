"""Decisions: prompts and probabilities are those of transformers' pipeline, and each row is computed once."""

from __future__ import annotations

import json
import random
import shutil
from dataclasses import replace

import numpy as np
import pytest
from adapters import write_adapter
from tiny import SIZES, randomise, reference, tiny_checkpoint, write_tokenizer

from prefold import LLM, CheckpointError, InputError
from prefold.integrations.shared import tasks_of
from prefold.tasks import make_task
from prefold.tasks.questions import read_questions
from prefold.text.decisions import LETTERS, default_prompt

# "Yes" is not one token of the tiny tokenizer.
SETTINGS = {"labels": {"noul": ["yes", "no"]}, "temperature": {"noul": 2.0, "choice": 0.5}}
FAMILIES = ("llama", "qwen3", "gemma3", "gpt2", "granite4", "qwen3-moe", "olmo2", "phi3", "smollm3", "cohere2")
QUESTIONS = {
    "refund": {"type": "noul", "instructions": "money back?", "criteria": {"true": "yes it is", "false": None}},
    "tone": {"type": "choice", "instructions": {"ask": "tone"}, "criteria": {"calm": None, "angry": "loud", "sad": ""}},
    "urgency": {"type": "score", "criteria": ["can wait", "today"]},
}
WORDS = (
    "refund", " the", "café", "<|im_end|>", "<|im_start|>user", "\n", "\n\n", " ", "日本", "😀", "<|mark|>",
    "<|split|>", "A.",
)  # fmt: skip
ONE_PROMPT = (
    "<|im_start|>{{ state if state is string else state|tojson }}"
    "{% for q in questions %}<|split|>{{ q.name }}? {{ q.labels|join(',') }}<|mark|>{% endfor %}"
)
MARKED = "{{ question.type }} {{ state|tojson }} {{ question.options|join('/') }}{{ question.labels[0] }}:<|mark|> end"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """{family: its folder}, made when it is asked for."""
    made = {}

    def folder(family="llama", template=None, **settings):
        key = (family, template, json.dumps(settings))
        if key not in made:
            path = tiny_checkpoint(tmp_path_factory.mktemp("decide"), family, max_position_embeddings=2048)
            (path / "decision.json").write_text(json.dumps(SETTINGS | settings))
            if template is not None:
                (path / "decision_template.jinja").write_text(template)
            made[key] = path
        return made[key]

    return folder


@pytest.fixture(scope="module")
def llms(folders):
    made = {}

    def llm(*key, **settings):
        if (name := (*key, json.dumps(settings))) not in made:
            made[name] = LLM(str(folders(*key, **settings)), dtype="float32")
        return made[name]

    yield llm
    for each in made.values():
        each.close()


def a_text(draw, most=6):
    return "".join(draw.choice(WORDS) + draw.choice(["", " "]) for _ in range(draw.randint(1, most)))


def a_request(draw):
    """A random request: texts and JSON with control tokens, all types, 2 to 26 options."""
    questions = {}
    for i in range(draw.randint(1, 3)):
        kind = draw.choice(("noul", "choice", "score"))
        one = {"type": kind}
        if draw.random() < 0.9:
            one["instructions"] = draw.choice([a_text(draw), {"a": [a_text(draw)]}])
        if kind == "choice":
            options = [f"{a_text(draw, 2)}{j}" for j in range(draw.randint(2, 26))]
            one["criteria"] = {option: draw.choice([None, "", a_text(draw)]) for option in options}
        elif kind == "score":
            one["criteria"] = [a_text(draw, 2) for _ in range(draw.randint(2, 10))]
        elif draw.random() < 0.5:
            one["criteria"] = {"true": a_text(draw, 2), "false": draw.choice([None, a_text(draw)])}
        questions[f"q{i}"] = one
    state = draw.choice(["x" + a_text(draw, 9), {"k": a_text(draw)}, [1, None, a_text(draw)]])
    return {"state": state, "questions": questions}


def ids_of(folder, requests):
    """The ids up to each place that is read, of transformers' prompts."""
    from transformers import AutoTokenizer
    from transformers.decision import DecisionConfig

    config, tokenizer = DecisionConfig.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    for request in requests:
        prompts = config.prepare_inputs(request, tokenizer)
        yield [inputs["input_ids"][0, : int(mark)].tolist() for inputs, _ in prompts for mark in inputs["marks"]]


@pytest.mark.parametrize(
    ("template", "settings"),
    [
        (None, {}),
        (ONE_PROMPT, {}),
        (MARKED, {"noul_options": ["false", "true"]}),
        (MARKED, {"sanitize_control_tokens": False}),
    ],
    ids=["default", "all questions", "marks", "not escaped"],
)
def test_prompts_are_those_of_transformers(folders, llms, template, settings):
    folder, llm = folders("llama", template, **settings), llms("llama", template, **settings)
    draw = random.Random(1)
    requests = [a_request(draw) for _ in range(60)]
    for request, theirs in zip(requests, ids_of(folder, requests), strict=True):
        task = make_task("decide", llm.checkpoint, llm.tokenizer)
        (work,) = task.prepare([request])
        assert [one.tokens.tolist() for one in work.requests] == theirs, request


@pytest.mark.parametrize("family", FAMILIES)
def test_probabilities_are_those_of_the_pipeline(folders, llms, family):
    from transformers import AutoTokenizer, pipeline

    folder, draw = folders(family), random.Random(2)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    theirs = pipeline("decision", model=reference(folder), tokenizer=tokenizer, device="cpu")
    requests = [{"state": "I was charged twice.", "questions": QUESTIONS}, *(a_request(draw) for _ in range(4))]
    for request in requests:
        expected = theirs(request)
        (found,) = llms(family).decide([request["state"]], request["questions"])
        for name, answer in expected.items():
            own = found[name]
            of = {"true": answer["noul"]} if answer["type"] == "noul" else answer["probabilities"]
            for option, p in of.items():
                assert own.probabilities[option] == pytest.approx(p, abs=1e-4), (name, option)
            if answer["type"] == "score":
                assert own.value == pytest.approx(answer["score"], abs=1e-3) and own.legend == answer["legend"]
            if answer["type"] != "noul":
                assert own.confidence == pytest.approx(answer["confidence"], abs=1e-3)


def test_the_order_of_yes_and_no_and_the_temperatures_are_those_of_the_settings(folders, llms):
    from transformers import AutoTokenizer, pipeline

    settings = {"noul_options": ["false", "true"], "temperature": {"noul": 3.0, "choice": 0.4, "score": 1.7}}
    folder, llm = folders("llama", None, **settings), llms("llama", None, **settings)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    theirs = pipeline("decision", model=reference(folder), tokenizer=tokenizer, device="cpu")
    expected = theirs({"state": "I was charged", "questions": QUESTIONS})
    found = llm.decide("I was charged", QUESTIONS)
    assert found["refund"].probabilities["true"] == pytest.approx(expected["refund"]["noul"], abs=1e-4)
    for name in ("tone", "urgency"):
        assert found[name].probabilities == pytest.approx(expected[name]["probabilities"], abs=1e-4)
    cooler = llm.decide("I was charged", QUESTIONS, temperature={"choice": 0.8})
    assert cooler["urgency"] == found["urgency"] and cooler["tone"] != found["tone"]
    own = np.log(list(found["tone"].probabilities.values())) / 2
    assert list(cooler["tone"].probabilities.values()) == pytest.approx(np.exp(own) / np.exp(own).sum(), abs=1e-4)


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_a_jev_head_scores_as_in_transformers(tmp_path, softcap):
    from transformers import AutoTokenizer, JevConfig, JevForDecision, Qwen3Config, pipeline

    text = Qwen3Config(**SIZES, head_dim=10)
    model = JevForDecision(JevConfig(hidden_size=SIZES["hidden_size"], text_config=text, softcap=softcap)).eval()
    randomise(model, 3)
    model.save_pretrained(tmp_path)
    write_tokenizer(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    theirs = pipeline("decision", model=model, tokenizer=tokenizer, device="cpu")
    llm = LLM(str(tmp_path), dtype="float32")
    for questions in (QUESTIONS, {"many": {"type": "choice", "criteria": {str(i): None for i in range(16)}}}):
        expected, found = (
            theirs({"state": "I was charged", "questions": questions}),
            llm.decide("I was charged", questions),
        )
        for name, answer in expected.items():
            of = {"true": answer["noul"]} if answer["type"] == "noul" else answer["probabilities"]
            assert {option: found[name].probabilities[option] for option in of} == pytest.approx(of, abs=1e-4)
            assert found[name].label_mass is None
    with pytest.raises(InputError, match="at most 16"):
        llm.decide("x", {"many": {"type": "choice", "criteria": {str(i): None for i in range(17)}}})
    llm.close()


@pytest.mark.parametrize("first", [None, "question"])
@pytest.mark.parametrize("count", [1, 10])
def test_each_token_is_computed_once(llms, first, count):
    llm = llms("llama")
    questions = {f"q{i}": {"type": "noul", "instructions": f"{i} is asked?"} for i in range(count)}
    states = [f"{i} state " * 6 for i in range(20)]
    task = llm.task("decide", questions=questions, first=first)
    prompts = [tuple(request.tokens.tolist()) for work in task.prepare(states) for request in work.requests]
    before = llm.stats.rows_computed
    llm.decide(states, questions, first=first)
    unique = {prompt[:end] for prompt in prompts for end in range(1, len(prompt) + 1)}
    assert llm.stats.rows_computed - before == len(unique)


class CountingTokenizer:
    """A tokenizer that keeps the texts it encodes."""

    def __init__(self, tokenizer):
        self.tokenizer, self.seen = tokenizer, []

    def __getattr__(self, name):
        return getattr(self.tokenizer, name)

    def encode_batch(self, texts, special=True):
        self.seen += texts
        return self.tokenizer.encode_batch(texts, special)


@pytest.mark.parametrize("first", [None, "question"])
def test_a_state_and_a_question_are_each_encoded_once(llms, first):
    llm = llms("llama")
    questions = {f"q{i}": {"type": "noul", "instructions": f"question {i} is asked? " * 9} for i in range(10)}
    states = [f"state {i} tells.\n\nMore: " * 9 + "end" for i in range(10)]
    task = llm.task("decide", questions=questions, first=first)
    counting = CountingTokenizer(llm.tokenizer)
    task.inputs = replace(task.inputs, tokenizer=counting)
    works = task.prepare(states)
    for state in range(10):
        assert sum(text.count(f"state {state} ") for text in counting.seen) == 9
        assert sum(text.count(f"question {state} ") for text in counting.seen) == 9
    for state, work in zip(states, works, strict=True):
        for request, question in zip(work.requests, task.questions, strict=True):
            text = default_prompt(
                state, "noul", question.instructions, ["true", "false"], ["yes", "no"], [None, None], first or "state"
            )
            written = task.encoder.message(text).text
            assert request.tokens.tolist() == llm.tokenizer.encode(written, special=False).tolist()


def test_the_mass_of_labels_is_over_the_vocabulary(llms):
    llm = llms("llama")
    answer = llm.decide("I was charged twice.", {"q": QUESTIONS["tone"]})["q"]
    task = llm.task("decide", questions={"q": QUESTIONS["tone"]})
    (work,) = task.prepare(["I was charged twice."])
    scored = llm.score([work.requests[0].tokens] * 3, [[llm.tokenizer.token_id(label)] for label in LETTERS[:3]])
    assert answer.label_mass == pytest.approx(sum(np.exp(one.logprob) for one in scored), rel=1e-4)
    assert answer.argmax_is_label == any(one.greedy for one in scored)


def test_a_label_may_be_the_most_likely_token(folders, llms, tmp_path):
    llm, template = llms("llama"), "{{ state }} {{ question.type }}"
    for i in range(60):  # until the most likely token is a text that may be a label
        label = llm.generate(f"{i} choice", max_tokens=1, temperature=0, ignore_eos=True).text
        if label.strip() and llm.tokenizer.encode(label, special=False).size == 1:
            break
    other = next(letter for letter in LETTERS if letter != label)
    folder = tmp_path / "model"
    shutil.copytree(folders("llama"), folder)
    (folder / "decision.json").write_text(json.dumps({"labels": {"choice": [other, label]}}))
    question = {"q": {"type": "choice", "criteria": {"a": None, "b": None}}}
    with LLM(str(folder), dtype="float32") as found:
        answer = found.decide(str(i), question, template=template)["q"]
        assert answer.argmax_is_label and answer.value == "b" and 0 < answer.label_mass < 1
    (folder / "decision.json").write_text(json.dumps({"labels": {"choice": [other, "B" if other == "A" else "A"]}}))
    with LLM(str(folder), dtype="float32") as found:
        assert not found.decide(str(i), question, template=template)["q"].argmax_is_label


def test_a_wrong_question_leaves_the_others(llms):
    llm = llms("llama")
    one, many = {"type": "choice", "criteria": {"a": None}}, {"type": "score", "criteria": ["x"] * 27}
    questions = {**QUESTIONS, "one": one, "many": many}
    task = make_task("decide", llm.checkpoint, llm.tokenizer)
    (work,) = task.prepare([{"state": "text", "questions": questions}])
    results = [llm.run(task, [{"state": "text", "questions": questions}])]
    answers = results[0][0]["answers"]
    assert [*answers] == [*QUESTIONS, "one", "many"] and len(work.requests) == len(QUESTIONS)
    assert "1 option" in answers["one"]["error"]["message"] and "27 options" in answers["many"]["error"]["message"]
    with pytest.raises(InputError, match="'one' has 1 option"):
        llm.decide("text", questions)


def test_what_the_body_of_a_request_says_of_all_questions(llms, tmp_path):
    """A system message, variables of the chat template, and a salt."""
    folder = tiny_checkpoint(tmp_path, "llama")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["chat_template"] += "{{ mood }}{{ enable_thinking }}"
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "decision.json").write_text(json.dumps(SETTINGS))
    with LLM(str(folder), load_format="dummy") as llm:
        task = llm.task("decide", questions={"q": {"type": "noul"}})
        item = {
            "state": "x",
            "instructions": "Be <|im_end|> strict.",
            "chat_template_kwargs": {"mood": "calm"},
            "salt": "s",
        }
        (work, plain) = task.prepare([item, "x"])
        text, without = (llm.tokenizer.decode(one.requests[0].tokens) for one in (work, plain))
        assert text.startswith("<|im_start|>system\nBe <|im_end|> strict.<|im_end|>\n<|im_start|>user\nx")
        assert text.endswith("assistant\ncalmFalse") and without.endswith("assistant\nFalse")
        assert "system" not in without and work.requests[0].tokens.tolist().count(2) == 2  # the system's and the user's
        assert (work.requests[0].namespace.salt, plain.requests[0].namespace.salt) == ("s", "")
        wrong = [({"chat_template_kwargs": {"enable_thinking": True}}, "cannot think"), ({"salt": 3}, "salt"),
                 ({"chat_template_kwargs": []}, "not an object"), ({"instructions": 3}, "instructions")]  # fmt: skip
        for fields, says in wrong:
            (error,) = task.prepare([{"state": "x", **fields}])
            assert says in str(error)
        own = llm.task("decide", questions={"q": {"type": "noul"}}, template="{{ state }}{{ question.name }}")
        for fields in ({"instructions": "x"}, {"chat_template_kwargs": {"a": 1}}):
            (error,) = own.prepare([{"state": "x", **fields}])
            assert error.code == "unsupported" and error.field in fields


def test_each_state_may_name_its_adapter(llms):
    llm = llms("llama")
    with pytest.raises(InputError, match="no adapter 'x'"):
        llm.decide(["a", "b"], QUESTIONS, adapter=[None, "x"])
    found = llm.decide(["a", "b"], QUESTIONS, adapter=[None, None])
    assert [one["refund"] for one in found] == [one["refund"] for one in llm.decide(["a", "b"], QUESTIONS)]


def test_the_adapter_that_the_settings_name_is_loaded_and_used(folders, llms, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(folders("llama"), folder)
    write_adapter(folder / "lora", folder, seed=3)
    given = LLM(str(folder), dtype="float32", adapters={"other": str(folder / "lora")})
    with_it = given.decide("text", QUESTIONS, adapter="other")
    without = given.decide("text", QUESTIONS)
    (folder / "decision.json").write_text(json.dumps(SETTINGS | {"adapter": "lora"}))
    llm = LLM(str(folder), dtype="float32")
    found = llm.decide("text", QUESTIONS)
    assert found.answers == with_it.answers != without.answers
    assert llm.engine.facts.adapters == ("lora",) and "lora" in llm.identity["adapters"]
    make, _ = tasks_of(str(folder), {"dtype": "float32"})  # a model that runs elsewhere, as on Ray
    assert make("decide", {"questions": QUESTIONS}).inputs.adapter == "lora"
    # Other tasks run without it, unless they name it.
    assert (llm.embed("text") == given.embed("text")).all()
    with pytest.raises(CheckpointError, match="another one has the same name"):
        LLM(str(folder), adapters={"lora": str(folder)})
    for each in (given, llm):
        each.close()


@pytest.mark.parametrize(
    ("name", "says"),
    [("lora", "which does not exist"), ("../lora", "not inside"), ("/tmp", "not inside"), (".", "not inside")],
)
def test_an_adapter_is_loaded_from_a_folder_of_the_model_alone(folders, name, says):
    with pytest.raises(CheckpointError, match=says):
        LLM(str(folders("llama", None, adapter=name)))


def test_a_state_that_is_too_long_is_cut_on_request(llms):
    llm, question = llms("llama"), {"q": {"type": "noul", "instructions": "yes?"}}
    with pytest.raises(InputError, match="makes a prompt of"):
        llm.decide("long " * 200, question, max_length=100)
    task = llm.task("decide", questions=question, max_length=100, truncate=True)
    (work,) = task.prepare(["long " * 200])
    text = llm.tokenizer.decode(work.requests[0].tokens)
    assert work.requests[0].tokens.size <= 100 and "no: false\nAnswer yes or no only." in text
    assert llm.decide("long " * 200, question, max_length=100, truncate="left")["q"].type == "noul"


@pytest.mark.parametrize(
    ("questions", "says"),
    [
        ([], "is empty"),
        ("x", "of type str"),
        ({"q": 3}, "'q' is of type int"),
        ({"q": {"type": "free"}}, "type 'free'"),
        ({"q": {"type": "noul", "kriteria": 1}}, "unknown field 'kriteria'"),
        ({"q": {"type": "noul", "criteria": {"maybe": "x"}}}, "true and false"),
        ({"q": {"type": "choice"}}, "no criteria"),
        ({"q": {"type": "choice", "criteria": ["a", "b"]}}, "wrong criteria"),
        ({"q": {"type": "score", "criteria": {"a": 1}}}, "wrong criteria"),
        ({"q": {"type": "score", "criteria": ["a"]}}, "1 option"),
        ({"q": {"type": "choice", "criteria": {str(i): None for i in range(256)}}}, "256 options"),
        ([{"type": "choice", "choices": [{"value": "a"}, {"value": "a"}]}], "'a' twice"),
        ([{"type": "noul", "name": "x"}, {"type": "noul", "name": "x"}], "called 'x'"),
    ],
)
def test_wrong_questions_are_named(questions, says):
    with pytest.raises(InputError, match=says):
        for error in read_questions(questions)[1].values():
            raise error


def test_booleans_and_texts_are_different_options():
    choices = [{"value": "true"}, {"value": True, "description": "really"}, {"value": False}]
    ((question,), errors) = read_questions([{"type": "choice", "choices": choices}])
    assert not errors and question.options == ("true", True, False) and question.words == ["true", "true", "false"]
    answer = question.answer(np.array([0.5, 0.3, 0.2]), 0.9, True)
    assert answer.probabilities == {"true": 0.5, True: 0.3, False: 0.2}
    assert answer.to_dict()["probabilities"][1] == {"value": True, "probability": 0.3}


def test_other_prompts():
    of_options = {"options": ["a", "b"], "labels": ["A", "B"], "descriptions": ["x", None]}
    said = {"kind": "choice", "instructions": "Which?", **of_options}
    question = "Which?\nA. a: x\nB. b\nAnswer with the letter of the option that fits best (A to B) only."
    assert default_prompt("S", **said, first="question") == f"{question}\n\nS"


@pytest.mark.parametrize(
    ("question", "said"),
    [  # made with vLLM 0.32's question_types.py
        ({"type": "noul", "instructions": "Is it?"}, "Question: Is it?\nyes\nno\nAnswer with yes or no only."),
        (
            {"type": "noul", "criteria": {"true": "sure", "false": {"k": None}}},
            "yes: sure\nno: {'k': None}\nAnswer with yes or no only.",
        ),
        (
            {"type": "choice", "instructions": ["a", 1], "criteria": {"x": "why", "y": None, "z": ""}},
            "Question: ['a', 1]\nA: x - why\nB: y\nC: z\nAnswer with the letter of one option only.",
        ),
        (
            {"type": "score", "instructions": "", "criteria": ["low", 2]},
            "0: low\n1: 2\nAnswer with the number of one level only.",
        ),
    ],
)
def test_prompts_of_vllm(llms, question, said):
    llm = llms("llama", None, labels={"noul": ["no", "yes"]}, noul_options=["false", "true"])  # vLLM reads neither
    task = llm.task("decide", prompt_style="vllm")
    (work,) = task.prepare([{"state": {"é": 1}, "questions": {"q": question}}])
    chat = [{"role": "user", "content": f'{{"é": 1}}\n\n{said}'}]
    text = llm.tokenizer.render_chat(chat, add_generation_prompt=True, enable_thinking=False)
    assert work.requests[0].tokens.tolist() == llm.tokenizer.encode(text, special=False).tolist()
    (own,), _ = read_questions({"q": question})
    labels = {"noul": ["yes", "no"], "choice": ["A", "B", "C"], "score": ["0", "1"]}[own.kind]
    assert task.reader.check(own) == [llm.tokenizer.token_id(label) for label in labels]
    many = {"type": "score", "criteria": [str(i) for i in range(11)]}
    with pytest.raises(InputError, match="11 options"):
        llm.decide("x", {"q": many}, prompt_style="vllm")


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"labels": ["A"]}, "labels of decision.json"),
        ({"temperature": {"noul": 0}}, "temperature of decision.json"),
        ({"noul_options": ["yes", "no"]}, "noul_options of decision.json"),
        ({"sanitize_control_tokens": "no"}, "sanitize_control_tokens"),
        ({"labels": {"noul": ["Certainly", "no"]}}, "not a single token: 'Certainly'"),
        ({"labels": {"choice": ["A", "B", "A"]}}, "not a single token: 'A'"),
    ],
)
def test_settings_that_are_wrong_are_refused_at_load(folders, settings, says):
    with pytest.raises(CheckpointError, match=says):
        LLM(str(folders("llama", None, **settings)))


def test_labels_that_a_question_needs_are_single_tokens(folders, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(folders("llama"), folder)
    (folder / "decision.json").unlink()  # "Yes" is not one token here
    llm = LLM(str(folder))
    with pytest.raises(InputError, match="'refund' are not distinct single tokens"):
        llm.decide("x", {"refund": {"type": "noul"}})
    llm.close()
