"""Teach SmolLM2 to answer briefly, with DPO on pairs made below, and save a folder that transformers can load.

    python examples/dpo.py --out FOLDER [--model smollm2-135m] [--steps 8] [--sharing full]

Every pair has a brief answer and a wordy one to the same question, after the same system prompt. So most of a batch is
shared. The script prints the rows (tokens of the trie) that the model computes. With DPO alone, a model as small as
this one avoids wordy answers in other ways than by being brief. So the loss includes the cross entropy of the chosen
answers (Pang et al. 2024). The script needs a few minutes on two cores.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
import torch

from prefold import LLM
from prefold.checkpoint import resolve
from prefold.spec.requests import SHARING_MODES
from prefold.text import Tokenizer, load_tokenizer
from prefold.train import dpo_loss, dpo_margins, load_model, logprobs, micro_batches, save_model, sft_loss

SYSTEM = (
    "You are a helpful AI assistant named SmolLM, trained by Hugging Face. People ask you about geography: the "
    "capitals of countries, their rivers and their mountains. You know them all."
)
CAPITALS = {
    "France": "Paris",
    "Japan": "Tokyo",
    "Italy": "Rome",
    "Egypt": "Cairo",
    "Peru": "Lima",
    "Norway": "Oslo",
    "Kenya": "Nairobi",
    "Cuba": "Havana",
}
HELD_OUT = "Germany"
WORDY = (
    "The capital of {country} is {capital}, which is a large and beautiful city with a long history.",
    "That is a very good question! Let me think about it. I would say that it is {capital}.",
)


def question(country: str) -> list[dict[str, str]]:
    """Return the conversation that asks for a country's capital."""
    ask = f"Which city is the capital of {country}?"
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": ask}]


def make_pairs(tokenizer: Tokenizer) -> tuple[list[list[int]], list[int]]:
    """Return (sequences, chosen and rejected in turn; the prompt length of each)."""
    sequences, prompt_lengths = [], []
    end = [] if tokenizer.eos_id is None else [tokenizer.eos_id]
    for country, capital in CAPITALS.items():
        text = tokenizer.render_chat(question(country), add_generation_prompt=True)
        prompt = tokenizer.encode(text, special=False).tolist()
        for wordy in WORDY:
            for answer in (f"{capital}.", wordy.format(country=country, capital=capital)):
                sequences.append([*prompt, *tokenizer.encode(answer, special=False).tolist(), *end])
                prompt_lengths.append(len(prompt))
    return sequences, prompt_lengths


def main(arguments: list[str] | None = None) -> list[float]:
    """Return the loss before each step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, help="folder to save to")
    parser.add_argument("--model", default="smollm2-135m", help="hub id, folder, .gguf file or built-in name")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--learning-rate", type=float, default=1e-5)
    parser.add_argument("--beta", type=float, default=0.1)
    parser.add_argument("--sharing", choices=SHARING_MODES, default="full")
    parser.add_argument("--max-rows", type=int, default=2048, help="maximum rows of a micro-batch")
    options = parser.parse_args(arguments)

    checkpoint = resolve(options.model, notify=print)
    tokenizer = load_tokenizer(checkpoint)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = load_model(checkpoint, dtype=torch.float32, device=device)
    sequences, prompt_lengths = make_pairs(tokenizer)
    pairs = len(sequences) // 2
    batches = micro_batches(
        model.config,
        sequences,
        prompt_lengths=prompt_lengths,
        groups=np.arange(2 * pairs) // 2,
        sharing=options.sharing,
        max_rows=options.max_rows,
    )
    num_chosen = sum(len(s) - n for s, n in zip(sequences[::2], prompt_lengths[::2], strict=True))
    rows, tokens = sum(b.num_rows for b in batches), sum(b.num_tokens for b in batches)
    print(f"{pairs} pairs, {tokens} tokens, {rows} rows computed a step, in {len(batches)} micro-batches")

    with torch.no_grad():
        before = [logprobs(model, batch) for batch in batches]
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate, weight_decay=0.0)
    losses = []
    for step in range(options.steps):
        began, total, margins = time.perf_counter(), 0.0, []
        for batch, reference in zip(batches, before, strict=True):
            values = logprobs(model, batch)
            chosen = torch.cat(batch.split(values)[::2])
            loss = dpo_loss(values, reference, batch, beta=options.beta, count=pairs)
            loss = loss + sft_loss(chosen, count=num_chosen)
            loss.backward()
            total += float(loss.detach())
            margins += dpo_margins(values.detach(), reference, batch).tolist()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
        seconds, moved = time.perf_counter() - began, sum(margin > 0 for margin in margins)
        print(f"step {step}: loss {total:.4f}, {moved} of {pairs} pairs further apart than at first, {seconds:.1f} s")
    folder = save_model(model, checkpoint, options.out)
    print(f"saved to {folder}")

    for name in (options.model, str(folder)):
        answer = LLM(name, dtype="float32", kv_memory=1 << 28).chat(question(HELD_OUT), max_tokens=40)
        print(f"{name}: the capital of {HELD_OUT}? {answer.text!r}")
    return losses


if __name__ == "__main__":
    main()
