"""Run lm-evaluation-harness with prefold and with its own "hf" model, and compare scores and times.

    python benchmarks/lmeval.py --data FOLDER --limit 100 --dtype float32 --json FILE

FOLDER has mmlu_5shot and gsm8k (dev.jsonl.gz and prefixes.jsonl.gz each). The script writes task files for them:

    mmlu_5shot_local    the standard 5-shot prompts, as multiple choice; subjects take turns
    gsm8k_8shot_local   the 8-shot chain of thought, generate_until, with the filters of the harness's gsm8k_cot
    gsm8k_text_local    questions and answers as plain text, rolling log-likelihood

Both models run every task in turn, in one process, with the same weights. Times are from the harness's requests to the
model's answers, without loading, building requests, and metrics. "differ" counts documents with another choice, or with
another text after the filter. "gap" is the largest difference of a log-likelihood. In float32 no document should
differ. Most of the gap comes from the hf model's log_softmax, which sums a large vocabulary in float32.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
from harness import Listed, Rounds, benchmark, clocked, export_folder, median, read_jsonl, spread, table

from prefold import LLM

# The data sets are not on the hub, and the harness must not look there.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
KINDS = ("loglikelihood", "loglikelihood_rolling", "generate_until")
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
    """Write a task file. JSON is YAML, so the file is JSON."""
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


def timed_requests(model) -> list[float]:
    """Wrap the three methods of a model. Return a list that gets the seconds of every call."""
    seconds: list[float] = []

    def wrap(method):
        def run(*arguments, **options):
            taken, answers = clocked(lambda: method(*arguments, **options))
            seconds.append(taken)
            return answers

        return run

    for kind in KINDS:
        setattr(model, kind, wrap(getattr(model, kind)))
    return seconds


def answers_of(samples: list[dict]) -> tuple[list, list[float]]:
    """Return {(document, filter): choice or text}, and all log-likelihoods."""
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


@benchmark("data", "model", "dtype", "threads", "repeats", repeats=1)
@click.option("--tasks", type=Listed(among=TASKS), default=",".join(TASKS), show_default=True, help="Tasks.")
@click.option("--limit", type=int, default=100, show_default=True, help="Number of documents of each task.")
@click.option("--batch-size", type=int, default=16, show_default=True, help="Batch size of the hf model.")
def main(arguments: SimpleNamespace) -> dict[str, Any]:
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
        for task in arguments.tasks:
            rounds, said, scores = Rounds(task), {}, {}
            for _ in range(arguments.repeats):
                for name, model in models.items():
                    clocks[name].clear()
                    done = lm_eval.simple_evaluate(
                        model=model, tasks=[task], task_manager=manager, limit=arguments.limit, bootstrap_iters=0
                    )
                    rounds.add(name, sum(clocks[name]))
                    said[name], scores[name] = answers_of(done["samples"][task]), scores_of(done["results"][task])
            for name, values in rounds.seconds.items():
                times = f"{median(rounds.seconds['hf']) / median(values):.2f}"
                (ours, likelihoods), (theirs, expected) = said[name], said["hf"]
                row = [task, name, scores[name], f"{median(values):.1f}", spread(values), times]
                rows.append([*row, differ(ours, theirs), gap(likelihoods, expected)])
            record.append({"task": task, "seconds": rounds.seconds, "scores": scores, "answers": said})
    shown = table(["task", "model", "scores", "s", "spread", "x hf", "differ", "gap"], rows)
    print(f"lm_eval {lm_eval.__version__}, {arguments.dtype}, {arguments.limit} documents a task\n\n{shown}")
    settings = {"limit": arguments.limit, "dtype": arguments.dtype, "lm_eval": lm_eval.__version__}
    return settings | {"tasks": record, "tables": {"tasks": shown}}


if __name__ == "__main__":
    main()
