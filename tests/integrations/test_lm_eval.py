"""The harness's model beside the harness's own "hf" model, on the same tiny checkpoints."""

from __future__ import annotations

import json
import re
import string
from functools import partialmethod

import pytest
from tiny import tiny_checkpoint
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from prefold import LLM
from prefold.errors import InputError

pytest.importorskip("lm_eval")
pytest.importorskip("accelerate")

from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model
from lm_eval.tasks import TaskManager

from prefold.integrations.lm_eval import PrefoldLM, main

# Of the tiny models here: small, so that texts are longer.
CONTEXT = 40


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A checkpoint without special tokens around its texts, and one with a BOS before them."""
    plain = tiny_checkpoint(tmp_path_factory.mktemp("plain"), "qwen3", max_position_embeddings=CONTEXT)
    begun = tiny_checkpoint(tmp_path_factory.mktemp("begun"), "llama", max_position_embeddings=CONTEXT)
    tokenizer = Tokenizer.from_file(str(begun / "tokenizer.json"))
    tokenizer.post_processor = TemplateProcessing(single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)])
    tokenizer.save(str(begun / "tokenizer.json"))
    return {"plain": plain, "bos": begun}


@pytest.fixture(scope="module", params=["plain", "bos"])
def models(request, folders):
    return pair(folders[request.param])


def pair(folder, **options):
    """(ours, theirs)"""
    ours = get_model("prefold").create_from_arg_obj(
        {"pretrained": str(folder), "dtype": "float32", **options}, {"batch_size": 4, "device": "cpu"}
    )
    assert isinstance(ours, PrefoldLM)
    theirs = get_model("hf").create_from_arg_obj(
        {"pretrained": str(folder), "dtype": "float32", **options}, {"batch_size": 4, "device": "cpu"}
    )
    return ours, theirs


def requests(kind, arguments):
    return [Instance(request_type=kind, doc={}, arguments=one, idx=i) for i, one in enumerate(arguments)]


PAIRS = [
    ("The cat", " sat"),
    ("The cat ", "sat"),
    ("The cat \n\t", "sat on"),
    ("ye", "s no"),
    ("Question: a\nAnswer:", " yes"),
    ("Question: a\nAnswer:", " no"),
    ("", "yes no"),
    ("", "<|im_start|>yes"),
    ("<|im_start|>user", " no"),
    ("é日", "本😀"),
    ("a long context, " * 5, "to be cut"),
    ("x", "a continuation as long as it may"),
]


def test_loglikelihood(models):
    ours, theirs = models
    # Every character after every context, so that some are the model's first choice.
    pairs = PAIRS + [(f"{number}.", mark) for number in range(20) for mark in string.printable[:95]]
    found = ours.loglikelihood(requests("loglikelihood", pairs))
    expected = theirs.loglikelihood(requests("loglikelihood", pairs), disable_tqdm=True)
    assert [one[0] for one in found] == pytest.approx([one[0] for one in expected], abs=1e-4)
    assert [one[1] for one in found] == [one[1] for one in expected]
    assert {True, False} == {one[1] for one in found}


def test_loglikelihood_rolling(models):
    ours, theirs = models
    # Rows, prefix token included: fewer than the context, just as many, and two and more windows of them. (No window
    # may repeat another's tokens with fewer of them scored: the harness then reads the wrong rows of the first.)
    texts = ["x" * (CONTEXT + extra) for extra in (-1, 0, 1)]
    texts += ["a", " ".join(map(str, range(70))) + "é日", "<|im_start|>user", "", "the"]
    found = ours.loglikelihood_rolling(requests("loglikelihood_rolling", [(text,) for text in texts]))
    expected = theirs.loglikelihood_rolling(
        requests("loglikelihood_rolling", [(text,) for text in texts]), disable_tqdm=True
    )
    assert found == pytest.approx(expected, abs=1e-4)


def test_a_prefix_token_and_a_shorter_context(folders):
    ours, theirs = pair(folders["plain"], prefix_token_id=7, max_length=9)
    contexts = [("", "yes"), ("much too long a context", "no")]
    found = ours.loglikelihood(requests("loglikelihood", contexts))
    expected = theirs.loglikelihood(requests("loglikelihood", contexts), disable_tqdm=True)
    assert [one[0] for one in found] == pytest.approx([one[0] for one in expected], abs=1e-4)
    (found,) = ours.loglikelihood_rolling(requests("loglikelihood_rolling", [("a text of windows",)]))
    (expected,) = theirs.loglikelihood_rolling(requests("loglikelihood_rolling", [("a text of windows",)]))
    assert found == pytest.approx(expected, abs=1e-4)


def test_generate_until(models):
    ours, theirs = models
    contexts = ["The cat", "yes no", "é日", "a context that is cut at its left side", "<|im_start|>user", "the"]
    kinds = [
        {"until": [], "max_gen_toks": 12, "do_sample": False},
        {"until": [" ", "e"], "max_gen_toks": 12, "do_sample": False, "temperature": 0.0},
        {"until": "<|im_start|>", "max_new_tokens": 9},
    ]
    asked = [(context, kind) for kind in kinds for context in contexts]
    found = ours.generate_until(requests("generate_until", asked))
    # One by one: the harness looks for a BOS in the first text of a batch only.
    theirs.batch_size_per_gpu = 1
    expected = theirs.generate_until(requests("generate_until", asked), disable_tqdm=True)
    assert found == expected


def test_generation_options(folders):
    ours = PrefoldLM(LLM(str(folders["plain"]), dtype="float32", device="cpu"))
    asked = {}
    ours.llm.generate = lambda prompts, **options: asked.update(options, prompts=prompts) or []
    kind = {"until": ["Q:", "<|im_end|>"], "max_gen_toks": 30, "do_sample": True, "temperature": 0.5, "top_p": 0.9}
    ours._generate([], kind)
    assert asked == {
        "prompts": [], "max_tokens": 30, "stop": ["Q:", "<|im_end|>"], "stop_ids": [2], "temperature": 0.5, "top_p": 0.9
    }  # fmt: skip
    asked.clear()
    ours._generate(["x" * 50, ""], kind | {"do_sample": False, "num_beams": 1, "repetition_penalty": 1.5})
    # Greedy: the options of sampling are left out. The prompt leaves room for what is generated.
    assert [len(prompt) for prompt in asked.pop("prompts")] == [CONTEXT - 30, 1]
    assert asked == {"max_tokens": 30, "stop": ["Q:", "<|im_end|>"], "stop_ids": [2], "repetition_penalty": 1.5}
    for wrong in ({"num_beams": 4}, {"typical_p": 0.5}, {"max_gen_toks": CONTEXT}):
        with pytest.raises(InputError) as error:
            ours._generate(["x"], kind | wrong)
        assert error.value.field == next(iter(wrong))


def test_chat_templates(models):
    ours, theirs = models
    talk = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    assert ours.apply_chat_template(talk) == theirs.apply_chat_template(talk)
    begun = [*talk, {"role": "assistant", "content": "Answer:"}]
    expected = theirs.apply_chat_template(begun, add_generation_prompt=False)
    assert ours.apply_chat_template(begun, add_generation_prompt=False) == expected
    assert ours.chat_template(True) == theirs.chat_template(True)
    assert ours.chat_template(False) is None


def test_a_template_that_refuses_a_system_message(folders):
    ours = PrefoldLM(LLM(str(folders["plain"]), dtype="float32", device="cpu"))
    ours._tokenizer.chat_templates.templates["default"] = (
        "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no') }}{% endif %}{{ messages[0]['content'] }}"
    )
    user = {"role": "user", "content": "Hello"}
    assert ours.apply_chat_template([{"role": "system", "content": "Be brief."}, user]) == "Hello"
    with pytest.raises(InputError):
        ours.apply_chat_template([])


def write_task(folder):
    folder.mkdir()
    docs = [{"question": f"{i} and 1", "answer": "yes" if i % 2 else "no"} for i in range(6)]
    (folder / "docs.jsonl").write_text("".join(json.dumps(doc) + "\n" for doc in docs))
    task = {
        "task": "tiny_choice",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(folder / "docs.jsonl")}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}:",
        "doc_to_choice": ["yes", "no"],
        "doc_to_target": "answer",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    }
    (folder / "tiny_choice.yaml").write_text(json.dumps(task))


@pytest.fixture
def command(tmp_path, monkeypatch, argv):
    """command("--device", "cpu") runs the harness's own command line, with our model in its list, on a small task. Of
    the harness's own tasks it knows none: to read their thousands of files takes ten seconds."""
    write_task(tmp_path / "tasks")
    know = partialmethod(TaskManager.__init__, include_defaults=False)
    monkeypatch.setattr(TaskManager, "__init__", know)

    def call(*arguments):
        tasks = ["--tasks", "tiny_choice", "--include_path", str(tmp_path / "tasks")]
        argv("lm_eval", "--model", "prefold", *tasks, *arguments)
        main()

    return call


def test_the_command_line(folders, command, tmp_path):
    model = ["--model_args", f"pretrained={folders['bos']},dtype=float32", "--device", "cpu"]
    command(*model, "--output_path", str(tmp_path / "out.json"))
    (written,) = tmp_path.glob("out*.json")
    score = json.loads(written.read_text())["results"]["tiny_choice"]["acc,none"]
    theirs = pair(folders["bos"])[1]
    manager = TaskManager(include_path=str(tmp_path / "tasks"))
    expected = simple_evaluate(model=theirs, tasks=["tiny_choice"], task_manager=manager, bootstrap_iters=0)
    assert score == expected["results"]["tiny_choice"]["acc,none"]


def test_a_gpu_that_is_not_there_is_replaced_by_the_cpu(folders, capsys, monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for device in ("cuda", "cuda:0", "mps", None):
        made = get_model("prefold").create_from_arg_obj({"pretrained": str(folders["plain"])}, {"device": device})
        assert made.llm.device == "cpu"
        assert ("using cpu" in capsys.readouterr().err) == (device is not None)


def test_wrong_arguments_are_named():
    make = get_model("prefold").create_from_arg_obj
    with pytest.raises(InputError, match=r"not named; add --model_args pretrained=NAME"):
        make({}, {"device": "cpu"})
    with pytest.raises(InputError, match=r"no option 'treads'; did you mean threads\? it has: .*dtype"):
        make({"pretrained": "x", "treads": 2}, {})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [([], "the model is not named"), (["--model_args", "pretrained=no/such/folder"], "there is no model")],
)
def test_what_is_wrong_with_the_model_is_one_line(arguments, message, command):
    with pytest.raises(SystemExit) as ended:
        command(*arguments)
    # The interpreter writes a text that a program exits with to standard error, and its status is 1.
    assert re.match(f"prefold: .*{message}.*\\Z", ended.value.code)
