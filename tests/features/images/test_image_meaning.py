"""examples/tiny_vision.py, and what reuse does to answers of a model that sees: exact, nothing; as a port did, harm."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from generating import engine_of, generate, tokens_of
from running import run
from tiny_vision import drawing, tiny_vision

from prefold import LLM
from prefold.engine import ModelEngine
from prefold.engine.cache import CacheOptions
from prefold.spec.requests import Readout, Request, Sampling

ROOT = Path(__file__).parents[3]


def module(path: Path):
    spec = importlib.util.spec_from_file_location(f"{path.stem}_of_{path.parent.name}", path)
    made = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = made  # dataclasses look their module up
    spec.loader.exec_module(made)
    return made


@pytest.fixture(scope="module")
def example():
    return module(ROOT / "examples" / "tiny_vision.py")


@pytest.fixture(scope="module")
def port():
    return module(ROOT / "tests" / "support" / "image_port.py")


class Seeing:
    """A model that sees, and the requests that ask it."""

    def __init__(self, folder):
        self.llm = LLM(str(folder), dtype="float32", cache="off")

    def request(self, text: str, picture, max_tokens: int = 2) -> Request:
        """text: has a placeholder."""
        images = self.llm.images
        ids, media = images.encode(text, images.read([(picture, "image")]), "", "prompt")
        return Request(ids, media=media, sampling=Sampling(max_tokens=max_tokens))

    def engine(self, **options) -> ModelEngine:
        return engine_of(self.llm, media=self.llm.images.table, **options)

    def one_by_one(self, requests: list[Request], **options) -> list[list[int]]:
        """The answers of an engine with a cache."""
        engine = self.engine(cache=CacheOptions(min_overlap=0), **options)
        return [tokens_of(generate(engine, [request]))[0] for request in requests]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return Seeing(tiny_vision(tmp_path_factory.mktemp("tiny"), "gemma3"))


def as_port(tiny, port, asked):
    taken = port.Port()
    requests = [tiny.request(text, picture) for text, picture in asked]
    return requests, [taken.request(request) for request in requests], taken


def test_the_port_takes_the_rows_of_another_picture(tiny, port):
    one, other = drawing(1, 26, 26), drawing(2, 26, 26)
    asked = [("<start_of_image>what is it?", one), ("<start_of_image>what is here?", other)]
    requests, made, taken = as_port(tiny, port, asked)
    assert not np.array_equal(requests[1].tokens, made[1].tokens) and taken.reused == 1
    assert made[1].media == requests[0].media
    wrong = tiny.request(asked[1][0], one)
    assert np.array_equal(made[1].tokens, wrong.tokens)
    assert tiny.one_by_one(made, slots=60) == tiny.one_by_one([requests[0], wrong], slots=60)


@pytest.mark.parametrize(
    "second",
    [
        "Is this something else altogether? <start_of_image>what is it?",  # other text before the picture
        "<start_of_image>" + "no text that goes on as the first one does behind a picture, so nothing is covered",
    ],
)
def test_the_port_leaves_alone_what_is_not_covered(tiny, port, second):
    asked = [("<start_of_image>what is it?", drawing(1, 26, 26)), (second, drawing(2, 26, 26))]
    requests, made, taken = as_port(tiny, port, asked)
    assert made == requests and not taken.reused


def test_the_example_draws_what_it_says(example):
    drawn = example.pictures(np.random.default_rng(3), held_out=False)
    for picture in (next(drawn) for _ in range(50)):
        assert not example.is_held_out(picture.facts)
        bright = picture.pixels.max(-1) > 110
        south, east = np.argwhere(bright).mean(0) >= example.SIZE // 2
        assert example.PLACES[2 * south + east] == picture.facts["place"]
        half = example.SIZE // 2
        quarter = bright[half * south : half * (south + 1), half * east : half * (east + 1)]
        assert quarter.sum() == bright.sum()
        cells = quarter.reshape(2, example.CELL, 2, example.CELL).any((1, 3))
        assert example.NUMBERS[cells.sum() - 1] == picture.facts["number"]
        mean = picture.pixels[bright].astype(float).mean(0)
        nearest = min(example.COLOURS, key=lambda name: np.abs(mean - example.COLOURS[name]).sum())
        assert nearest == picture.facts["colour"]
    held_out = example.pictures(np.random.default_rng(3), held_out=True)
    assert all(example.is_held_out(next(held_out).facts) for _ in range(50))


def test_the_example_trains_and_saves(example, tmp_path, capsys):
    small = ["--steps=2", "--hidden=16", "--layers=1", "--pictures=2", "--asked=2", f"--out={tmp_path}"]
    found = example.main(small)
    assert 0 <= found["right"] <= 1 and "step 2" in capsys.readouterr().out
    assert_same_logits(example, tmp_path)
    with pytest.raises(SystemExit):
        example.main(small)
    assert "already has a trained model" in capsys.readouterr().err


def questions(example, seed: int, count: int):
    """(question, picture) of pictures that no training has."""
    drawn = example.pictures(np.random.default_rng(seed), held_out=True)
    return [(kind, picture) for picture in (next(drawn) for _ in range(count)) for kind in example.QUESTIONS]


class Asked(Seeing):
    """A trained model, and the requests of its questions."""

    def __init__(self, example, folder):
        super().__init__(folder)
        self.example = example

    def of(self, kind: str, picture) -> Request:
        text = self.llm.tokenizer.render_chat(self.example.question(kind, None), add_generation_prompt=True)
        return self.request(text, picture.pixels)

    def accuracy(self, asked, answers: list[list[int]]) -> float:
        said = [self.llm.tokenizer.decode(ids, skip_special=True).strip() for ids in answers]
        return float(np.mean([a == picture.facts[kind] for a, (kind, picture) in zip(said, asked, strict=True)]))


@torch.inference_mode()
def assert_same_logits(example, folder, count=1):
    """What prefold says of pictures is what transformers says that loads the folder."""
    import transformers

    oracle = transformers.AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    seeing = Asked(example, folder)
    row = seeing.llm.images.processor.image_token_id
    asked = questions(example, 5, count)
    requests = [seeing.of(*one) for one in asked]
    vocabulary = tuple(range(seeing.llm.config.vocab_size))
    read = run(seeing.llm, requests, Readout("logits", ids=vocabulary), sharing="full", rows=None)
    for found, request, (_, picture) in zip(read, requests, asked, strict=True):
        ids = torch.from_numpy(np.where(np.isin(request.tokens, request.media[0].ids), row, request.tokens))[None]
        tiles = torch.from_numpy(picture.pixels).permute(2, 0, 1)[None] / 127.5 - 1
        logits = oracle(input_ids=ids.long(), pixel_values=tiles, token_type_ids=(ids == row).long()).logits
        np.testing.assert_allclose(found.values, logits[0, -1].numpy(), rtol=0, atol=1e-4)


@pytest.fixture(scope="module")
def trained(example, tmp_path_factory):
    """A folder, with what the example finds of it: one that it made before, or makes now, in some minutes."""
    if made := os.environ.get("PREFOLD_TINY_VISION"):
        return made, example.evaluate(made, 200)
    folder = tmp_path_factory.mktemp("trained")
    return folder, example.main([f"--out={folder}"])


@pytest.mark.slow
def test_the_trained_model_knows_what_it_sees(example, trained):
    folder, found = trained
    assert found["right"] >= 0.9 and found["swapped"] <= 0.4
    assert_same_logits(example, folder, 25)


@pytest.mark.slow
def test_exact_reuse_changes_no_answer_and_the_port_many(example, port, trained):
    seeing = Asked(example, trained[0])
    asked = questions(example, 6, 50)
    np.random.default_rng(0).shuffle(asked)
    plain = [tokens_of(generate(seeing.engine(slots=200), [seeing.of(*one)]))[0] for one in asked]
    right = seeing.accuracy(asked, plain)
    assert right >= 0.9
    for order in (range(len(asked)), range(len(asked))[::-1], np.random.default_rng(1).permutation(len(asked))):
        answers = seeing.one_by_one([seeing.of(*asked[i]) for i in order], slots=20_000)
        assert answers == [plain[i] for i in order], "one at a time"
        engine = seeing.engine(cache=CacheOptions(min_overlap=0), slots=1000, max_running=7)
        together = tokens_of(generate(engine, [seeing.of(*asked[i]) for i in order]))
        assert together == [plain[i] for i in order], "in company, in little memory"
        # As the port matched: where two pictures follow each other the second is not seen.
        taken = port.Port()
        wrong = seeing.one_by_one([taken.request(seeing.of(*asked[i])) for i in order], slots=200)
        lost = right - seeing.accuracy([asked[i] for i in order], wrong)
        print(f"right {right:.3f}, as the port matched {right - lost:.3f}; {taken.reused} of {len(asked)} reused")
        assert lost >= 0.2
