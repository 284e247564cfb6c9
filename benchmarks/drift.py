"""Measure how number formats change results on a CPU: accuracy, ranking and similarity of records with known answers.

    python benchmarks/drift.py --data FOLDER --limit 1000 --cases float32,bfloat16,q8 --keep FOLDER --json FILE

FOLDER has mmlu_5shot, sst2, msmarco_v11 and stsb, each with dev.jsonl.gz (MMLU also prefixes.jsonl.gz, SST-2 also
fewshot.jsonl.gz). Cases without a file load the weights of --model as float32:

    float32, bfloat16   this dtype
    int8                --weights int8 --arithmetic int8, rows in bfloat16
    file                the model's own GGUF file as stored, rows in float32
    q8                  a file of type Q8_0 as stored, rows in float32
    q8-int8             the same file with --arithmetic int8, rows in bfloat16

Without --q8 the model must be a GGUF file; its matrices are then quantised to Q8_0.

MMLU: the most likely of " A" to " D" after five examples. SST-2: the more likely of two labels after 16 examples with
alternating labels. MS MARCO: passages ordered by the likelihood of the query after them, nDCG@10. STS-B: Spearman's
correlation of the cosine of two embeddings with the human score. All values are percentages.

The results also have the share of answers (MS MARCO: orders) that differ from the first case, and the mean absolute
difference between the log-probabilities of labels and queries (STS-B: between the cosines, times 100). With --keep, the
results of each case stay in a folder. A later run then continues, and each case may run in its own process.
"""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import click
import gguf
import numpy as np
import torch
from gguf.quants import dequantize, quantize
from harness import FOLDER, Listed, benchmark, export_folder, read_jsonl, table, write_json

from prefold import LLM
from prefold.checkpoint import resolve

PASSAGES = 8  # about the number of passages of a query of MS MARCO; a query counts as this many records
CASES = ("float32", "bfloat16", "int8", "file", "q8", "q8-int8")


def read(folder: Path, name: str, limit: int | None = None) -> list[dict]:
    every = read_jsonl(folder / name)
    return every[:: max(1, len(every) // limit)][:limit] if limit else every


class Outcome(NamedTuple):
    """The results of a case on a data set."""

    points: float  # accuracy, nDCG or correlation
    answers: list | None  # the label, or the order of passages, of each record; None: the data set has no answers
    numbers: np.ndarray  # the log-probabilities or cosines that determine the answers


def classified(llm: LLM, prompts: list[str], labels: list[str], right: list[str]) -> Outcome:
    """Classify each prompt as its most likely label. `right` has the true labels."""
    scores = llm.score(prompts, [[" " + label for label in labels]] * len(prompts), truncate=True)
    numbers = np.array([[one.logprob for one in of_prompt] for of_prompt in scores])
    answers = [labels[i] for i in numbers.argmax(1)]
    return Outcome(100 * float(np.mean([a == b for a, b in zip(answers, right, strict=True)])), answers, numbers)


def mmlu(llm: LLM, folder: Path, limit: int) -> Outcome:
    records = read(folder / "mmlu_5shot", "dev.jsonl.gz", limit)
    prefixes = {one["prefix_id"]: one["prefix"] for one in read(folder / "mmlu_5shot", "prefixes.jsonl.gz")}
    prompts = [prefixes[one["prefix_id"]] + one["suffix"] for one in records]
    return classified(llm, prompts, ["A", "B", "C", "D"], [one["answer"] for one in records])


def sst2(llm: LLM, folder: Path, limit: int) -> Outcome:
    records, labels = read(folder / "sst2", "dev.jsonl.gz", limit), ["negative", "positive"]
    shots = read(folder / "sst2", "fewshot.jsonl.gz")
    in_turn = zip(*([one for one in shots if one["label"] == label] for label in labels), strict=True)
    shown = "".join(f"Review: {one['text']}\nSentiment: {one['label']}\n\n" for pair in in_turn for one in pair)
    prompts = [f"{shown}Review: {one['text']}\nSentiment:" for one in records]
    return classified(llm, prompts, labels, [one["label"] for one in records])


def msmarco(llm: LLM, folder: Path, limit: int) -> Outcome:
    gains, orders = [], []
    records = read(folder / "msmarco_v11", "dev.jsonl.gz", max(1, limit // PASSAGES))
    prompts = [f"Passage: {p['text']}\nQuestion:" for one in records for p in one["passages"]]
    queries = [f" {one['query']}" for one in records for _ in one["passages"]]
    numbers = np.array([one.logprob for one in llm.score(prompts, queries, truncate=True)])
    first = 0
    for one in records:
        order = np.argsort(-numbers[first : first + len(one["passages"])], kind="stable")
        first += len(order)
        labels = np.array([p["label"] for p in one["passages"]])
        fall = 1 / np.log2(np.arange(2, 12))
        best = (np.sort(labels)[::-1][:10] * fall[: len(labels)]).sum()
        if best:
            gains.append((labels[order][:10] * fall[: len(labels)]).sum() / best)
        orders.append(order.tolist())
    return Outcome(100 * float(np.mean(gains)), orders, numbers)


def stsb(llm: LLM, folder: Path, limit: int) -> Outcome:
    records = read(folder / "stsb", "dev.jsonl.gz", limit)
    vectors = llm.embed([one[name] for name in ("sentence1", "sentence2") for one in records], pooling="mean")
    first, second = np.split(np.asarray(vectors), 2)
    cosines = (first * second).sum(1) / np.linalg.norm(first, axis=1) / np.linalg.norm(second, axis=1)
    ranks = [ranked(values) for values in (cosines, np.array([one["score"] for one in records]))]
    return Outcome(100 * float(np.corrcoef(ranks)[0, 1]), None, 100 * cosines)


def ranked(values: np.ndarray) -> np.ndarray:
    """Return ranks; equal values get their mean rank."""
    _, which, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[which]


TASKS = {"MMLU": mmlu, "SST-2": sst2, "MS MARCO": msmarco, "STS-B": stsb}


def write_q8(source: Path, target: Path) -> Path:
    """Write a copy of a GGUF file with matrices of type Q8_0, and return its path."""
    reader = gguf.GGUFReader(source)
    fields = {name: field for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    writer = gguf.GGUFWriter(target, fields.pop("general.architecture").contents())
    for name, field in fields.items():
        value = gguf.LlamaFileType.MOSTLY_Q8_0 if name == "general.file_type" else field.contents()
        writer.add_key_value(name, value, field.types[0], field.types[-1])
    kind = gguf.GGMLQuantizationType.Q8_0
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type)
        is_matrix = values.ndim > 1
        writer.add_tensor(
            tensor.name, quantize(values, kind) if is_matrix else values, raw_dtype=kind if is_matrix else None
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def load(case: str, folder: Path, model: str, q8: str) -> LLM:
    settings = {
        "float32": (str(folder), {"dtype": "float32", "weights": "dtype"}),
        "bfloat16": (str(folder), {"dtype": "bfloat16", "weights": "dtype"}),
        "int8": (str(folder), {"dtype": "bfloat16", "weights": "int8", "arithmetic": "int8"}),
        "file": (model, {"dtype": "float32", "weights": "file"}),
        "q8": (q8, {"dtype": "float32", "weights": "file"}),
        "q8-int8": (q8, {"dtype": "bfloat16", "arithmetic": "int8"}),
    }
    name, options = settings[case]
    return LLM(name, device="cpu", **options)


def outcomes_of(case: str, folder: Path, q8: str, arguments: SimpleNamespace) -> tuple[str, dict[str, Outcome]]:
    """Return a description of a case, and its outcome on each data set, computed now or by an earlier run."""
    kept = arguments.keep and arguments.keep / f"{case}-{arguments.limit}.json"
    if kept and kept.exists():
        passes, outcomes = json.loads(kept.read_text())
        return passes, {name: Outcome(one[0], one[1], np.array(one[2])) for name, one in outcomes.items()}
    with load(case, folder, arguments.model, q8) as llm:
        passes, outcomes = llm.passes, {}
        for name, task in TASKS.items():
            outcomes[name] = task(llm, arguments.data, arguments.limit)
            print(time.strftime("%H:%M:%S"), case, name, outcomes[name].points, flush=True)
    if kept:
        kept.parent.mkdir(parents=True, exist_ok=True)
        plain = {name: (*one[:2], one.numbers.tolist()) for name, one in outcomes.items()}
        kept.write_text(json.dumps([passes, plain]))
    return passes, outcomes


def beside(outcome: Outcome, first: Outcome) -> dict:
    """Return the values of an outcome, and its differences from the first case."""
    answers = outcome.answers and zip(outcome.answers, first.answers, strict=True)
    return {
        "points": outcome.points,
        "records": len(outcome.answers or outcome.numbers),
        "changed": answers and 100 * float(np.mean([a != b for a, b in answers])),
        "difference": float(np.abs(outcome.numbers - first.numbers).mean()),
    }


@benchmark("data", "model", limits=False)
@click.option("--cases", type=Listed(among=CASES), default=",".join(CASES), show_default=True, help="Cases to run.")
@click.option("--q8", metavar="FILE", help="GGUF file of type Q8_0.")
@click.option("--limit", type=int, default=1000, show_default=True, help="Records per data set.")
@click.option("--keep", type=FOLDER, metavar="FOLDER", help="Folder for the results of cases.")
def main(arguments: SimpleNamespace) -> dict[str, Any]:
    runs: list[dict] = []
    firsts: dict[str, Outcome] = {}
    with tempfile.TemporaryDirectory() as scratch:
        checkpoint = resolve(arguments.model)
        folder = export_folder(checkpoint, Path(scratch) / "model", torch.float32)
        q8 = arguments.q8
        if q8 is None and any(case.startswith("q8") for case in arguments.cases):
            q8 = str(write_q8(checkpoint.gguf.path, Path(scratch) / "q8.gguf"))
        for case in arguments.cases:
            passes, outcomes = outcomes_of(case, folder, q8, arguments)
            for name, outcome in outcomes.items():
                found = beside(outcome, firsts.setdefault(name, outcome))
                runs.append({"case": case, "task": name} | found | {"passes": passes})
                print(case, name, found, flush=True)
            # After every case: a case takes long, and a later case may fail.
            write_json(arguments.json, benchmark="drift", model=arguments.model, runs=runs)
    print("\nPoints (less the first case's; share of answers or orders that changed; mean difference of numbers)\n")
    print(table(["case", *TASKS, "what ran"], [row(case, runs) for case in arguments.cases]))
    return {"model": arguments.model, "runs": runs}


def row(case: str, runs: list[dict]) -> list[str]:
    cells = [case]
    for task in TASKS:
        first, found = (
            next(run for run in runs if run["task"] == task and run["case"] == c) for c in (runs[0]["case"], case)
        )
        changed = "" if found["changed"] is None else f"{found['changed']:.1f} %; "
        cells.append(
            f"{found['points']:.2f} ({found['points'] - first['points']:+.2f}; {changed}{found['difference']:.3g})"
        )
    return [*cells, next(run["passes"] for run in runs if run["case"] == case)]


if __name__ == "__main__":
    main()
