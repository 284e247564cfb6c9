"""The cases of `images.py` that run a whole command or a server: a job of pictures, and questions over HTTP.

Both have a folder with SmolLM2-135M's text weights and a tower with random weights, as SmolVLM's checkpoints have them.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import math
import re
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from common import export_folder, median, table
from image_data import SHAPES, drawing
from safetensors.torch import load_file, save_file

from prefold.checkpoint import resolve

ROOT = Path(__file__).resolve().parent.parent
# Of the job, whose pictures are many. Over HTTP, where the time to the first token is measured, it is SmolVLM-256M's.
SMALL = {"hidden": 384, "layers": 6, "heads": 6, "intermediate": 1536, "image_size": 256, "patch_size": 16}
SMOLVLM = SHAPES["smolvlm-256m"]
TOKENS = ("<fake_token_around_image>", "<image>", "<global-img>")
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image>{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
QUESTION = "Which of the pictures before is most like the last one, and why?"


def vision_folder(folder: Path, vision: dict[str, int], dtype: torch.dtype) -> Path:
    """Writes SmolLM2-135M with a random tower of this shape as a checkpoint of SmolVLM; returns its folder."""
    from tokenizers import AddedToken, Tokenizer

    export_folder(resolve("smollm2-135m"), folder, dtype)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in TOKENS])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": TEMPLATE}))
    text = json.loads((folder / "config.json").read_text())
    text["vocab_size"] = tokenizer.get_vocab_size(with_added_tokens=True)
    names = {"hidden": "hidden_size", "layers": "num_hidden_layers", "heads": "num_attention_heads",
             "intermediate": "intermediate_size"}  # fmt: skip
    sizes = {names.get(name, name): size for name, size in vision.items()}
    config = {
        "architectures": ["SmolVLMForConditionalGeneration"], "model_type": "smolvlm", "scale_factor": 4,
        "image_token_id": tokenizer.token_to_id("<image>"), "tie_word_embeddings": True, "text_config": text,
        "vision_config": {"model_type": "smolvlm_vision", **sizes}, "dtype": text["dtype"],
        **{name: text[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id") if name in text},
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    edge = {"longest_edge": vision["image_size"]}
    pixels = {"image_processor_type": "SmolVLMImageProcessor", "size": edge, "max_image_size": edge,
              "do_image_splitting": False}  # fmt: skip
    (folder / "preprocessor_config.json").write_text(json.dumps(pixels))
    stored = load_file(folder / "model.safetensors")
    tensors = {name.replace("model.", "model.text_model.", 1): tensor for name, tensor in stored.items()}
    words = tensors["model.text_model.embed_tokens.weight"]
    torch.manual_seed(0)
    more = torch.randn(text["vocab_size"] - len(words), words.shape[1]).mul(0.02).to(dtype)
    tensors["model.text_model.embed_tokens.weight"] = torch.cat([words, more])
    tensors |= {name: tensor.to(dtype) for name, tensor in _tower(vision, words.shape[1])}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _tower(vision: dict[str, int], output: int) -> Any:
    """Yields the tensors of a random tower as (name, tensor)."""
    hidden, patch, wide = vision["hidden"], vision["patch_size"], vision["intermediate"]

    def linear(name: str, outputs: int, *inputs: int) -> Any:
        yield f"{name}.weight", torch.randn(outputs, *inputs) / math.prod(inputs) ** 0.5
        yield f"{name}.bias", torch.zeros(outputs)

    def norm(name: str) -> Any:
        yield f"{name}.weight", torch.ones(hidden)
        yield f"{name}.bias", torch.zeros(hidden)

    top = "model.vision_model."
    yield from linear(f"{top}embeddings.patch_embedding", hidden, 3, patch, patch)
    patches = (vision["image_size"] // patch) ** 2
    yield f"{top}embeddings.position_embedding.weight", torch.randn(patches, hidden)
    for number in range(vision["layers"]):
        layer = f"{top}encoder.layers.{number}."
        yield from norm(layer + "layer_norm1")
        for part in ("q_proj", "k_proj", "v_proj", "out_proj"):
            yield from linear(f"{layer}self_attn.{part}", hidden, hidden)
        yield from norm(layer + "layer_norm2")
        yield from linear(layer + "mlp.fc1", wide, hidden)
        yield from linear(layer + "mlp.fc2", hidden, wide)
    yield from norm(top + "post_layernorm")
    merged = 16 * hidden
    yield "model.connector.modality_projection.proj.weight", torch.randn(output, merged) / merged**0.5


def picture_bytes(name: str, size: int = 200) -> bytes:
    """Returns a drawing as a PNG file."""
    import PIL.Image

    sink = io.BytesIO()
    PIL.Image.fromarray(drawing(name, size, size)).save(sink, "PNG")
    return sink.getvalue()


# -------------------------------------------------------------------------------------------------------------- job

TASKS = {
    "generate": ["--max-tokens", "8", "--ignore-eos", "--temperature", "0"],
    "classify": ["--labels", " yes, no, perhaps"],
    "score": ["--continuation", "answer"],
    "embed": ["--pooling", "last"],
}
COUNTS = {
    "rows": r"rows +([\d,]+) computed",
    "unique": r"; ([\d,]+) unique tokens",
    "towers": r"images +([\d,]+) images encoded",
    "tokens": r"tokens +([\d,]+) in",
}


def job(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Runs `prefold run` over records with eight example images before one of their own, shared and not, and once
    killed and resumed."""
    found, lines = [], []
    examples, records = (2, 6) if options.smoke else (8, 200)
    with tempfile.TemporaryDirectory() as name:
        here = Path(name)
        model = vision_folder(here / "model", SMALL, getattr(torch, options.dtype))
        (here / "pictures").mkdir()
        for number in range(examples + records):
            (here / "pictures" / f"{number}.png").write_bytes(picture_bytes(f"job {number}"))
        shown = [f"{number}.png" for number in range(examples)]
        rows = [
            {"id": i, "question": QUESTION, "answer": " The first one.", "pictures": [*shown, f"{examples + i}.png"]}
            for i in range(records)
        ]
        (here / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        for task, own in TASKS.items():
            if options.tasks and task not in options.tasks.split(","):
                continue
            command = [
                sys.executable, "-m", "prefold", "run", "in.jsonl", "--task", task, "--prompt", "question", "--image",
                "pictures", "--media-folder", "pictures", "-m", str(model), "--id", "id", "--dtype", options.dtype,
                *own,
            ]  # fmt: skip
            once = {
                sharing: _run([*command, "--sharing", sharing, "-o", f"{task}-{sharing}.jsonl"], here)
                for sharing in ("full", "off")
            }
            full, off = once["full"], once["off"]
            assert full["towers"] == off["towers"] == examples + records, "each image is encoded once"
            resumed = _killed([*command, "-o", f"{task}-killed.jsonl"], here, f"{task}-killed.jsonl", records)
            same = _lines(here / f"{task}-killed.jsonl") == _lines(here / f"{task}-full.jsonl")
            found.append({"task": task, **once, "resumed": resumed, "equal": same})
            lines.append([
                task, f"{full['rows']:,}", f"{full['unique']:,}", full["towers"], f"{off['rows']:,}",
                f"{off['rows'] / full['rows']:.2f}", f"{full['seconds']:.1f}", f"{off['seconds']:.1f}",
                f"{off['seconds'] / full['seconds']:.2f}", resumed, "yes" if same else "no",
            ])  # fmt: skip
    print(table([
        "task", "rows", "unique rows", "tower runs", "rows, sharing off", "off to full", "s", "s, sharing off",
        "off to full", "lines before the kill", "equal lines",
    ], lines))  # fmt: skip
    return found


def _run(command: list[str], folder: Path) -> dict[str, Any]:
    """Runs a job to its end; returns its counts, and its seconds without those of loading."""
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    told = done.stdout + done.stderr
    counts = {name: re.search(pattern, told) for name, pattern in COUNTS.items()}
    found: dict[str, Any] = {name: int(match[1].replace(",", "")) for name, match in counts.items() if match}
    rate = re.search(r"([\d,.]+) rows/s", told)
    assert rate is not None, told
    return found | {"seconds": found["rows"] / float(rate[1].replace(",", ""))}


def _killed(command: list[str], folder: Path, output: str, records: int) -> int:
    """Runs a job, kills it when it has written some lines, and resumes it; returns how many lines there were."""
    process = subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    path, written = folder / output, 0
    while process.poll() is None and written < records // 3:
        written = path.read_bytes().count(b"\n") if path.exists() else 0
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    written = path.read_bytes().count(b"\n")
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    ids = [json.loads(line)["id"] for line in path.read_text().splitlines()]
    assert sorted(ids) == list(range(records)), "a line is missing or repeated"
    return written


def _lines(path: Path) -> dict[int, Any]:
    """Returns what a job said of each record, numbers rounded to what the order of sums leaves of them; but not which
    of the records that share rows computed them, which a job that is resumed says otherwise."""

    def rounded(value: Any) -> Any:
        if isinstance(value, float):
            return round(value, 2)
        if isinstance(value, list):
            return [rounded(one) for one in value]
        if isinstance(value, dict):
            return {name: rounded(one) for name, one in value.items() if name != "cached_tokens"}
        return value

    return {line["id"]: rounded(line) for line in map(json.loads, path.read_text().splitlines())}


# ------------------------------------------------------------------------------------------------------------- http

KEYS = '[[key]]\nkey = "a"\ntenant = "a"\n[[key]]\nkey = "b"\ntenant = "b"\n'


class Clients:
    """OpenAI's and Anthropic's clients of one server."""

    def __init__(self, url: str, key: str):
        import anthropic
        import openai

        self._openai = openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)
        self._anthropic = anthropic.Anthropic(base_url=url, api_key=key, max_retries=0)

    def first(self, kind: str, picture: bytes, question: str, tokens: int = 4) -> float:
        """Asks about a picture; returns the seconds to the first token."""
        data = base64.b64encode(picture).decode()
        started, took = time.perf_counter(), None
        if kind == "openai":
            content: Any = [
                {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}},
                {"type": "text", "text": question},
            ]
            for chunk in self._openai.chat.completions.create(
                model="m", max_tokens=tokens, messages=[{"role": "user", "content": content}], stream=True,
                extra_body={"temperature": 0, "ignore_eos": True},
            ):  # fmt: skip
                if took is None and chunk.choices and chunk.choices[0].delta.content:
                    took = time.perf_counter() - started
        else:
            source = {"type": "base64", "media_type": "image/png", "data": data}
            content = [{"type": "image", "source": source}, {"type": "text", "text": question}]
            for event in self._anthropic.messages.create(
                model="m", max_tokens=tokens, messages=[{"role": "user", "content": content}], stream=True,
                extra_body={"temperature": 0},
            ):  # fmt: skip
                if took is None and event.type == "content_block_delta":
                    took = time.perf_counter() - started
        assert took is not None
        return took


def http(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Asks a server: 64 questions about 16 images at once; a second question about an image; a stranger's guesses."""
    sys.path[:0] = [str(ROOT / "tests" / "support"), str(ROOT / "tests" / "serve")]
    from serving import serving

    from prefold import LLM

    sys.setswitchinterval(1e-3)  # as `prefold serve` does
    images, each = (2, 2) if options.smoke else (16, 4)
    with tempfile.TemporaryDirectory() as name:
        here = Path(name)
        (here / "keys.toml").write_text(KEYS)
        found: dict[str, Any] = {}
        model = str(vision_folder(here / "model", SMOLVLM, getattr(torch, options.dtype)))
        with (
            LLM(model, dtype=options.dtype) as llm,
            serving(llm, served_names=("m",), api_keys=f"{here}/keys.toml") as server,
        ):
            clients = Clients(server.url, "a")
            clients.first("openai", picture_bytes("warm"), "What is it?")
            found["at once"] = _at_once(llm, clients, images, each)
            found["questions"] = _second(clients, 2 if options.smoke else 10)
        at_once, questions = found["at once"], found["questions"]
        print(table(["requests at once", "images", "tower runs", "s"], [[
            images * each, images, at_once["towers"], f"{at_once['seconds']:.1f}"]]))  # fmt: skip
        print()
        print(table(["time to the first token", "ms, P50"], [
            ["first question about an image", f"{1e3 * median(questions['first']):.0f}"],
            ["second question", f"{1e3 * median(questions['second']):.0f}"],
            ["second to first", f"{median(questions['second']) / median(questions['first']):.3f}"],
        ]), flush=True)  # fmt: skip
        print()
        model = str(vision_folder(here / "small", SMALL, getattr(torch, options.dtype)))
        kept: dict[str, dict[str, Any]] = {
            "rows": {"images": {"media_memory": 0}},
            "the tower's store": {"cache": "off"},
        }
        for what, settings in kept.items():
            with (
                LLM(model, dtype=options.dtype, **settings) as llm,
                serving(llm, served_names=("m",), api_keys=f"{here}/keys.toml") as server,
            ):
                guesses = 4 if options.smoke else options.guesses
                found[what] = _guesses(Clients(server.url, "a"), Clients(server.url, "b"), guesses, what)
    print(table(["a guess that an image was seen", "who guesses", "P50 seen, ms", "P50 not seen, ms", "AUC"], [
        [what, who, *(f"{1e3 * median(times):.1f}" for times in pair[:2]), f"{pair[2]:.3f}"]
        for what in ("rows", "the tower's store") for who, pair in found[what].items()
    ]))  # fmt: skip
    return [found]


def _at_once(llm: Any, clients: Clients, images: int, each: int) -> dict[str, Any]:
    pictures = [picture_bytes(f"http {number}") for number in range(images)]
    before, started = llm.stats.tower_runs, time.perf_counter()
    with ThreadPoolExecutor(images * each) as pool:
        kinds = ("openai", "anthropic")
        asked = [
            pool.submit(clients.first, kinds[(i + n) % 2], picture, f"Question number {n}: what do you see?")
            for n in range(each)
            for i, picture in enumerate(pictures)
        ]
        firsts = [one.result() for one in asked]
    towers = llm.stats.tower_runs - before
    assert towers == images, f"{towers} tower runs for {images} images"
    return {"towers": towers, "seconds": time.perf_counter() - started, "first": firsts}


def _second(clients: Clients, count: int) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {"first": [], "second": []}
    for number in range(count):
        picture = picture_bytes(f"second {number}")
        for which, question in (("first", "What is this?"), ("second", "Which colours do you see?")):
            found[which].append(clients.first(("openai", "anthropic")[number % 2], picture, question))
    return found


def _guesses(owner: Clients, stranger: Clients, count: int, what: str) -> dict[str, Any]:
    """Returns {who guesses: (seconds where an image had been seen, and where not, AUC)}: who guessed right in half of
    all cases."""
    from serve_load import auc

    found = {}
    for who, guesser in {"the same tenant": owner, "another": stranger}.items():
        seen: dict[bool, list[float]] = {True: [], False: []}
        for number in range(count if guesser is stranger else max(4, count // 4)):
            guess, other = (picture_bytes(f"{what} {who} {number} {i}", 64) for i in range(2))
            right = number % 2 == 0
            owner.first("openai", guess if right else other, "What is this?", 1)
            seen[right].append(guesser.first("openai", guess, "What is this?", 1))
        found[who] = (seen[True], seen[False], auc(seen[True], seen[False]))
    return found
