"""Runs lm-evaluation-harness on prefold and on its own "hf" model, and compares scores and times.

    python benchmarks/harness.py --data FOLDER [--limit 100] [--tasks mmlu_5shot_local,...] [--dtype bfloat16]

Writes the task files of harness_tasks.py into a temporary folder and runs every task with both models in turn, in one
process and on the same weights. Timed is the model's part: from the harness's requests to its answers, without loading,
without building requests and without metrics. "differ" counts documents with another choice, or another text after its
filter; "gap" is the largest difference of a log-likelihood. In float32 none should differ, and the gap is mostly the hf
model's own log_softmax, which sums a large vocabulary in float32.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path

import torch
from common import export_folder, machine, median, spread, table, write_json
from harness_tasks import TASKS, write_tasks

from prefold import LLM

# Nothing here is on the hub, and the harness must not look there.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
KINDS = ("loglikelihood", "loglikelihood_rolling", "generate_until")


def timed_requests(model) -> list[float]:
    """Let a model add the seconds of every call of its three methods to the list that is returned."""
    seconds: list[float] = []

    def wrap(method):
        def run(*arguments, **options):
            started = time.perf_counter()
            answers = method(*arguments, **options)
            seconds.append(time.perf_counter() - started)
            return answers

        return run

    for kind in KINDS:
        setattr(model, kind, wrap(getattr(model, kind)))
    return seconds


def answers_of(samples: list[dict]) -> tuple[list, list[float]]:
    """What a model said of each document, by document and filter: the choice or the text; and all log-likelihoods."""
    said, likelihoods = [], []
    for sample in sorted(samples, key=lambda sample: (sample["doc_id"], sample["filter"])):
        answer = sample["filtered_resps"]
        if isinstance(answer[0], (list, tuple)):  # (log-likelihood, greedy) of each choice
            answer = [float(one[0]) for one in answer]
        if isinstance(answer[0], float):
            likelihoods += answer
            answer = max(range(len(answer)), key=answer.__getitem__)
        said.append((sample["doc_id"], answer))
    return said, likelihoods


def differ(ours: list, theirs: list) -> str:
    documents = {one[0] for one in ours}
    return f"{len({a[0] for a, b in zip(ours, theirs, strict=True) if a != b})} of {len(documents)}"


def gap(ours: list[float], theirs: list[float]) -> str:
    return f"{max(abs(a - b) for a, b in zip(ours, theirs, strict=True)):.2g}" if ours else ""


def scores_of(results: dict) -> str:
    kept = {k: v for k, v in results.items() if isinstance(v, float) and "stderr" not in k}
    return ", ".join(f"{k.replace(',none', '')} {v:.4f}" for k, v in kept.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, type=Path)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--tasks", default=",".join(TASKS))
    parser.add_argument("--limit", type=int, default=100, help="documents of each task")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--batch-size", type=int, default=16, help="of the hf model")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--json")
    arguments = parser.parse_args()

    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    from prefold.integrations.lm_eval import PrefoldLM

    llm = LLM(arguments.model, dtype=arguments.dtype, threads=arguments.threads)
    rows, record = [], []
    with tempfile.TemporaryDirectory() as folder:
        write_tasks(arguments.data, Path(folder, "tasks"))
        same = str(export_folder(llm.checkpoint, Path(folder, "model"), llm.dtype))
        models = {
            "prefold": PrefoldLM(llm),
            "hf": HFLM(same, device="cpu", dtype=arguments.dtype, batch_size=arguments.batch_size),
        }
        clocks = {name: timed_requests(model) for name, model in models.items()}
        manager = TaskManager(include_path=str(Path(folder, "tasks")), include_defaults=False)
        for task in arguments.tasks.split(","):
            seconds: dict[str, list[float]] = {name: [] for name in models}
            said, scores = {}, {}
            for _ in range(arguments.repeats):
                for name, model in models.items():
                    clocks[name].clear()
                    done = lm_eval.simple_evaluate(
                        model=model, tasks=[task], task_manager=manager, limit=arguments.limit, bootstrap_iters=0
                    )
                    seconds[name].append(sum(clocks[name]))
                    said[name], scores[name] = answers_of(done["samples"][task]), scores_of(done["results"][task])
                    print(f"  {task} {name}: {seconds[name][-1]:.1f} s, {scores[name]}", flush=True)
            for name, values in seconds.items():
                times = f"{median(seconds['hf']) / median(values):.2f}"
                (ours, likelihoods), (theirs, expected) = said[name], said["hf"]
                row = [task, name, scores[name], f"{median(values):.1f}", spread(values), times]
                rows.append([*row, differ(ours, theirs), gap(likelihoods, expected)])
            record.append({"task": task, "seconds": seconds, "scores": scores, "answers": said})
    print(machine(), f"lm_eval {lm_eval.__version__}, {arguments.dtype}, {arguments.limit} documents a task")
    shown = table(["task", "model", "scores", "s", "spread", "x hf", "differ", "gap"], rows)
    print(shown)
    settings = {"limit": arguments.limit, "dtype": arguments.dtype}
    write_json(arguments.json, benchmark="harness", tasks=record, **settings, tables={"tasks": shown})


if __name__ == "__main__":
    main()
