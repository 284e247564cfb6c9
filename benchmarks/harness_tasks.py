"""Writes task files of lm-evaluation-harness out of local data: `python benchmarks/harness_tasks.py DATA FOLDER`.

DATA holds mmlu_5shot and gsm8k (dev.jsonl.gz, prefixes.jsonl.gz each). FOLDER receives a YAML and a JSONL file for

    mmlu_5shot_local    the standard 5-shot prompts, as multiple choice; subjects take turns
    gsm8k_8shot_local   the 8-shot chain of thought, generate_until, with the filters of the harness's gsm8k_cot
    gsm8k_text_local    questions and answers as plain text, rolling log-likelihood

and `lm_eval --include_path FOLDER --tasks ...` finds them there.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from common import read_jsonl

TASKS = ("mmlu_5shot_local", "gsm8k_8shot_local", "gsm8k_text_local")


def write_tasks(data: Path, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write_mmlu(data / "mmlu_5shot", folder)
    write_gsm8k(data / "gsm8k", folder)


def write_mmlu(data: Path, folder: Path) -> None:
    prefixes = {line["prefix_id"]: line["prefix"] for line in read_jsonl(data / "prefixes.jsonl.gz")}
    items = read_jsonl(data / "dev.jsonl.gz")
    turns: dict[str, int] = {}
    for item in items:
        item["turn"] = turns[item["prefix_id"]] = turns.get(item["prefix_id"], 0) + 1
    docs = [
        {"prompt": prefixes[item["prefix_id"]] + item["suffix"], "answer": item["answer"], "subject": item["prefix_id"]}
        for item in sorted(items, key=lambda item: item["turn"])
    ]
    task = {
        "output_type": "multiple_choice",
        "doc_to_choice": ["A", "B", "C", "D"],
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    }
    write_task(folder, "mmlu_5shot_local", docs, task)


def write_gsm8k(data: Path, folder: Path) -> None:
    (prefix,) = read_jsonl(data / "prefixes.jsonl.gz")
    items = read_jsonl(data / "dev.jsonl.gz")
    docs = [
        {
            "prompt": prefix["prefix"] + prefix["suffix_template"].format(question=item["question"]),
            "answer": item["final"],
        }
        for item in items
    ]
    ignored = [",", r"\$", r"(?s).*#### ", r"\.$"]
    number, any_number = r"The answer is (\-?[0-9\.\,]+).", r"(-?[$0-9.,]{2,})|(-?[0-9]+)"
    first = {"function": "take_first"}
    task = {
        "output_type": "generate_until",
        "generation_kwargs": {"do_sample": False, "until": ["Q:", "</s>", "<|im_end|>"]},
        "filter_list": [
            {"name": "strict-match", "filter": [{"function": "regex", "regex_pattern": number}, first]},
            {
                "name": "flexible-extract",
                "filter": [{"function": "regex", "group_select": -1, "regex_pattern": any_number}, first],
            },
        ],
        "metric_list": [
            {
                "metric": "exact_match",
                "aggregation": "mean",
                "higher_is_better": True,
                "ignore_case": True,
                "ignore_punctuation": False,
                "regexes_to_ignore": ignored,
            }
        ],
    }
    write_task(folder, "gsm8k_8shot_local", docs, task)
    texts = [{"prompt": "", "answer": f"Q: {item['question']}\nA: {item['answer']}"} for item in items]
    metrics = ["word_perplexity", "byte_perplexity", "bits_per_byte"]
    task = {"output_type": "loglikelihood_rolling", "metric_list": [{"metric": metric} for metric in metrics]}
    write_task(folder, "gsm8k_text_local", texts, task)


def write_task(folder: Path, name: str, docs: list[dict], task: dict) -> None:
    """JSON is YAML, so the task's file is written as JSON."""
    file = folder.resolve() / f"{name}.jsonl"
    file.write_text("".join(json.dumps(doc) + "\n" for doc in docs), encoding="utf-8")
    common = {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(file)}},
        "test_split": "test",
        "num_fewshot": 0,
        "doc_to_text": "{{prompt}}",
        "doc_to_target": "{{answer}}",
        "metadata": {"version": 1.0},
    }
    (folder / f"{name}.yaml").write_text(json.dumps(common | task, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    write_tasks(arguments.data, arguments.folder)


if __name__ == "__main__":
    main()
