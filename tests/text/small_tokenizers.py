"""Small tokenizers trained on the spot, in the shapes of the model families, and checkpoints that hold them."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CORPUS = [
    "The quick brown fox jumps over the lazy dog. It's 2024, and they're 1,234,567 strong; we'll see!",
    "def f(x):\n    if x > 10:\n        return x ** 2\n\treturn {'a': [1, 2, 3]}  # comment\n\n\n",
    "Ünïcödé naïve façade — “quotes” … 東京は日本の首都です。Привет, мир! مرحبا 👋🏽👩‍👩‍👧 été e\u0301te\u0301",
    "Text: yes no label: positive negative\nLabel: the answer is A B C D\r\n\r\n  Question?  \t Yes.",
    "https://example.org/a/b?c=d&e=f camelCaseWord HTTPServer snake_case 3.14159 100% $5.00 a+b==c",
] * 4

TEXTS = [
    "",
    " ",
    "\n",
    "a",
    "Hello world",
    "  leading and trailing  ",
    "It's they're WE'LL i'D 2024 12345678 ½ ² ٣",
    "def f(x):\n    return  x\n\n\n\t\ty = 1\r\n  \n",
    "日本語とEnglish混ざり 😀👋🏽 👩‍👩‍👧‍👦 \u200b\u00a0\u3000x",
    "e\u0301 \u212b \ufb01 \u1e9b\u0323 combining \u0338\n\u0338",
    "special <|im_start|>user\nhi<|im_end|>\n <|endoftext|> inside, broken <|im_st art|>",
    "\x00\x1c\x85 control \u2028 sep",
    "x" * 300 + " " * 50 + "\n" * 20 + "1" * 40,
    "<think>\n\nthought</think>\n\n",
    "ABCdef camelCase HTTPServer's //path\n/x",
]

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace("{1,3}", "")
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _split(pattern: str):
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def byte_level(kind: str, vocab_size: int = 600) -> Tokenizer:
    """A byte-level BPE tokenizer split as the family `kind` does."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=kind in ("llama-bpe", "tekken")))
    tokenizer.pre_tokenizer = {
        "gpt-2": lambda: pre_tokenizers.ByteLevel(add_prefix_space=False),
        "smollm": lambda: pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        ),
        "qwen2": lambda: _split(QWEN2),
        "llama-bpe": lambda: _split(LLAMA3),
        "tekken": lambda: _split(TEKKEN),
    }[kind]()
    tokenizer.normalizer = normalizers.NFC() if kind == "qwen2" else None
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
        special_tokens=[AddedToken(t, special=True, normalized=False) for t in SPECIALS],
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken(t, normalized=False, special=False) for t in ("<think>", "</think>")])
    return tokenizer


def sentencepiece(vocab_size: int = 500) -> Tokenizer:
    """A BPE tokenizer with byte fallback over the whole text, as Llama 2's tokenizer.json describes it."""
    trained = Tokenizer(models.BPE())
    trained.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        show_progress=False,
        special_tokens=["<unk>", "<s>", "</s>", *[f"<0x{i:02X}>" for i in range(256)]],
    )
    trained.train_from_iterator(CORPUS, trainer)
    spec = json.loads(trained.to_str())
    spec["added_tokens"] = spec["added_tokens"][:3]
    spec["model"] |= {"unk_token": "<unk>", "byte_fallback": True, "fuse_unk": True}
    tokenizer = Tokenizer.from_str(json.dumps(spec))
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


def one_word(vocab_size: int = 500) -> Tokenizer:
    """A BPE tokenizer with byte fallback that splits texts at spaces alone, as Gemma's tokenizer.json describes it."""
    spec = json.loads(sentencepiece(vocab_size).to_str())
    spec["normalizer"] = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    behavior = {"behavior": "MergedWithPrevious", "invert": False}
    spec["pre_tokenizer"] = {"type": "Split", "pattern": {"String": " "}, **behavior}
    tokenizer = Tokenizer.from_str(json.dumps(spec))
    tokenizer.add_tokens([AddedToken("\n" * n, normalized=False) for n in range(2, 6)])
    tokenizer.add_special_tokens([AddedToken(t, normalized=False) for t in SPECIALS])
    return tokenizer


class FolderCheckpoint:
    """As much of a Checkpoint as reading a folder needs."""

    format = "folder"
    gguf = None

    def __init__(self, path: Path, config: dict | None = None):
        self.path = path
        self.name = path.name
        self.config = config or {}

    def file(self, name: str) -> Path | None:
        path = self.path / name
        return path if path.exists() else None

    def read_json(self, name: str) -> dict | None:
        path = self.file(name)
        return None if path is None else json.loads(path.read_text(encoding="utf-8"))


class GgufCheckpoint:
    """As much of a Checkpoint as a GGUF file's metadata needs."""

    format = "gguf"
    name = "model.gguf"
    path = Path("model.gguf")
    gguf = "read"

    def __init__(self, metadata: dict):
        self._metadata = metadata
        self.config: dict = {}

    def metadata(self, key: str, default: object = None):
        return self._metadata.get(key, default)

    def file(self, name: str) -> None:
        return None

    def read_json(self, name: str) -> None:
        return None


def gguf_metadata(tokenizer: Tokenizer, pre: str | None, **more) -> dict:
    """The metadata that a GGUF file would hold for a byte-level tokenizer, with two unused tokens at the end."""
    spec = json.loads(tokenizer.to_str())
    added = {token["content"]: token["special"] for token in spec["added_tokens"]}
    vocab = sorted(tokenizer.get_vocab(with_added_tokens=True).items(), key=lambda item: item[1])
    tokens = [token for token, _ in vocab] + ["[PAD0]", "[PAD1]"]
    types = [(3 if added[t] else 4) if t in added else 1 for t, _ in vocab] + [5, 5]
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": [" ".join(pair) for pair in spec["model"]["merges"]],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
    metadata.update({f"tokenizer.{key}".replace("ggml_", "ggml."): value for key, value in more.items()})
    return {key: value for key, value in metadata.items() if value is not None}
