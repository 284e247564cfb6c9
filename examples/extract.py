"""Extract fields from texts into a dataframe. A JSON schema restricts the model's output to these fields.

    pip install 'prefold[grammar]' pandas
    python examples/extract.py

The script prints a table with the columns text, name and count. The schema guarantees the form of an answer, but not
its content: a model as small as this one is often wrong.
"""

from __future__ import annotations

import json

import pandas

from prefold import LLM, Grammar

TEXTS = ["Ann ordered 3 chairs.", "Two lamps were bought by Bob.", "Cleo wants one table."]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "count"],
    "additionalProperties": False,
}


def main() -> None:
    llm = LLM("smollm2-135m")
    conversations = [
        [{"role": "user", "content": f"Who ordered, and how many? Answer as JSON. Text: {text}"}] for text in TEXTS
    ]
    grammar = Grammar("json_schema", json.dumps(SCHEMA))
    answers = llm.chat(conversations, grammar=grammar, max_tokens=60, temperature=0)
    frame = pandas.DataFrame([json.loads(answer.text) for answer in answers])
    frame.insert(0, "text", TEXTS)
    print(frame.to_string())


if __name__ == "__main__":
    main()
