"""Ask questions about the rows of a DuckDB table: from SQL, and with all answers written back as a table.

    pip install 'prefold[duckdb]'
    python examples/decide_duckdb.py [FILE.duckdb]

Without a file, the script works in memory, on the six reviews below. A file of your own needs a table reviews with the
columns id and body. It gets the new table answers. First a filter in SQL asks one question. Then `llm.decide` reads the
table as a relation and answers all questions, and computes each review once for all of them.
"""

from __future__ import annotations

import sys

import duckdb

from prefold import LLM
from prefold.integrations.duckdb import register

QUESTIONS = {
    "good": {"type": "noul", "instructions": "Did the guest like it?"},
    "about": {
        "type": "choice",
        "instructions": "What is the review about?",
        "criteria": {
            "food": "what there is to eat and drink",
            "people": "how guests are treated",
            "place": "the house",
        },
    },
}
REVIEWS = [
    "The tea was cold.",
    "What a lovely view!",
    "We waited for an hour.",
    "The bread is the best in town.",
    "Loud, dark and dear.",
    "Friendly people.",
]


def main() -> None:
    con = duckdb.connect(*sys.argv[1:2])
    if not sys.argv[1:]:
        con.execute("CREATE TABLE reviews (id INTEGER, body VARCHAR)")
        con.executemany("INSERT INTO reviews VALUES (?, ?)", list(enumerate(REVIEWS)))
    llm = LLM("smollm2-135m")

    register(con, llm)
    filtered = "SELECT body, prefold_yes(body, 'Is it about food?') AS p FROM reviews ORDER BY p DESC LIMIT 3"
    print("most likely about food:")
    for body, p in con.sql(filtered).fetchall():
        print(f"  {p:.2f}  {body}")

    answers = llm.decide(con.sql("SELECT id, body FROM reviews ORDER BY id"), QUESTIONS, state="body")
    con.execute("DROP TABLE IF EXISTS answers")
    answers.create("answers")
    for about, good, p, body in con.sql("SELECT about, good, good_p, body FROM answers ORDER BY about, id").fetchall():
        print(f"{about:<6} {'good' if good else 'bad'} ({p:.2f})  {body}")
    print(f"{llm.stats.tokens:,} tokens asked for, {llm.stats.rows_computed:,} computed; wrote the table answers")


if __name__ == "__main__":
    main()
