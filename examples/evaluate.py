"""Evaluate a model with lm-evaluation-harness on your own task, a file of questions, without a download.

    pip install 'prefold[lm-eval]'
    python examples/evaluate.py [QUESTIONS.jsonl]

Without a file, the script uses the eight questions below. A line of a file has "question", "choices" (a list of texts),
and "answer" (the number of the right choice, from 0). The script prints the accuracy. The first three questions are
worked examples before each of the others, and are computed once. For the harness's own tasks, which it downloads, see
docs/start/evaluate.md.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path

QUESTIONS = [
    ("What is the capital of France?", ["Paris", "Rome"], 0),
    ("How many legs does a spider have?", ["six", "eight"], 1),
    ("What is frozen water called?", ["ice", "steam"], 0),
    ("Which planet is nearest to the sun?", ["Mars", "Mercury"], 1),
    ("What do bees make?", ["honey", "milk"], 0),
    ("Which animal barks?", ["a cat", "a dog"], 1),
    ("What colour is the sky on a clear day?", ["blue", "green"], 0),
    ("What do we breathe in?", ["sand", "air"], 1),
]
SHOTS = 3


def write_task(folder: Path, questions: list[dict]) -> None:
    """Write a task for the harness: its questions, and the template of a prompt."""
    for name, part in (("shots", questions[:SHOTS]), ("test", questions[SHOTS:])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in part), encoding="utf-8")
    task = {
        "task": "own_questions",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {name: str(folder / f"{name}.jsonl") for name in ("shots", "test")}},
        "output_type": "multiple_choice",
        "fewshot_split": "shots",
        "fewshot_config": {"sampler": "first_n"},
        "test_split": "test",
        "num_fewshot": SHOTS,
        "doc_to_text": "Question: {{question}}\nAnswer:",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "answer",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    }
    (folder / "own_questions.yaml").write_text(json.dumps(task), encoding="utf-8")  # JSON is valid YAML


def main() -> None:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no downloads; lm_eval reads this when it is imported
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    import prefold.integrations.lm_eval  # noqa: F401  (adds the model "prefold" to the harness)

    questions = [{"question": text, "choices": choices, "answer": answer} for text, choices, answer in QUESTIONS]
    if len(sys.argv) > 1:
        questions = [json.loads(line) for line in Path(sys.argv[1]).read_text(encoding="utf-8").splitlines()]
    if len(questions) <= SHOTS:
        sys.exit(f"{sys.argv[1]} has {len(questions)} questions; give more than the {SHOTS} that are worked examples")
    with tempfile.TemporaryDirectory() as folder:
        write_task(Path(folder), questions)
        results = simple_evaluate(
            model="prefold",
            model_args={"pretrained": "smollm2-135m"},
            tasks=["own_questions"],
            task_manager=TaskManager(include_path=folder, include_defaults=False),
        )
    accuracy = results["results"]["own_questions"]["acc,none"]
    print(f"accuracy {accuracy:.2f} on {len(questions) - SHOTS} questions, with {SHOTS} worked examples before each")


if __name__ == "__main__":
    main()
