"""Ask several questions about each row of a pandas DataFrame, and sort the rows by how sure the answers are.

    pip install 'prefold[tables]' pandas
    python examples/decide_pandas.py [IN.csv OUT.csv]

Without files, the script uses the five tickets below and writes decided.csv. A file of your own needs the columns
subject and body. It prints the answers of each row with their probabilities. The least certain row comes first, because
it needs a look. If a row has no answers, the column error says why.
"""

from __future__ import annotations

import sys

import pandas

from prefold import LLM

QUESTIONS = {
    "refund": {"type": "noul", "instructions": "Does the customer want money back?"},
    "tone": {
        "type": "choice",
        "instructions": "What is the tone?",
        "criteria": {"calm": "polite, factual", "angry": "insults, threats"},
    },
    "urgency": {
        "type": "score",
        "instructions": "How urgent is it?",
        "criteria": ["can wait", "this week", "today"],
    },
}
TICKETS = {
    "subject": ["Charged twice", "Thanks", "Where is it?", "Broken again", ""],
    "body": [
        "I was charged twice for order 7 and want my money back.",
        "The new app is great, thank you!",
        "My parcel should have come on Monday.",
        "The second lamp is broken too. This is a joke!",
        "Do you deliver to Norway?",
    ],
}


def main() -> None:
    source, target = sys.argv[1:] or (None, "decided.csv")
    tickets = pandas.DataFrame(TICKETS) if source is None else pandas.read_csv(source, keep_default_na=False)
    if not {"subject", "body"} <= {*tickets.columns}:
        sys.exit(f"{source} needs the columns subject and body")

    llm = LLM("smollm2-135m")
    tickets["ticket"] = tickets["subject"] + "\n" + tickets["body"]
    decided = llm.decide(tickets, QUESTIONS, state="ticket", errors="return").drop(columns="ticket")
    decided["sure"] = decided[["refund_p", "tone_p"]].min(axis=1)
    decided = decided.sort_values("sure")
    decided.to_csv(target, index=False)
    for row in decided.itertuples():
        answers = f"refund {row.refund} {row.refund_p:.2f}, {row.tone} {row.tone_p:.2f}, urgency {row.urgency:.1f}"
        print(f"{answers}  {row.body}" if pandas.isna(row.error) else f"{row.error}  {row.body}")
    print(f"{llm.stats.tokens:,} tokens asked for, {llm.stats.rows_computed:,} computed; wrote {target}")


if __name__ == "__main__":
    main()
