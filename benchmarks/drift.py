"""What number formats change on a CPU: accuracy, order and similarity on records with right answers, beside float32.

    python benchmarks/drift.py --data FOLDER [--model smollm2-135m] [--cases float32,bfloat16,...] [--q8 FILE.gguf]
        [--limit N] [--keep FOLDER] [--json FILE]

FOLDER holds mmlu_5shot, sst2, msmarco_v11 and stsb, each with dev.jsonl.gz (MMLU: prefixes.jsonl.gz, SST-2:
fewshot.jsonl.gz).
The weights of --model are written to a folder in float32, which every case but those of a file loads:

    float32, bfloat16   the dtype, with all else as it is
    int8                --weights int8 --arithmetic int8, rows in bfloat16
    file                the model's own file as stored, rows in float32, where it is a GGUF file
    q8, q8-int8         a file of type Q8_0 as stored, rows in float32; and with --arithmetic int8, rows in bfloat16

Where --q8 is left out, the model must be a GGUF file, and its matrices are quantised to Q8_0.

MMLU: the likeliest of " A" to " D" after five examples. SST-2: the likelier of two labels after 16 examples, of both
labels in turn. MS MARCO: passages in the order of the likelihood of the query after them, nDCG@10. STS-B: Spearman's
correlation of the cosine of two embeddings with people's score. All are in points, of 100.

With --keep, what a case gave stays in a folder, so that a run goes on where another one was ended, and cases may run in
processes of their own, whose last one finds all of them there.

Beside them stand the share of answers (MS MARCO: of orders) that are not those of the first case, and the mean absolute
difference of the numbers they come from: log-probabilities of labels and queries; cosines, in points.
"""

from __future__ import annotations

import argparse
import gzip
import json
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import gguf
import numpy as np
import torch
from common import export_folder, machine, table, write_json
from gguf.quants import dequantize, quantize

from prefold import LLM
from prefold.checkpoint import resolve

PASSAGES = 8  # of a query of MS MARCO, about: it counts as so many records
CASES = ("float32", "bfloat16", "int8", "file", "q8", "q8-int8")


def read(folder: Path, name: str, limit: int | None = None) -> list[dict]:
    with gzip.open(folder / name, "rt", encoding="utf-8") as lines:
        every = [json.loads(line) for line in lines]
    return every[:: max(1, len(every) // limit)][:limit] if limit else every


class Outcome(NamedTuple):
    """An Outcome is what a case makes of a data set.

    points   accuracy, nDCG or correlation
    answers  of each record: the label, or the order of passages; None where there is nothing to answer
    numbers  that the answers come from
    """

    points: float
    answers: list | None
    numbers: np.ndarray


def classified(llm: LLM, prompts: list[str], labels: list[str], right: list[str]) -> Outcome:
    """Returns what the likeliest of some labels are; `right`: the label of each prompt."""
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
    """Ranks, equal values with their mean."""
    _, which, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[which]


TASKS = {"MMLU": mmlu, "SST-2": sst2, "MS MARCO": msmarco, "STS-B": stsb}


def write_q8(source: Path, target: Path) -> Path:
    """Writes a GGUF file whose matrices are those of another one in the type Q8_0, and returns its path."""
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


def outcomes_of(case: str, folder: Path, q8: str, arguments: argparse.Namespace) -> tuple[str, dict[str, Outcome]]:
    """Returns what ran in a case, and its outcome of each data set: computed, or as they were kept."""
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
    """Returns what is published of an outcome, beside that of the first case."""
    answers = outcome.answers and zip(outcome.answers, first.answers, strict=True)
    return {
        "points": outcome.points,
        "records": len(outcome.answers or outcome.numbers),
        "changed": answers and 100 * float(np.mean([a != b for a, b in answers])),
        "difference": float(np.abs(outcome.numbers - first.numbers).mean()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--q8", metavar="FILE")
    parser.add_argument("--limit", type=int, default=1000, help="records of a data set")
    parser.add_argument("--keep", metavar="FOLDER", type=Path)
    parser.add_argument("--json")
    arguments = parser.parse_args()
    runs: list[dict] = []
    firsts: dict[str, Outcome] = {}
    with tempfile.TemporaryDirectory() as scratch:
        checkpoint = resolve(arguments.model)
        folder = export_folder(checkpoint, Path(scratch) / "model", torch.float32)
        q8 = arguments.q8
        if q8 is None and "q8" in arguments.cases:
            q8 = str(write_q8(checkpoint.gguf.path, Path(scratch) / "q8.gguf"))
        for case in arguments.cases.split(","):
            passes, outcomes = outcomes_of(case, folder, q8, arguments)
            for name, outcome in outcomes.items():
                found = beside(outcome, firsts.setdefault(name, outcome))
                runs.append({"case": case, "task": name} | found | {"passes": passes})
                print(case, name, found, flush=True)
            write_json(arguments.json, benchmark="drift", model=arguments.model, runs=runs)
    print("\nPoints (less the first case's; share of answers or orders that changed; mean difference of numbers)\n")
    print(table(["case", *TASKS, "what ran"], [row(case, runs) for case in arguments.cases.split(",")]))
    print("\n" + ", ".join(f"{name} {value}" for name, value in machine().items()))


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
