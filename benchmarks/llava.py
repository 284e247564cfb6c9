"""The case `llava` of `images.py`: every question to all variants, and the table of as many rounds as there are.

    python benchmarks/images.py --case llava --data FOLDER --orders shuffled --rounds 1 --first-round 3 --json 3.json
    python benchmarks/images.py --case llava --merge 1.json,2.json,3.json

A round may be run alone, so that five of them need not be one command; the second line makes their table.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import tempfile
from collections.abc import Iterable
from pathlib import Path
from statistics import mean

import PIL.Image
import torch
from common import median, python_of, spread, table
from image_bench import Asker, Bench, ask_all, bench_config, longest_of, questions
from image_cases import TOKENS, vision_folder
from image_data import SHAPES

from prefold.engine import EngineOptions, GenerateOptions, ModelEngine
from prefold.images.decode import Image
from prefold.images.worker import image_part
from prefold.worker.local import LocalWorker

PLAIN, SLOT = "no reuse", "one slot"
# No reuse, and all questions at once. It has answers, and no times.
COMPANY = "in company"


def llava(options: argparse.Namespace) -> list[dict]:
    """Runs rounds, or reads those that were run before, and prints their table. Returns one dict a variant, order and
    round."""
    if options.merge:
        found = [run for name in options.merge.split(",") for run in json.loads(Path(name).read_text())["found"]]
    else:
        bench, rows = Bench(options), questions(options)
        found = []
        for order in options.orders.split(","):
            for number in range(options.first_round, options.first_round + options.rounds):
                found += _round(bench, rows, order, number)
        missing = len({row["image"] for row in rows}) if options.pictures is None else 0
        print(f"\nimages: {missing} drawings stand in for pictures; longest edge {bench.edge}, answers of at most")
        print(f"{options.tokens} tokens\n")
    _report(found)
    return found


def vllm(options: argparse.Namespace) -> list[dict]:
    """Asks vLLM's CPU build, with its prefix cache, and then prefold's exact cache, of the same weights. Answers have
    all their tokens."""
    options.ignore_eos = True
    dtype, rows = getattr(torch, options.dtype), questions(options)
    orders = {"file": rows, "shuffled": random.Random(0).sample(rows, len(rows))}
    with tempfile.TemporaryDirectory() as name:
        here, bench = Path(name), Bench(options)
        model = vision_folder(here / "model", SHAPES[options.tower], dtype)
        kind = {"processor_class": "SmolVLMProcessor"}
        (model / "processor_config.json").write_text(json.dumps({**kind, "image_seq_len": bench_config(options).rows}))
        names = dict(zip(("fake_image_token", "image_token", "global_image_token"), TOKENS, strict=True))
        for file, more in {
            "preprocessor_config.json": kind,
            "tokenizer_config.json": {**names, "end_of_utterance_token": "<|im_end|>"},
        }.items():
            (model / file).write_text(json.dumps(json.loads((model / file).read_text()) | more))
        asked: dict[str, list[dict[str, str]]] = {order: [] for order in orders}
        for order, some in orders.items():
            for row in some:
                path = here / f"{Path(row['image']).stem}.png"
                PIL.Image.fromarray(bench.picture(row).pixels).save(path)
                prompt = f"<|im_start|>user\n<image>{row['question']}<|im_end|>\n<|im_start|>assistant\n"
                asked[order].append({"prompt": prompt, "image": str(path)})
        job = {"model": str(model), "dtype": options.dtype, "threads": torch.get_num_threads(), "memory": 1}
        (here / "job.json").write_text(json.dumps({**job, "tokens": options.tokens, "orders": asked}))
        script = Path(__file__).with_name("images_vllm.py")
        command = [python_of(options.peer), str(script), str(here / "job.json"), str(here / "out.json")]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"vLLM failed:\n{done.stderr[-4000:]}")
        theirs = json.loads((here / "out.json").read_text())
    found, lines = [], []
    for order, some in orders.items():
        images = [bench.picture(row) for row in some]
        asker = Asker(bench, "exact", longest_of(bench, some, images), len(some))
        for row, image in zip(some, images, strict=True):
            ask_all([asker], row, image)
        ours = asker.end()
        for system, latency, first in (
            ("vLLM", theirs[order]["latency"], theirs[order]["first"]),
            ("prefold", ours.latency, ours.first),
        ):
            found.append({"order": order, "system": system, "latency": latency, "first": first})
            times = [of(what) for what in (latency, first) for of in (mean, median)]
            lines.append([order, system, len(latency), *(f"{1e3 * seconds:,.0f}" for seconds in times)])
    print(table(["order", "system", "questions", "mean ms", "P50 ms", "first token, mean ms", "P50 ms"], lines))
    return found


def _round(bench: Bench, rows: list[dict], order: str, number: int) -> list[dict]:
    """Puts every question to all variants. Each has an engine with nothing left from other rounds."""
    asked = list(rows)
    if order == "shuffled":
        random.Random(0).shuffle(asked)
    images = [bench.picture(row) for row in asked]
    longest = longest_of(bench, asked, images)
    # What the specimen does to answers shows in one round.
    wanted = bench.options.variants.split(",")
    names = [name for name in wanted if name != COMPANY and (name != "specimen" or not number)]
    askers = [Asker(bench, name, longest, len(asked)) for name in names]
    first = number % len(askers)
    askers = askers[first:] + askers[:first]
    for row, image in zip(asked, images, strict=True):
        ask_all(askers, row, image)
        askers.append(askers.pop(0))
    found = []
    for asker in sorted(askers, key=lambda asker: names.index(asker.variant)):
        run = asker.end()
        similar, rouge = bench.similarity(run.answers, rows)
        told = {"similarity": similar, "rouge_l": rouge, **vars(run)}
        found.append({"order": order, "round": number, "variant": asker.variant, "questions": len(asked), **told})
    if COMPANY in wanted and not number:
        answers = _in_company(bench, asked, images, longest)
        similar, rouge = bench.similarity(answers, rows)
        told = {"similarity": similar, "rouge_l": rouge, "answers": answers}
        found.append({"order": order, "round": number, "variant": COMPANY, "questions": len(asked), **told})
    seconds = ", ".join(f"{run['variant']} {run['seconds']:.1f} s" for run in found if "seconds" in run)
    print(f"  {order}, round {number + 1}: {seconds}", flush=True)
    return found


def _in_company(bench: Bench, rows: list[dict], images: list[Image], longest: int) -> dict[str, tuple[int, ...]]:
    """Returns the answers to all questions where they are asked at once, and nothing is reused: what other shapes of
    the same products do to answers."""
    worker = LocalWorker(bench.model, parts=[image_part(bench.tower)])
    kept = GenerateOptions(kv_memory=(longest * len(rows) + 2) * worker.facts.slot_bytes)
    engine = ModelEngine(
        worker, EngineOptions(generation=kept, eos_ids=bench.eos, sharing="off", images={"media_memory": 0})
    )
    told: dict[str, list] = {row["id"]: [] for row in rows}
    for row, image in zip(rows, images, strict=True):
        engine.generator.add(bench.request(engine, row, image), None, told[row["id"]].append)
    while not all(told.values()):
        engine.generator.step()
    return {name: one[0][0].tokens for name, one in told.items()}


def _report(found: list[dict]) -> None:
    """Prints a line an order and variant. Ratios are of the same round; answers are compared with the first round's
    without reuse, over all rounds."""
    lines = []
    for order in dict.fromkeys(run["order"] for run in found):
        here = [run for run in found if run["order"] == order]
        names = dict.fromkeys(run["variant"] for run in here)
        by_variant = {name: [run for run in here if run["variant"] == name] for name in names}
        plain = by_variant.get(PLAIN, here)[0]["answers"]
        for name, runs in by_variant.items():
            changed = {sum(run["answers"][one] != plain[one] for one in plain) for run in runs}
            lengths = [len(answer) for run in runs for answer in run["answers"].values()]
            line = [order, name, len(runs), runs[0]["questions"], f"{sum(lengths) / len(lengths):.1f}"]
            line += [_all(f"{run['similarity']:.6f}" for run in runs), _all(f"{run['rouge_l']:.6f}" for run in runs)]
            line += [_all(map(str, sorted(changed)))]
            lines.append(line + (_times(runs, by_variant) if name != COMPANY else [""] * 10))
    print(table([
        "order", "variant", "rounds", "questions", "tokens", "similarity", "ROUGE-L", "answers changed", "tower runs",
        "rows", "unique rows", "mean ms", "P50 ms", "first token, mean ms", "first token, P50 ms", "mean to no reuse",
        "mean to one slot", "first token to one slot",
    ], lines))  # fmt: skip


def _times(runs: list[dict], by_variant: dict[str, list[dict]]) -> list[str]:
    """Returns what was counted and timed of a variant's rounds."""
    plain, slots = by_variant.get(PLAIN, []), by_variant.get(SLOT, [])
    return [
        *(_all(f"{run[name]:,}" for run in runs) for name in ("tower_runs", "rows", "unique")),
        *(_ms([of(run[what]) for run in runs]) for what in ("latency", "first") for of in (mean, median)),
        _ratios(runs, plain, "latency"), _ratios(runs, slots, "latency"), _ratios(runs, slots, "first"),
    ]  # fmt: skip


def _ms(seconds: list[float]) -> str:
    return f"{1e3 * median(seconds):,.0f}"


def _all(values: Iterable[str]) -> str:
    """Returns the value of all rounds, or the several that they have."""
    return " and ".join(dict.fromkeys(values))


def _ratios(runs: list[dict], others: list[dict], what: str) -> str:
    """Returns the median of runs' sums to those of others in the same rounds, and their spread."""
    by_round = {run["round"]: run for run in others}
    pairs = [(run, by_round[run["round"]]) for run in runs if run["round"] in by_round]
    ratios = [sum(a[what]) / sum(b[what]) for a, b in pairs]
    return f"{median(ratios):.3f} ({spread(ratios)})" if ratios else ""
