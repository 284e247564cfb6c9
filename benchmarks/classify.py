"""Measure few-shot classification on a CPU: accuracy and time of prefold's modes, transformers and vLLM.

    python benchmarks/classify.py --data FOLDER [--tasks sst2,trec,banking77,mmlu] [--vllm VENV] [--transformers]

FOLDER has sst2, trec_qc, banking77 (dev.jsonl.gz and fewshot.jsonl.gz: text, label) and mmlu_5shot (dev.jsonl.gz,
prefixes.jsonl.gz). All systems read the same prompts. Times are from token ids to label scores. With --accuracy every
mode also runs in float32, where all modes must have the same accuracy.
"""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import numpy as np
from harness import Listed, Rounds, benchmark, compared, export_folder, open_peers, read_jsonl, run_engine

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
# {task: (instructions, template)}
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
    """The items of a task. `works` and `answers` have one element per item."""

    labels: list[str]
    works: list[Work]
    answers: list[str]
    task: object


def load(name: str, folder: Path, llm: LLM, count: int) -> Problem:
    """Return items with a shared instruction and examples. MMLU has its own prompt for each subject."""
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
    """Return `count` items spread evenly over the file, so that every subject occurs."""
    return [items[i * len(items) // count] for i in range(count)]


def interleaved(examples: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return examples with alternating labels, because a model repeats the label of equal last examples."""
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


@benchmark("data", "model", "dtype", "threads", "transformers", "vllm", "blocks", "repeats", repeats=1)
@click.option("--tasks", type=Listed(among=COUNTS), default=",".join(COUNTS), show_default=True, help="Data sets.")
@click.option("--items", type=int, help="Number of items of each task.")
@click.option("--accuracy", is_flag=True, help="Also run every mode in float32, for its accuracy.")
@click.option("--modes", type=Listed(), default="full,mlp,off", show_default=True, help="prefold's sharing modes.")
def main(arguments: SimpleNamespace) -> dict[str, Any]:
    dtypes = [arguments.dtype, *(["float32"] if arguments.accuracy and arguments.dtype != "float32" else [])]
    models = {dtype: LLM(arguments.model, dtype=dtype, threads=arguments.threads) for dtype in dtypes}
    main_llm, record = models[arguments.dtype], []
    with tempfile.TemporaryDirectory() as folder:
        export_folder(main_llm.checkpoint, folder, main_llm.dtype)
        for name in arguments.tasks:
            problem = load(name, arguments.data, main_llm, arguments.items or COUNTS[name])
            rounds = measure(name, problem, models, folder, arguments)
            found = {system: predict(problem, np.array(sums)) for system, sums in rounds.found.items()}
            reference = next(iter(found.values()))
            unlike = {one: sum(a != b for a, b in zip(f, reference, strict=True)) for one, f in found.items()}
            right = {system: accuracy(problem, labels) for system, labels in found.items()}
            for system, seconds in rounds.seconds.items():
                counts = {"items": len(reference), "accuracy": round(right[system], 3), "unlike": unlike[system]}
                record.append({"task": name, "system": system, "seconds": seconds} | counts)
            shown = {system: f"{share:.3f}" for system, share in right.items()}
            columns = {"accuracy": shown, "labels unlike the first row's": unlike}
            print(f"\n{name}\n\n{compared(rounds.seconds, columns=columns)}", flush=True)
    return {"dtype": arguments.dtype, "model": arguments.model, "runs": record}


def measure(name: str, problem: Problem, models: dict, folder: str, arguments: SimpleNamespace) -> Rounds:
    """Time all systems in turn."""
    requests, rounds = [request for work in problem.works for request in work.requests], Rounds(name)

    def ours(llm: LLM, mode: str) -> np.ndarray:
        results = run_engine(llm.engine, requests, problem.task.readout, mode)
        return np.array([result.values.sum() for result in results])

    for llm in models.values():  # warm-up
        run_engine(llm.engine, requests[:8], problem.task.readout)
    with ExitStack() as stack:
        peers = open_peers(stack, arguments, peer_job(problem, folder, arguments))
        for _ in range(arguments.repeats):
            for dtype, llm in models.items():
                for mode in arguments.modes:
                    rounds.run(f"prefold {mode} {dtype}", partial(ours, llm, mode))
            for title, peer in peers.items():
                rounds.add(title, *peer.run())
    return rounds


def peer_job(problem: Problem, folder: str, arguments: SimpleNamespace) -> dict[str, Any]:
    """Return the job of a peer.

    If every label is one token, the job has one prompt per item, and reads the labels' ids at its end. Otherwise it has
    one prompt per label, and scores the last tokens.
    """
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
