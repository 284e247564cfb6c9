"""What number formats change on a CPU: accuracy, order and similarity on records with right answers, beside float32.

    python benchmarks/drift.py --data FOLDER [--model smollm2-135m] [--cases float32,bfloat16,...] [--q8 FILE.gguf]
        [--limit N] [--json FILE]

FOLDER holds mmlu_5shot, sst2, msmarco_v11 and stsb, each with dev.jsonl.gz (MMLU: prefixes.jsonl.gz, SST-2:
fewshot.jsonl.gz).
The weights of --model are written to a folder in float32, which every case but those of a file loads:

    float32, bfloat16   the dtype, with all else as it is
    int8                --weights int8 --arithmetic int8, rows in bfloat16
    q8, q8-int8         the file of --q8 as stored, rows in float32; and with --arithmetic int8
    file                the model's own file as stored, rows in float32, where it is a GGUF file

MMLU: the likeliest of " A" to " D" after five examples. SST-2: the likelier of two labels after eight examples.
MS MARCO: passages in the order of the likelihood of the query after them, nDCG@10. STS-B: Spearman's correlation of
the cosine of two embeddings with people's score.
All are in points, of 100.
"""

from __future__ import annotations

import argparse
import gzip
import json
import tempfile
from pathlib import Path

import numpy as np
import torch
from common import export_folder, machine, table, write_json

from prefold import LLM
from prefold.checkpoint import resolve

CASES = ("float32", "bfloat16", "int8", "file", "q8", "q8-int8")


def read(folder: Path, name: str, limit: int | None = None) -> list[dict]:
    with gzip.open(folder / name, "rt", encoding="utf-8") as lines:
        every = [json.loads(line) for line in lines]
    return every[:: max(1, len(every) // limit)][:limit] if limit else every


def likeliest(llm: LLM, prompts: list[str], labels: list[str]) -> list[int]:
    scores = llm.score(prompts, [labels] * len(prompts), truncate=True)
    return [int(np.argmax([one.logprob for one in of_prompt])) for of_prompt in scores]


def mmlu(llm: LLM, folder: Path, limit: int) -> tuple[float, list]:
    records = read(folder / "mmlu_5shot", "dev.jsonl.gz", limit)
    prefixes = {one["prefix_id"]: one["prefix"] for one in read(folder / "mmlu_5shot", "prefixes.jsonl.gz")}
    found = likeliest(llm, [prefixes[one["prefix_id"]] + one["suffix"] for one in records], [" A", " B", " C", " D"])
    return 100 * float(np.mean(["ABCD"[i] == one["answer"] for i, one in zip(found, records, strict=True)])), found


def sst2(llm: LLM, folder: Path, limit: int) -> tuple[float, list]:
    records, labels = read(folder / "sst2", "dev.jsonl.gz", limit), ["negative", "positive"]
    shots = read(folder / "sst2", "fewshot.jsonl.gz")[:8]
    shown = "".join(f"Review: {one['text']}\nSentiment: {one['label']}\n\n" for one in shots)
    prompts = [f"{shown}Review: {one['text']}\nSentiment:" for one in records]
    found = likeliest(llm, prompts, [" " + label for label in labels])
    return 100 * float(np.mean([labels[i] == one["label"] for i, one in zip(found, records, strict=True)])), found


def msmarco(llm: LLM, folder: Path, limit: int) -> tuple[float, list]:
    gains, orders = [], []
    records = read(folder / "msmarco_v11", "dev.jsonl.gz", limit)
    prompts = [f"Passage: {p['text']}\nQuestion:" for one in records for p in one["passages"]]
    queries = [f" {one['query']}" for one in records for _ in one["passages"]]
    scores = iter(llm.score(prompts, queries, truncate=True))
    for one in records:
        order = np.argsort([-next(scores).logprob for _ in one["passages"]], kind="stable")
        labels = np.array([p["label"] for p in one["passages"]])
        fall = 1 / np.log2(np.arange(2, 12))
        best = (np.sort(labels)[::-1][:10] * fall[: len(labels)]).sum()
        if best:
            gains.append((labels[order][:10] * fall[: len(labels)]).sum() / best)
        orders.append(order.tolist())
    return 100 * float(np.mean(gains)), orders


def stsb(llm: LLM, folder: Path, limit: int) -> tuple[float, list]:
    records = read(folder / "stsb", "dev.jsonl.gz", limit)
    vectors = llm.embed([one[name] for name in ("sentence1", "sentence2") for one in records], pooling="mean")
    first, second = np.split(np.asarray(vectors), 2)
    cosines = (first * second).sum(1) / np.linalg.norm(first, axis=1) / np.linalg.norm(second, axis=1)
    ranks = [ranked(values) for values in (cosines, np.array([one["score"] for one in records]))]
    return 100 * float(np.corrcoef(ranks)[0, 1]), []


def ranked(values: np.ndarray) -> np.ndarray:
    """Ranks, equal values with their mean."""
    _, which, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[which]


TASKS = {"MMLU": mmlu, "SST-2": sst2, "MS MARCO": msmarco, "STS-B": stsb}


def load(case: str, folder: Path, arguments: argparse.Namespace) -> LLM:
    how = {"float32": {"dtype": "float32"}, "bfloat16": {"dtype": "bfloat16"}}.get(case)
    if how:
        return LLM(str(folder), weights="dtype", **how)
    if case == "int8":
        return LLM(str(folder), dtype="bfloat16", weights="int8", arithmetic="int8")
    if case == "file":
        return LLM(arguments.model, dtype="float32", weights="file")
    if case == "q8":
        return LLM(arguments.q8, dtype="float32", weights="file")
    return LLM(arguments.q8, dtype="bfloat16", arithmetic="int8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--cases", default="float32,bfloat16,int8,file")
    parser.add_argument("--q8", metavar="FILE")
    parser.add_argument("--limit", type=int, default=1000, help="records of a data set")
    parser.add_argument("--json")
    arguments = parser.parse_args()
    rows, points, before = [], {}, {}
    with tempfile.TemporaryDirectory() as scratch:
        folder = export_folder(resolve(arguments.model), Path(scratch) / "model", torch.float32)
        for case in arguments.cases.split(","):
            with load(case, folder, arguments) as llm:
                row = [case]
                for name, task in TASKS.items():
                    value, found = task(llm, arguments.data, arguments.limit)
                    first, other = before.setdefault(name, (value, found))
                    points.setdefault(case, {})[name] = value
                    changed = f", {np.mean([a != b for a, b in zip(found, other, strict=True)]):.1%}" if found else ""
                    row.append(f"{value:.2f} ({value - first:+.2f}{changed})")
                    print(case, name, row[-1], flush=True)
                rows.append([*row, llm.passes])
    write_json(arguments.json, benchmark="drift", model=arguments.model, points=points)
    print("\nPoints (less the first row's, share of answers or orders that are others)\n")
    print(table(["case", *TASKS, "what ran"], rows))
    print("\n" + ", ".join(f"{name} {value}" for name, value in machine().items()))


if __name__ == "__main__":
    main()
