"""Measures few-shot classification on a CPU: accuracy and time of prefold's modes, transformers and vLLM, same prompts.

    python benchmarks/classify.py --data FOLDER [--tasks sst2,trec,banking77,mmlu] [--vllm VENV] [--transformers]

FOLDER holds sst2, trec_qc, banking77 (dev.jsonl.gz and fewshot.jsonl.gz: text, label) and mmlu_5shot
(dev.jsonl.gz, prefixes.jsonl.gz). Accuracy is counted in every mode in float32 (it must be the same) and
in bfloat16 (drift is counted); times are those of --dtype, from token ids to label scores.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from common import (
    export_folder,
    machine,
    median,
    python_of,
    read_jsonl,
    run_engine,
    run_peer,
    table,
    timed,
    write_json,
)

from prefold import LLM
from prefold.tasks import Work

COUNTS = {"sst2": 300, "trec": 300, "banking77": 20, "mmlu": 240}
TREC = {
    "ABBR": "abbreviation",
    "DESC": "description",
    "ENTY": "entity",
    "HUM": "human",
    "LOC": "location",
    "NUM": "number",
}
# How each task is asked: instructions and template.
ASKED = {
    "sst2": ("Say whether each review is positive or negative.", "Review: {text}\nSentiment: {label}"),
    "trec": ("Say what each question asks for.", "Question: {text}\nType: {label}"),
    "banking77": (
        "Say which of these intents a customer of a bank has: {labels}.",
        "Customer: {text}\nIntent: {label}",
    ),
}


@dataclass
class Problem:
    """works, labels and answers: one an item; finish turns an item's label log-probabilities into a label."""

    labels: list[str]
    works: list[Work]
    answers: list[str]
    task: object


def load(name: str, folder: Path, llm: LLM, count: int) -> Problem:
    """Items with a shared instruction and examples; MMLU brings a prompt of its own for each subject."""
    if name == "mmlu":
        prefixes = {p["prefix_id"]: p["prefix"] for p in read_jsonl(folder / "mmlu_5shot" / "prefixes.jsonl.gz")}
        items = spread_over(read_jsonl(folder / "mmlu_5shot" / "dev.jsonl.gz"), count)
        texts = [prefixes[item["prefix_id"]] + item["suffix"] for item in items]
        labels, answers = list("ABCD"), [item["answer"] for item in items]
        task = llm.task("classify", labels=labels, template="{text} {label}")
    else:
        place = folder / {"trec": "trec_qc"}.get(name, name)
        names = TREC if name == "trec" else {}
        items = spread_over(read_jsonl(place / "dev.jsonl.gz"), count)
        shots = read_jsonl(place / "fewshot.jsonl.gz")
        written = lambda label: names.get(label, label.replace("_", " "))  # noqa: E731
        examples = interleaved([(shot["text"], written(shot["label"])) for shot in shots])
        labels = list(dict.fromkeys(label for _, label in examples))
        texts, answers = [item["text"] for item in items], [written(item["label"]) for item in items]
        instructions, template = ASKED[name]
        task = llm.task(
            "classify",
            labels=labels,
            instructions=instructions.replace("{labels}", ", ".join(labels)),
            # The list of 77 labels is the shared prefix; two examples of each would make it ten times as long.
            examples=examples[:8] if name == "banking77" else examples,
            template=template,
        )
    return Problem(labels, task.prepare([{"text": text} for text in texts]), answers, task)


def spread_over(items: list[dict], count: int) -> list[dict]:
    """`count` items, evenly over the file: every subject is there."""
    return [items[i * len(items) // count] for i in range(count)]


def interleaved(examples: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """One of each label in turn: a model repeats the label of the last examples when they are all alike."""
    seen: dict[str, int] = {}
    turns = []
    for example in examples:
        turns.append(seen.get(example[1], 0))
        seen[example[1]] = turns[-1] + 1
    return [examples[i] for i in sorted(range(len(examples)), key=turns.__getitem__)]


def predict(problem: Problem, sums: np.ndarray) -> list[str]:
    return [problem.labels[i] for i in sums.reshape(len(problem.works), len(problem.labels)).argmax(1)]


def accuracy(problem: Problem, found: list[str]) -> float:
    return float(np.mean([f == a for f, a in zip(found, problem.answers, strict=True)]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, type=Path)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--tasks", default="sst2,trec,banking77,mmlu")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--accuracy", action="store_true", help="also every mode in float32, for its accuracy")
    parser.add_argument("--modes", default="full,mlp,off")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--transformers", action="store_true")
    parser.add_argument("--vllm", help="a virtual environment with vLLM in it")
    parser.add_argument("--items", type=int, help="items of each task")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--json")
    arguments = parser.parse_args()
    dtypes = [arguments.dtype, *(["float32"] if arguments.accuracy and arguments.dtype != "float32" else [])]
    models = {dtype: LLM(arguments.model, dtype=dtype, threads=arguments.threads) for dtype in dtypes}
    main_llm = models[arguments.dtype]
    rows, record = [], []
    with tempfile.TemporaryDirectory() as folder:
        export_folder(main_llm.checkpoint, folder, main_llm.dtype)
        for name in arguments.tasks.split(","):
            problem = load(name, arguments.data, main_llm, arguments.items or COUNTS[name])
            reference = None
            for dtype, llm in models.items():
                for mode in arguments.modes.split(","):
                    requests = [request for work in problem.works for request in work.requests]
                    kept: list = []
                    seconds = timed(
                        lambda llm=llm, requests=requests, kept=kept, problem=problem, mode=mode: kept.append(
                            run_engine(llm.engine, requests, problem.task.readout, mode)
                        ),
                        arguments.repeats,
                    )
                    sums = np.array([r.values.sum() for r in kept[0]])
                    found = predict(problem, sums)
                    reference = found if reference is None else reference
                    changed = sum(a != b for a, b in zip(found, reference, strict=True))
                    rows.append(
                        [
                            name,
                            f"prefold {mode} {dtype}",
                            f"{median(seconds):.1f}",
                            f"{accuracy(problem, found):.3f}",
                            changed,
                        ]
                    )
                    record.append(_record(rows[-1], seconds, len(found)))
                    print("  ", *rows[-1], flush=True)
            for label, system, python, options in peers(arguments):
                done = run_peer(python, system, peer_job(problem, folder, arguments) | options, arguments.repeats)
                found = predict(problem, np.array(done["values"]))
                changed = sum(a != b for a, b in zip(found, reference, strict=True))
                name_of = f"{label} {done['version']} {arguments.dtype}"
                rows.append(
                    [name, name_of, f"{median(done['seconds']):.1f}", f"{accuracy(problem, found):.3f}", changed]
                )
                record.append(_record(rows[-1], done["seconds"], len(found)))
                print("  ", *rows[-1], flush=True)
    print(machine())
    print(table(["task", "system", "s", "accuracy", "labels unlike the first row's"], rows))
    write_json(arguments.json, benchmark="classify", dtype=arguments.dtype, model=arguments.model, runs=record)


def _record(row: list, seconds: list[float], items: int) -> dict:
    """Returns what the file keeps of a row of the table."""
    task, system, _, share, unlike = row
    return {
        "task": task,
        "system": system,
        "items": items,
        "seconds": seconds,
        "accuracy": float(share),
        "unlike": unlike,
    }


def peers(arguments) -> list[tuple[str, str, str, dict]]:
    found = []
    if arguments.transformers:
        found.append(("transformers", "transformers", python_of(None), {}))
    if arguments.vllm:
        found.append(("vLLM block 32", "vllm", python_of(arguments.vllm), {"block": 32}))
    return found


def peer_job(problem: Problem, folder: str, arguments) -> dict:
    """Labels of one token: a prompt an item, their ids wanted at its end. Else a prompt a label, to be scored."""
    job = {"model": folder, "dtype": arguments.dtype, "threads": arguments.threads, "max_model_len": 8192}
    if all(len(request.targets) == 1 for work in problem.works for request in work.requests):
        return job | {
            "prompts": [work.requests[0].tokens.tolist() for work in problem.works],
            "ids": [[int(request.targets[0]) for request in work.requests] for work in problem.works],
        }
    whole = [request for work in problem.works for request in work.requests]
    return job | {
        "prompts": [[*r.tokens.tolist(), int(r.targets[-1])] for r in whole],
        "targets": [r.targets.tolist() for r in whole],
    }


if __name__ == "__main__":
    main()
