"""Answer questions from passages, over HTTP, with OpenAI's client and a prefold server.

    pip install 'prefold[serve]' openai
    prefold serve --model smollm2-135m --port 8000
    python examples/rag_server.py [http://localhost:8000/v1]

Start the server in another terminal, and pass its address if it differs. The script prints each question with its
answer, and the number of prompt tokens that the server found in its cache. The passages come first in each prompt, so
they are computed once for all questions.
"""

from __future__ import annotations

import sys

from openai import APIConnectionError, APIStatusError, OpenAI

PASSAGES = "\n".join(["The moon causes the tides.", "Bread is baked in an oven.", "The Rhine flows through Basel."])
QUESTIONS = ["What causes the tides?", "Where is bread baked?"]


def main() -> None:
    address = sys.argv[1] if len(sys.argv) > 1 else "http://localhost:8000/v1"
    client = OpenAI(base_url=address, api_key="none")
    try:
        model = client.models.list().data[0].id
    except APIConnectionError:
        sys.exit(f"no server answers at {address}: start one with  prefold serve --model smollm2-135m --port 8000")
    except APIStatusError as error:  # for example if the address lacks /v1
        sys.exit(f"{address} answers: {error.message}")
    for question in QUESTIONS:
        answer = client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": f"{PASSAGES}\n\nAnswer from these passages. {question}"}],
            max_tokens=30,
            temperature=0,
        )
        usage = answer.usage
        print(f"{question} {answer.choices[0].message.content}")
        print(f"  {usage.prompt_tokens} tokens, {usage.prompt_tokens_details.cached_tokens} of them cached")


if __name__ == "__main__":
    main()
