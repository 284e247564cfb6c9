"""Tasks by name: options, defaults, and no torch."""

from __future__ import annotations

import subprocess
import sys

import pytest
from task_inputs import FakeCheckpoint, tokenizer

from prefold.errors import InputError, UnsupportedModelError
from prefold.spec.task import options_of
from prefold.tasks import TASKS, make_task


def test_unknown_tasks_and_options_list_the_known_ones():
    with pytest.raises(InputError, match=r"no task 'embd'.*embed, rerank, classify, decide, score"):
        make_task("embd", FakeCheckpoint(), tokenizer())
    message = r"embed has no option 'dimension'; did you mean dimensions.*pooling.*truncate"
    with pytest.raises(InputError, match=message) as caught:
        make_task("embed", FakeCheckpoint(), tokenizer(), dimension=3)
    assert caught.value.code == "unknown_option"
    with pytest.raises(InputError, match="score has no option 'labels'; it has: prefix_token"):
        make_task("score", FakeCheckpoint(), tokenizer(), labels=[])


@pytest.mark.parametrize(("name", "option"), [("json_schema", "grammar"), ("stop_id", "stop_ids")])
def test_a_name_of_the_command_line_is_answered_with_the_option_that_it_is_part_of(name, option):
    """The nearest name, which is `json_space` for `json_schema`, would lead astray."""
    with pytest.raises(InputError, match=rf"generate has no option '{name}'; use {option} \(.*\); it has: max_tokens"):
        options_of("generate", {name: 1})


def test_options_of_every_task():
    assert set(TASKS) == {"embed", "rerank", "classify", "decide", "score", "generate"}
    for name in TASKS:
        given = {"classify": {"labels": ["yes", "no"]}, "decide": {"template": "{{ state }}{{ question }}"}}.get(
            name, {}
        )
        options = options_of(name, given)
        assert options.max_length is None
        assert options.truncate is False
        task = make_task(name, FakeCheckpoint(), tokenizer(), options)
        assert task.name == name
        assert task.inputs.max_length == 512
        assert task.inputs.vocab_size == 300
        assert task.prepare([]) == []
        assert make_task(name, FakeCheckpoint(), tokenizer(), max_length=9000, **given).inputs.max_length == 9000
        with pytest.raises(InputError, match="max_length"):
            make_task(name, FakeCheckpoint(), tokenizer(), max_length=0, **given)


def test_learned_positions_are_all_there_are():
    sizes = {"n_embd": 36, "n_head": 6, "n_layer": 1, "n_positions": 100}
    gpt2 = FakeCheckpoint({"architectures": ["GPT2LMHeadModel"], "vocab_size": 300} | sizes)
    assert make_task("score", gpt2, tokenizer()).inputs.max_length == 100
    assert make_task("score", gpt2, tokenizer(), max_length=9000).inputs.max_length == 100
    assert make_task("score", gpt2, tokenizer(), max_length=20).inputs.max_length == 20


@pytest.mark.parametrize("tied", [False, True])
def test_a_model_without_logits(tied):
    """An encoder saved without a head has none, also where its kind of language model uses the embedding for it."""
    tasks = {"rerank": {"words": ["no", "yes"]}, "classify": {"labels": ["yes", "no"]}, "score": {}, "generate": {}}
    for name, options in tasks.items():
        bare = FakeCheckpoint({"architectures": ["Qwen3Model"], "tie_word_embeddings": tied})
        why = f"{name} needs a language model's logits; fake has no head at all .architectures in its .* Qwen3Model"
        with pytest.raises(UnsupportedModelError, match=why):
            make_task(name, bare, tokenizer(), **options)
        assert make_task("embed", bare, tokenizer()).readout.kind == "last"
    classifier = FakeCheckpoint({"architectures": ["Qwen3ForSequenceClassification"]})
    with pytest.raises(UnsupportedModelError, match="has a classification head"):
        make_task("score", classifier, tokenizer())


def test_text_and_tasks_never_import_torch():
    code = "import sys, prefold.text, prefold.tasks, prefold.text.load; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
