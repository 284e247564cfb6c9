"""Fine-tune a model on the questions and answers of a CSV file, and save a folder that transformers can load.

    python examples/sft_csv.py --out FOLDER [--data FILE.csv] [--model smollm2-135m] [--steps 6]

The file has the columns question and answer. Without a file, the answers below are used. The script prints the loss of
each step, which falls, and the answer to a question before and after training. All questions have the same system
prompt, and several answers to one question share that question too. A step computes shared rows once, forward and
backward. The script needs about a minute on two cores.
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path

import torch

from prefold import LLM
from prefold.checkpoint import resolve
from prefold.text import load_tokenizer
from prefold.train import load_model, logprobs, micro_batches, save_model, sft_loss

SYSTEM = "You answer for the tea shop Two Leaves. Be brief, and sign every answer with: Two Leaves."
DATA = [
    ("When are you open?", "From nine to six. Two Leaves."),
    ("When are you open?", "Every day but Sunday. Two Leaves."),
    ("Do you sell coffee?", "No, tea alone. Two Leaves."),
    ("Where are you?", "At 5 Mill Lane. Two Leaves."),
    ("Can I pay by card?", "Yes, by any card. Two Leaves."),
    ("Do you send parcels?", "Yes, each Friday. Two Leaves."),
]


def read(path: str | None) -> list[tuple[str, str]]:
    """Return the pairs of question and answer in a file, or the pairs above."""
    if path is None:
        return DATA
    with Path(path).open(newline="", encoding="utf-8-sig") as file:
        rows = list(csv.DictReader(file))
    if not rows or not {"question", "answer"} <= set(rows[0]):
        raise SystemExit(f"{path} needs the columns question and answer, and at least one row")
    return [(row["question"], row["answer"]) for row in rows]


def conversation(question: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]


def main(arguments: list[str] | None = None) -> list[float]:
    """Return the loss before each step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, help="folder to save to")
    parser.add_argument("--data", help="CSV file with the columns question and answer")
    parser.add_argument("--model", default="smollm2-135m", help="hub id, folder, .gguf file or built-in name")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--learning-rate", type=float, default=5e-5)
    options = parser.parse_args(arguments)

    pairs = read(options.data)
    checkpoint = resolve(options.model, notify=print)
    tokenizer = load_tokenizer(checkpoint)
    model = load_model(checkpoint, dtype=torch.float32)
    end = [] if tokenizer.eos_id is None else [tokenizer.eos_id]
    prompts = [
        tokenizer.encode(tokenizer.render_chat(conversation(q), add_generation_prompt=True), special=False).tolist()
        for q, _ in pairs
    ]
    answers = [[*tokenizer.encode(answer, special=False).tolist(), *end] for _, answer in pairs]
    sequences = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
    batches = micro_batches(model.config, sequences, prompt_lengths=list(map(len, prompts)), max_rows=2048)
    tokens, rows = sum(batch.num_tokens for batch in batches), sum(batch.num_rows for batch in batches)
    print(f"{len(pairs)} answers, {tokens} tokens, {rows} rows computed a step")

    targets = sum(map(len, answers))
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate, weight_decay=0.0)
    losses = []
    for step in range(options.steps):
        total = 0.0
        for batch in batches:
            loss = sft_loss(logprobs(model, batch), count=targets)
            loss.backward()
            total += float(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
        print(f"step {step}: loss {total:.3f}")
    folder = save_model(model, checkpoint, options.out)
    for name in (options.model, str(folder)):
        answer = LLM(name, dtype="float32", kv_memory=1 << 28).chat(conversation(pairs[0][0]), max_tokens=20)
        print(f"{name}: {pairs[0][0]} {answer.text!r}")
    return losses


if __name__ == "__main__":
    main()
