"""Train a small model with Gemma 3's architecture to describe drawn pictures, and save a folder.

    python examples/tiny_vision.py --out FOLDER [--steps 1200] [--seed 0]

A picture has one to four equal shapes of one colour in one of its quarters, on a random background. Questions ask for
the colour, shape, number or place, and the answer is one word. One in eight combinations of the four is never used in
training. In the end, the model is asked about such combinations: once with the right picture, and once with another
picture in its place. A random guess is right in 0.23 of all cases.

The model is trained in transformers, which must be installed (`pip install 'prefold[train,vision]'`), and asked in
prefold. The script needs about ten minutes on one core. An interrupted run starts again.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from torch.nn import functional as F

from prefold import LLM

SIZE, CELL = 32, 8  # side of a picture, and of the square around a shape, in pixels
COLOURS = {
    "red": (210, 40, 40), "green": (40, 160, 60), "blue": (40, 70, 210),
    "yellow": (230, 210, 50), "purple": (150, 50, 170), "white": (245, 245, 245),
}  # fmt: skip
SHAPES = ("square", "circle", "triangle", "cross")
NUMBERS = ("one", "two", "three", "four")
PLACES = ("northwest", "northeast", "southwest", "southeast")
ANSWERS: dict[str, Sequence[str]] = {
    "colour": tuple(COLOURS), "shape": SHAPES, "number": NUMBERS, "place": PLACES,
}  # fmt: skip
QUESTIONS = {
    "colour": "what colour are the shapes ?",
    "shape": "of which kind are the shapes ?",
    "number": "how many shapes are there ?",
    "place": "in which quarter are the shapes ?",
}
BEFORE, BEHIND = "here is a drawing .", "look at it and say in one word :"
SPECIAL = ("<pad>", "<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>")
BEGIN, ROW, END = "<start_of_image>", "<image_soft_token>", "<end_of_image>"
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<start_of_turn>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<start_of_image>{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>assistant\n{% endif %}"
)
SETTINGS = {
    "image_processor_type": "Gemma3ImageProcessor",
    "size": {"height": SIZE, "width": SIZE},
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "do_pan_and_scan": False,
}
WARM_UP, SHOW_EVERY = 100, 50
# Seed of the pictures for evaluation. No training uses it.
HELD_OUT = 10**6


@dataclass(frozen=True)
class Picture:
    """A drawing, and the answers to the questions about it."""

    pixels: np.ndarray  # uint8 [SIZE, SIZE, 3]
    facts: dict[str, str]  # {question: answer}


def pictures(rng: np.random.Generator, *, held_out: bool) -> Iterator[Picture]:
    """Yield drawings without end: of training combinations, or of held-out ones."""
    while True:
        facts = {question: str(rng.choice(answers)) for question, answers in ANSWERS.items()}
        if is_held_out(facts) == held_out:
            yield Picture(draw(facts, rng), facts)


def is_held_out(facts: dict[str, str]) -> bool:
    """Return whether a combination is never used in training (one in eight)."""
    colour, shape, number, place = (ANSWERS[question].index(fact) for question, fact in facts.items())
    return (colour + 3 * shape + 5 * number + 7 * place) % 8 == 0


def draw(facts: dict[str, str], rng: np.random.Generator) -> np.ndarray:
    """Return a picture, uint8 [SIZE, SIZE, 3]: shapes on dark noise. The shapes vary in size, position and shade."""
    picture = rng.integers(0, 40, 3) + rng.integers(0, 30, (SIZE, SIZE, 3))
    south, east = divmod(PLACES.index(facts["place"]), 2)
    for cell in rng.choice(4, 1 + NUMBERS.index(facts["number"]), replace=False).tolist():
        down, across = divmod(cell, 2)
        top, left = SIZE // 2 * south + CELL * down, SIZE // 2 * east + CELL * across
        inside = mask(facts["shape"], int(rng.integers(6, CELL + 1)))
        top, left = (edge + int(rng.integers(0, CELL - len(inside) + 1)) for edge in (top, left))
        colour = np.array(COLOURS[facts["colour"]]) + rng.integers(-25, 26, 3)
        picture[top : top + len(inside), left : left + len(inside)][inside] = colour
    return picture.clip(0, 255).astype(np.uint8)


def mask(shape: str, size: int) -> np.ndarray:
    """Return which pixels of a square belong to the shape, bool [size, size]."""
    down, across = np.mgrid[0:size, 0:size] - (size - 1) / 2
    if shape == "circle":
        return np.hypot(down, across) <= size / 2 - 0.2
    if shape == "triangle":
        return np.abs(across) <= (down + size / 2) / 2
    if shape == "cross":
        return np.minimum(np.abs(down), np.abs(across)) <= 1
    return np.ones((size, size), bool)


def question(kind: str, picture: Any) -> list[dict[str, Any]]:
    """Return the conversation that asks about a picture."""
    parts = [{"type": "text", "text": BEFORE}, {"type": "image", "image": picture}]
    parts.append({"type": "text", "text": f"{QUESTIONS[kind]} {BEHIND}"})
    return [{"role": "user", "content": parts}]


def write_tokenizer(folder: Path) -> Tokenizer:
    """Write the files of a word tokenizer and of the image processor. Return the tokenizer."""
    words = " ".join([BEFORE, BEHIND, *QUESTIONS.values(), *(" ".join(a) for a in ANSWERS.values()), "user assistant"])
    vocabulary = dict.fromkeys((*SPECIAL, BEGIN, ROW, END, "<unk>", "\n", *words.split()))
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(vocabulary)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(" ", "removed"), pre_tokenizers.Split(Regex("\n"), "isolated")]
    )
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in (*SPECIAL, BEGIN, ROW, END)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>",
        "chat_template": TEMPLATE, "model_max_length": 512,
        "extra_special_tokens": {"boi_token": BEGIN, "image_token": ROW, "eoi_token": END},
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))
    (folder / "preprocessor_config.json").write_text(json.dumps(SETTINGS, indent=2))
    return tokenizer


def make_model(tokenizer: Tokenizer, hidden: int, layers: int) -> Any:
    """Return an untrained transformers model.

    Its vision tower has patches of 4 x 4 pixels and makes 16 rows of them. All layers but the last have a sliding
    window that does not reach back to the picture from the answer.
    """
    import transformers

    ids = {f"{name}_token_id": tokenizer.token_to_id(f"<{name}>") for name in ("pad", "bos")}
    ids["eos_token_id"] = tokenizer.token_to_id("<end_of_turn>")
    text = {
        "vocab_size": tokenizer.get_vocab_size(), "hidden_size": hidden, "num_hidden_layers": layers,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": hidden // 4, "intermediate_size": 3 * hidden,
        "query_pre_attn_scalar": hidden // 4, "max_position_embeddings": 512, "sliding_window": 16, **ids,
        "layer_types": ["sliding_attention"] * (layers - 1) + ["full_attention"], "initializer_range": hidden**-0.5,
    }  # fmt: skip
    vision = {
        "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": 4, "intermediate_size": 3 * hidden,
        "image_size": SIZE, "patch_size": 4,
    }  # fmt: skip
    config = transformers.Gemma3Config(
        text_config=text, vision_config=vision, mm_tokens_per_image=16,
        image_token_index=tokenizer.token_to_id(ROW), boi_token_index=tokenizer.token_to_id(BEGIN),
        eoi_token_index=tokenizer.token_to_id(END), initializer_range=hidden**-0.5, **ids,
    )  # fmt: skip
    model = transformers.Gemma3ForConditionalGeneration(config)
    with torch.no_grad():  # position embeddings as large as patch embeddings, or the tower learns positions slowly
        for name, parameter in model.named_parameters():
            if name.endswith("position_embedding.weight"):
                parameter.mul_(hidden**0.5)
    return model


@dataclass(frozen=True)
class Batcher:
    """Makes batches of pictures, with all questions about each picture."""

    llm_text: dict[str, list[int]]  # {question: its ids, with the rows of the picture}
    tokenizer: Tokenizer

    @classmethod
    def of(cls, tokenizer: Tokenizer, render: Any) -> Batcher:
        """render: makes the text of a conversation"""
        picture = f"\n\n{BEGIN}{ROW * 16}{END}\n\n"
        texts = {kind: render(question(kind, None)).replace(BEGIN, picture) for kind in QUESTIONS}
        return cls({kind: tokenizer.encode(text).ids for kind, text in texts.items()}, tokenizer)

    def batch(self, some: Sequence[Picture]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return (tiles, ids, lengths) of pictures with all their questions.

        Tiles are float32 [pictures, 3, SIZE, SIZE]. Ids are int64 [pictures * questions, n], each question followed by
        its answer, padded on the right. Lengths are the numbers of tokens of the questions.
        """
        tiles = torch.from_numpy(np.stack([picture.pixels for picture in some])).permute(0, 3, 1, 2) / 127.5 - 1
        rows = [
            [*self.llm_text[kind], self.tokenizer.token_to_id(picture.facts[kind])]
            for picture in some
            for kind in QUESTIONS
        ]
        lengths = torch.tensor([len(row) - 1 for row in rows])
        ids = torch.zeros(len(rows), int(lengths.max()) + 1, dtype=torch.int64)
        for row, out in zip(rows, ids, strict=True):
            out[: len(row)] = torch.tensor(row)
        return tiles, ids, lengths


def loss_of(
    model: Any, head: torch.nn.Linear, tokenizer: Tokenizer, batch: tuple[torch.Tensor, ...]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss, and whether each answer is right, bool [pictures, questions].

    head: predicts all answers to a picture from the mean of its rows; only used in training. With its loss, the tower
    learns long before the text model can read the tower's rows
    """
    tiles, ids, lengths = batch
    # The tower computes each picture once for all questions.
    images = model.model.get_image_features(tiles, return_dict=True)
    seen = head(images.pooler_output.mean(1)).view(len(ids), -1)
    images.pooler_output = images.pooler_output.repeat_interleave(len(QUESTIONS), 0)
    is_row = (ids == tokenizer.token_to_id(ROW)).long()
    hidden = model.model(
        input_ids=ids, token_type_ids=is_row, mm_encoder_outputs={"image": images}, use_cache=False
    ).last_hidden_state
    every = torch.arange(len(ids))
    logits = model.lm_head(torch.stack([hidden[every, lengths - 1], hidden[every, lengths]], 1))
    answers = ids[every, lengths]
    ends = torch.full_like(answers, tokenizer.token_to_id("<end_of_turn>"))
    loss = F.cross_entropy(logits.flatten(0, 1), torch.stack([answers, ends], 1).flatten())
    right = logits[:, 0].argmax(-1) == answers
    return loss + F.cross_entropy(seen, answers), right.view(-1, len(QUESTIONS))


def train(model: Any, tokenizer: Tokenizer, render: Any, options: argparse.Namespace) -> None:
    """Train a model in place, and print progress."""
    batcher = Batcher.of(tokenizer, render)
    drawn = pictures(np.random.default_rng(options.seed), held_out=False)
    head = torch.nn.Linear(model.config.text_config.hidden_size, len(QUESTIONS) * tokenizer.get_vocab_size())
    learnt = [*model.parameters(), *head.parameters()]
    optimizer = torch.optim.AdamW(learnt, lr=options.learning_rate, weight_decay=0.01, betas=(0.9, 0.98))
    began, right = time.perf_counter(), torch.zeros(len(QUESTIONS))
    model.train()
    for step in range(options.steps):
        for group in optimizer.param_groups:
            group["lr"] = options.learning_rate * rate(step, options.steps)
        loss, hits = loss_of(model, head, tokenizer, batcher.batch([next(drawn) for _ in range(options.pictures)]))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(learnt, 1.0)
        optimizer.step()
        right = 0.9 * right + 0.1 * hits.float().mean(0)
        if (step + 1) % SHOW_EVERY == 0 or step + 1 == options.steps:
            left = (time.perf_counter() - began) / (step + 1) * (options.steps - step - 1)
            shares = ", ".join(f"{kind} {share:.2f}" for kind, share in zip(QUESTIONS, right.tolist(), strict=True))
            print(f"step {step + 1}: loss {loss.item():.3f}; right: {shares}; {left:.0f} s left", flush=True)
    model.eval()


def rate(step: int, steps: int) -> float:
    """Return the factor of the learning rate at a step: a warm-up, then half a cosine."""
    return min(1.0, (step + 1) / WARM_UP) * 0.5 * (1 + math.cos(math.pi * step / steps))


def ask(llm: LLM, some: Sequence[Picture], shown: Sequence[Picture] | None = None) -> dict[str, float]:
    """Return the share of right answers to each question. shown: pictures to show in place of `some`"""
    asked = [(kind, i) for i in range(len(some)) for kind in QUESTIONS]
    answers = llm.chat([question(kind, (shown or some)[i].pixels) for kind, i in asked], max_tokens=2, temperature=0.0)
    right = {kind: 0 for kind in QUESTIONS}
    for (kind, i), answer in zip(asked, answers, strict=True):
        right[kind] += answer.text.strip() == some[i].facts[kind]
    return {kind: number / len(some) for kind, number in right.items()}


def evaluate(folder: Path, asked: int, seed: int = 0) -> dict[str, float]:
    """Return the shares of right answers about `asked` held-out pictures: "right", and "swapped" (with another
    picture)."""
    drawn = pictures(np.random.default_rng(HELD_OUT + seed), held_out=True)
    some = [next(drawn) for _ in range(asked)]
    with LLM(str(folder), dtype="float32") as llm:
        by_kind, swapped = ask(llm, some), ask(llm, some, some[1:] + some[:1])
    found = {"right": sum(by_kind.values()) / len(by_kind), "swapped": sum(swapped.values()) / len(swapped)}
    print(", ".join(f"{kind} {share:.3f}" for kind, share in by_kind.items()))
    print(f"right: {found['right']:.3f}; with another picture: {found['swapped']:.3f}")
    return found


def main(arguments: list[str] | None = None) -> dict[str, float]:
    """Return the results of `evaluate`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, type=Path, help="folder to save to")
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--layers", type=int, default=3, help="layers of the tower, and of the text model")
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--pictures", type=int, default=48, help="pictures per step")
    parser.add_argument("--asked", type=int, default=200, help="pictures for evaluation")
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    if (options.out / "model.safetensors").exists():
        parser.error(f"{options.out} already has a trained model; give another --out")
    options.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(options.seed)
    tokenizer = write_tokenizer(options.out)
    model = make_model(tokenizer, options.hidden, options.layers)
    model.save_pretrained(options.out)
    with LLM(str(options.out), dtype="float32") as untrained:
        chat = untrained.tokenizer.chat_templates

        def render(messages: list[dict[str, Any]]) -> str:
            return chat.render(messages, add_generation_prompt=True)

        (options.out / "model.safetensors").unlink()
        train(model, tokenizer, render, options)
    model.save_pretrained(options.out)
    found = evaluate(options.out, options.asked, options.seed)
    print(f"saved to {options.out}")
    return found


if __name__ == "__main__":
    main()
