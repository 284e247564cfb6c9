"""Label and continue the texts of Parquet files with Daft, which reads, computes and writes them as a stream.

    pip install 'prefold[daft,parquet]'
    python examples/daft_parquet.py [IN.parquet OUT-FOLDER]

Without files, the script makes reviews.parquet with six reviews, and writes to the folder labelled. It prints the
table: each text, its label, and a text that the model writes about it. A table of your own needs a column named body.
"""

from __future__ import annotations

import sys
from pathlib import Path

import daft
import pyarrow
import pyarrow.parquet
from daft.functions import classify_text, prompt

import prefold.integrations.daft  # noqa: F401  (attaches the provider "prefold")

REVIEWS = [
    "The tea was cold.",
    "What a lovely view!",
    "We waited for an hour.",
    "The bread is the best in town.",
    "Loud, dark and dear.",
    "Friendly people.",
]
MODEL = {"provider": "prefold", "model": "smollm2-135m"}


def main() -> None:
    source, target = sys.argv[1:] or (None, "labelled")
    if source is None:
        source = "reviews.parquet"
        pyarrow.parquet.write_table(pyarrow.table({"id": range(len(REVIEWS)), "body": REVIEWS}), source)
    reviews = daft.read_parquet(source)
    labelled = reviews.with_column("label", classify_text(reviews["body"], ["good", "bad"], **MODEL))
    answer = prompt(labelled["body"], system_message="Answer the review in one sentence.", max_tokens=20, **MODEL)
    written = labelled.with_column("answer", answer).write_parquet(target, write_mode="overwrite")
    table = daft.read_parquet([str(Path(path)) for path in written.to_pydict()["path"]])
    for row in table.sort("id").to_pylist() if "id" in table.column_names else table.to_pylist():
        print(f"{row['label']:<5} {row['body']}  {row['answer']!r}")


if __name__ == "__main__":
    main()
