"""Label the rows of a CSV file, and write a copy with the label and its probability in each row.

    python examples/classify_csv.py [IN.csv OUT.csv]

Without files, the script labels the five messages below and writes labels.csv. It prints the label of each row, then
the number of prompt tokens and the number of computed tokens. The instructions and the worked examples are computed
once for all rows. For files that do not fit in memory, use `prefold run IN.csv --task classify`.
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path

from prefold import LLM

LABELS = ["complaint", "praise", "question"]
EXAMPLES = [
    ("The parcel came a week late and was damaged.", "complaint"),
    ("Your staff were kind and quick, thank you!", "praise"),
    ("Do you deliver to Norway?", "question"),
    ("My emails get no answer.", "complaint"),
    ("Best tea I ever had.", "praise"),
    ("How do I reset my password?", "question"),
]
MESSAGES = [
    "I want my money back.",
    "Thank you for the quick help!",
    "When do you open on Sundays?",
    "The second lamp is broken too.",
    "I love the new colours.",
]


def main() -> None:
    source, target = sys.argv[1:] or (None, "labels.csv")
    if source is None:
        rows = [{"id": str(number), "body": body} for number, body in enumerate(MESSAGES, 1)]
    else:
        with Path(source).open(newline="", encoding="utf-8-sig") as file:
            rows = list(csv.DictReader(file))
    if not rows or "body" not in rows[0]:
        sys.exit(f"{source} needs a column named body, with a text in each row")

    llm = LLM("smollm2-135m")
    texts = [row["body"] for row in rows]
    # A small model prefers the label of the last example. Calibration removes this preference.
    options = {"instructions": "Classify each message.", "examples": EXAMPLES, "calibrate": True}
    labels = llm.classify(texts, LABELS, **options)
    with Path(target).open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [*rows[0], "label", "probability"])
        writer.writeheader()
        for row, found in zip(rows, labels, strict=True):
            probability = f"{found.probabilities[found.label]:.3f}"
            writer.writerow({**row, "label": found.label, "probability": probability})
            print(f"{found.label:<10} {probability}  {row['body']}")
    print(f"{llm.stats.tokens:,} tokens asked for, {llm.stats.rows_computed:,} computed; wrote {target}")


if __name__ == "__main__":
    main()
