"""The jobs of a recording: commands on small files, each with one thing that others do not have."""

from __future__ import annotations

import base64
import csv
import gzip
import io
import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["JOBS", "Job", "write_inputs"]

INSTRUCTION = "the note below is from a reader; say whether it is yes or no. "
TEXTS = [
    INSTRUCTION * (1 + i % 2) + f"note {i}: " + "the yes and the no " * (i % 5) + chr(97 + i % 7) for i in range(24)
]
BATCH: list[tuple[str, dict[str, Any]]] = [
    *(
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": text}], "max_tokens": 8, "temperature": 0})
        for text in TEXTS[:4]
    ),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "draw"}], "max_tokens": 8, "seed": 7, "n": 2}),
    ("/v1/completions", {"prompt": TEXTS[:2], "max_tokens": 5, "temperature": 0, "logprobs": 2}),
    ("/v1/completions", {"prompt": [40, 50, 60], "max_tokens": 3, "temperature": 0, "guided_choice": ["yes", "no"]}),
    ("/v1/responses", {"input": "say yes", "max_output_tokens": 16, "temperature": 0}),
    ("/v1/embeddings", {"input": TEXTS[:2], "dimensions": 4}),
    ("/v1/embeddings", {"input": "one", "encoding_format": "base64"}),
    ("/v1/score", {"text_1": "the query", "text_2": TEXTS[:3]}),
    ("/rerank", {"query": "the query", "documents": TEXTS[:3], "top_n": 2}),
    ("/v1/chat/completions", {"messages": []}),
    ("/v1/completions", {"prompt": "x", "colour": 1}),
    ("/v1/embeddings", {"input": "no " * 600}),
    ("/v1/nothing", {"input": "x"}),
]
SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["yes", "no"]}, "size": {"type": "integer", "maximum": 99}},
    "required": ["kind", "size"],
    "additionalProperties": False,
}
FACE = """
import dataclasses, json, sys
from prefold import LLM

llm = LLM(sys.argv[1], dtype="float32", threads=1)
texts = ["the note: " + one for one in ("yes", "no", "the yes", "no no")]

def plain(value):
    if dataclasses.is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return value.tolist() if hasattr(value, "tolist") else getattr(value, "__dict__", None) or repr(value)


show = lambda *values: print(json.dumps(values, default=plain))
show("embed", llm.embed(texts))
show("mean", llm.embed(texts, pooling="mean", normalize=False))
show("rerank", llm.rerank("the query", texts))
show("classify", llm.classify(texts, ["yes", "no"]))
show("score", llm.score(texts, ["yes", " the", "no", "no"]))
show("generate", llm.generate(texts, max_tokens=6))
show("draw", llm.generate([[40, 50, 60]], max_tokens=6, temperature=1.0, seed=3, n=2, logprobs=2))
show("chat", llm.chat([{"role": "user", "content": "the yes"}], max_tokens=6))
show("rows", llm.stats.tokens, llm.stats.rows_computed, llm.stats.unique_tokens)
for wrong in (lambda: llm.embed([""]), lambda: llm.embed(["no " * 600]), lambda: llm.generate(["x"], temperature=-1)):
    try:
        wrong()
    except Exception as error:
        show(type(error).__name__, str(error))
"""


@dataclass(frozen=True)
class Job:
    """A Job is commands that are run one after the other in a folder of their own.

    commands      arguments of prefold, or of Python where the first is a script; {text} is the folder of that model
    outputs       files that they write
    input         the file that is their standard input
    killed_after  lines of the standard input that the first command gets before it is killed; 0: it is not
    server        whose address {url} is
    without       fields of the output that depend on the clock
    """

    name: str
    commands: Sequence[Sequence[str]]
    outputs: Sequence[str] = ()
    input: str = ""
    killed_after: int = 0
    server: str | None = None
    without: Sequence[str] = ()


def job(name: str, *commands: str, model: str = "text", output: str = "out.jsonl", **more: Any) -> Job:
    """Returns a Job of commands on a model, each of which writes the same output; "": standard output."""
    fixed = f" -m {{{model}}} --dtype float32 --threads 1" + (f" -o {output}" if output else "")
    made = [shlex.split(command.replace("@", "../../inputs/") + fixed) for command in commands]
    return Job(name, made, (output,) if output else (), **more)


GREEDY = "--prompt text --id id --raw --temperature 0 --max-tokens"
DRAWN = "--prompt text --id id --raw --temperature 1 --seed 5 --max-tokens"
JOBS = [
    # Each task, in each sharing mode, between each pair of formats.
    job("embed-last-full", "embed @texts.jsonl --prompt text --id id --sharing full"),
    job("embed-mean-off", "embed @texts.csv --prompt text --id id --pooling mean --sharing off", output="out.csv"),
    job(
        "embed-mean-mlp",
        "run @texts.parquet --task embed --prompt text --keep * --pooling mean --sharing mlp --no-normalize",
        output="out.parquet",
    ),
    job("embed-sliding", "embed @texts.jsonl --prompt text --dimensions 5 --max-batch-rows 64", model="sliding"),
    job("rerank-full", "rerank @pairs.jsonl --document documents --id id"),
    job(
        "rerank-mlp",
        "rerank @pairs.jsonl --document documents --sharing mlp --raw-scores --instruction 'find it'",
        output="out.parquet",
    ),
    job("rerank-off", "rerank @pairs.csv --document document --sharing off --words yes,no", output="out.csv"),
    job("rerank-head", "rerank @pairs.jsonl --document documents --keep-order", model="ranker"),
    job(
        "classify-full",
        "classify @texts.jsonl --prompt text --labels yes,no,perhaps --calibrate --instructions 'Which?'",
    ),
    job(
        "classify-mlp",
        "classify @texts.csv --prompt text --labels yes,no --examples @examples.jsonl --sharing mlp",
        output="out.tsv",
    ),
    job(
        "classify-off",
        "classify @texts.parquet --prompt text --labels yes,no --normalization bytes --sharing off",
        output="out.parquet",
    ),
    job("classify-head", "classify @texts.jsonl --prompt text --id id", model="labels", output="out.csv.gz"),
    job("score-full", "score @pairs.jsonl --prompt query --continuation documents --id id"),
    job("score-mlp", "score @texts.jsonl --prompt text --sharing mlp", output="out.csv"),
    job("score-off", "score @pairs.csv --prompt query --continuation document --sharing off", output="out.parquet"),
    job("generate-full", f"generate @texts.jsonl {GREEDY} 8 --logprobs 2"),
    job("generate-mlp", f"generate @texts.csv {DRAWN} 8 --n 2 --sharing mlp", output="out.parquet"),
    job(
        "generate-off",
        f"generate @texts.tsv.gz {GREEDY} 8 --repetition-penalty 1.3 --stop yes --sharing off",
        output="out.tsv.gz",
    ),
    job(
        "generate-sampling",
        f"generate @texts.jsonl {DRAWN} 8 --top-k 20 --top-p 0.9 --min-p 0.01 --presence-penalty 0.5"
        " --frequency-penalty 0.2 --min-tokens 4 --logit-bias 40=3 --ignore-eos",
    ),
    job(
        "generate-chat", "generate @chats.jsonl --messages messages --system 'be brief' --max-tokens 6 --temperature 0"
    ),
    job(
        "generate-small-memory",
        f"generate @texts.jsonl {DRAWN} 12 --kv-memory 300KB --max-running 5 --max-batch-rows 48",
    ),
    job("batch-lines", "run @batch.jsonl --keep-order"),
    # What is wrong with records, and what is done about it.
    job("wrong-records", "embed @wrong.jsonl --prompt text --id id"),
    job(
        "truncated",
        "embed @wrong.jsonl --prompt text --id id --truncate --max-length 40 --empty keep",
        output="out.csv",
    ),
    job("wrong-column", "embed @texts.jsonl --prompt nothing"),
    job("wrong-option", "embed @texts.jsonl --prompt text --pooling middle"),
    # Jobs that go on.
    job(
        "limit-then-all",
        f"generate @texts.jsonl {GREEDY} 6 --limit 9 --keep-order",
        f"generate @texts.jsonl {GREEDY} 6 --keep-order",
        output="out.csv",
    ),
    job(
        "killed",
        *[f"generate - --format jsonl --stream --window 512 {DRAWN} 8 --keep-order --quiet"] * 2,
        input="texts.jsonl",
        killed_after=16,
        without=("cached_tokens",),
    ),
    job("another-option", f"generate @texts.jsonl {GREEDY} 6 --limit 5", f"generate @texts.jsonl {GREEDY} 7"),
    job("windows", f"generate @texts.jsonl {GREEDY} 6 --stream --window 400 --cache lru"),
    # Adapters, images, loops, grammars.
    job(
        "adapters",
        f"generate @texts.jsonl {GREEDY} 6 --adapter warm={{warm}} --adapter cold={{cold}} --adapter-column adapter",
    ),
    job("adapter", "embed @texts.jsonl --prompt text --adapter warm={warm}"),
    job(
        "images",
        "generate @pictures.jsonl --prompt text --image picture --max-tokens 6 --temperature 0 --quiet",
        model="images",
    ),
    job("images-embed", "embed @pictures.jsonl --prompt text --image picture", model="images", output="out.parquet"),
    job("looped-read", f"generate @texts.jsonl {GREEDY} 6 --exit-threshold 0.6 --min-visits 2", model="ouro"),
    job(
        "looped-save", f"generate @texts.jsonl {GREEDY} 6 --exits save --exit-change 0.9 --max-visits 4", model="gated"
    ),
    job(
        "looped-project",
        "embed @texts.jsonl --prompt text --exits project --exit-threshold 0.5 --exit-prompts",
        model="gated",
    ),
    job("looped-route", f"generate @texts.jsonl {GREEDY} 6 --exits save --route 0,1,0", model="gated"),
    job("looped-router", f"generate @texts.jsonl {GREEDY} 6", model="routed"),
    job(
        "grammar-schema", f"generate @texts.csv {DRAWN} 40 --json-schema @schema.json --json-columns", output="out.csv"
    ),
    job("grammar-regex", rf"generate @texts.jsonl {DRAWN} 12 --regex '(yes|no)( [a-f]{{2,4}})?'"),
    job("grammar-choice", f"generate @texts.jsonl {GREEDY} 12 --choice yes --choice 'no never'"),
    job(
        "grammar-lark",
        f"generate @texts.jsonl {DRAWN} 12 --grammar 'start: /[0-9]+/ (\"+\" /[0-9]+/)*'",
        output="out.parquet",
    ),
    # Other places to compute.
    job(
        "ray",
        f"run @texts.jsonl --ray --replicas 2 --keep-order --quiet --task generate {DRAWN} 8",
        without=("cached_tokens",),
    ),
    job("two-ranks", "embed @texts.jsonl --prompt text --tensor-parallel 2"),
    Job(
        "url",
        [
            shlex.split(
                f"run ../../inputs/texts.jsonl --task generate {GREEDY} 8 --keep-order --url {{url}} --model tiny"
                " --tokenizer {text} -o out.jsonl"
            )
        ],
        ["out.jsonl"],
        server="text",
        without=("cached_tokens",),
    ),
    # Without a file; and the commands that compute nothing.
    job("words-rerank", "rerank 'the query' 'the first' 'the second'", output=""),
    job("words-embed", "embed 'the first' 'the second' --dimensions 3", output=""),
    job("words-classify", "classify 'the first' --labels yes,no", output=""),
    job("words-score", "score 'the query' ' yes' ' no'", output=""),
    job("words-generate", "generate 'the query' --max-tokens 5", output=""),
    job("standard-output", "embed - --prompt text --quiet", output="", input="texts.jsonl"),
    Job(
        "plan", [shlex.split("plan ../../inputs/pairs.jsonl --task rerank --gflops 20 --document documents -m {text}")]
    ),
    Job(
        "verify",
        [shlex.split("verify ../../inputs/texts.jsonl --task embed --prompt text -m {text} --sample 8 --threads 1")],
    ),
    Job("models", [["models"]]),
    Job("help", [["--help"], *([name, "--help"] for name in ("run", "generate", "serve", "plan", "verify"))]),
    Job("python", [["../../inputs/face.py", "{text}"]]),
]


def picture(seed: int) -> str:
    """Returns a small picture, as base64 of a PNG."""
    import PIL.Image
    from tiny_vision import drawing

    sink = io.BytesIO()
    PIL.Image.fromarray(drawing(seed, 26, 26 + 8 * seed)).save(sink, "PNG")
    return base64.b64encode(sink.getvalue()).decode()


def write_inputs(folder: Path) -> None:
    """Writes the files that jobs read."""
    import pyarrow
    import pyarrow.parquet

    folder.mkdir(parents=True)
    adapters = (None, "warm", "cold")
    texts = [
        {"id": f"t{i}", "text": text, "stars": i % 5} | ({"adapter": adapters[i % 3]} if i % 3 else {})
        for i, text in enumerate(TEXTS)
    ]
    pairs = [{"id": i, "query": f"the query {i % 3}", "documents": TEXTS[i : i + 4]} for i in range(8)]
    chats = [
        {
            "messages": [
                {"role": "user", "content": TEXTS[i]},
                {"role": "assistant", "content": "yes"},
                {"role": "user", "content": "and then?"},
            ][: 1 + 2 * (i % 2)]
        }
        for i in range(6)
    ]
    batch = [{"custom_id": f"b{i}", "method": "POST", "url": url, "body": body} for i, (url, body) in enumerate(BATCH)]
    pictures = [{"text": f"what is it {i}", "picture": [picture(i % 3)][: 3 - i % 4]} for i in range(5)]
    examples = [{"text": "the yes", "label": "yes"}, {"text": "no no", "label": "no"}]
    tables = {
        "texts": texts,
        "pairs": pairs,
        "chats": chats,
        "batch": batch,
        "pictures": pictures,
        "examples": examples,
    }
    for name, rows in tables.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    wrong = [
        *(json.dumps({"id": i, "text": text}) for i, text in enumerate(("yes", None, "", 5, "no " * 600, ["x"]))),
        "{",
        "[]",
        '{"id": 8}',
        '{"id": 9, "text": "\\ud800"}',
        '{"id": 10, "text": "the last"}',
    ]
    (folder / "wrong.jsonl").write_text("\n".join(wrong) + "\n")
    rows = [{"id": row["id"], "text": row["text"], "stars": row["stars"]} for row in texts]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "texts.parquet")
    (folder / "texts.csv").write_text(table(rows, ","))
    (folder / "texts.tsv.gz").write_bytes(gzip.compress(table(rows, "\t").encode(), mtime=0))
    single = [{"query": row["query"], "document": row["documents"][0]} for row in pairs]
    (folder / "pairs.csv").write_text(table(single, ","))
    (folder / "schema.json").write_text(json.dumps(SCHEMA))
    (folder / "face.py").write_text(FACE)


def table(rows: list[dict[str, Any]], delimiter: str) -> str:
    """Returns rows as CSV."""
    sink = io.StringIO()
    writer = csv.DictWriter(sink, rows[0], delimiter=delimiter)
    writer.writeheader()
    writer.writerows(rows)
    return sink.getvalue()
