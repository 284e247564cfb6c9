"""Answers a question from passages, over HTTP, with OpenAI's client and a server of prefold.

    pip install 'prefold[serve]' openai
    prefold serve --model smollm2-135m --port 8000
    python examples/rag_server.py http://localhost:8000/v1

Passages come before the question, so that the server computes them once for all questions.
"""

from __future__ import annotations

import sys

from openai import OpenAI

PASSAGES = "\n".join(["The moon causes the tides.", "Bread is baked in an oven.", "The Rhine flows through Basel."])
QUESTIONS = ["What causes the tides?", "Where is bread baked?"]


def main() -> None:
    client = OpenAI(base_url=sys.argv[1] if len(sys.argv) > 1 else "http://localhost:8000/v1", api_key="none")
    model = client.models.list().data[0].id
    for question in QUESTIONS:
        answer = client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": f"{PASSAGES}\n\nAnswer from these passages. {question}"}],
            max_tokens=30,
            temperature=0,
        )
        print(f"{question} {answer.choices[0].message.content}")


if __name__ == "__main__":
    main()
