"""Models that see images, against transformers: however prompts are cut, shared, squeezed, kept or split over ranks."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from books import check_books
from generating import AtOnce, bytes_held, engine_of, generate, image_scheduler, tokens_of
from running import run
from tiny_vision import GEMMA4, drawing, patches_of, tiny_vision, vision_reference

from prefold import LLM
from prefold.engine import ModelEngine
from prefold.engine.cache import CacheOptions
from prefold.errors import InputError
from prefold.features.images.decode import Image
from prefold.features.images.processor import Processor, load_processor
from prefold.features.images.steps import ImageFacts
from prefold.spec.requests import Generated, Namespace, Readout, Request, Sampling
from prefold.worker.native.worker import NativeWorker
from prefold.worker.torch.worker import TorchWorker

FAMILIES = ("gemma3", "smolvlm", *GEMMA4)
MAX_TOKENS = 8
SIZES = [(26, 26), (5, 61), (90, 31), (1, 1), (40, 33)]
# A pan-and-scan that cuts the wide ones of these into tiles.
SETTINGS = {
    "gemma3": {"do_pan_and_scan": True, "pan_and_scan_min_crop_size": 10, "pan_and_scan_max_num_crops": 2},
    "smolvlm": {},
    **{family: {} for family in GEMMA4},
}


@dataclass
class Prompt:
    """Parts of a prompt: lists of token ids, and images by their number. ends: with the last row of an image."""

    parts: list[list[int] | int]
    ends: bool = False

    @property
    def images(self) -> list[int]:
        return [part for part in self.parts if isinstance(part, int)]


class Case:
    """A model with what transformers makes of it."""

    def __init__(self, folder, family: str, **options):
        self.folder, self.family = folder, family
        self.llm = LLM(str(folder), **{"dtype": "float32", **options})
        self.processor: Processor = load_processor(self.llm.checkpoint, self.llm.config.tower, self.llm.tokenizer)
        self.images = [Image(drawing(seed, *size)) for seed, size in enumerate(SIZES)]
        self.oracle = vision_reference(folder)

    def ids(self, prompt: Prompt) -> list[int]:
        """As transformers has them: the image token once for each row."""
        found: list[int] = []
        for part in prompt.parts:
            if isinstance(part, int):
                image = self.images[part]
                text = self.processor.layout(image.height, image.width).text
                found += self.llm.tokenizer.encode(text).tolist()
            else:
                found += part
        if prompt.ends:
            found = found[: len(found) - found[::-1].index(self.processor.image_token_id)]
        return found

    def request(self, engine: ModelEngine, prompt: Prompt, salt: str = "", **options) -> Request:
        tokens, processor = np.array(self.ids(prompt), np.int32), self.processor
        media = []
        for number in prompt.images:
            image = self.images[number]
            layout = processor.layout(image.height, image.width)
            media.append(
                image_scheduler(engine).media.medium(
                    processor.key(image.digest),
                    tiles=layout.tiles,
                    rows_per_tile=layout.rows or processor.rows_per_tile,
                    span=processor.span,
                    load=lambda image=image: processor.tiles(image),
                    salt=salt,
                )
            )
        at = np.flatnonzero(tokens == processor.image_token_id)
        assert len(at) == sum(len(medium.ids) for medium in media)
        tokens[at] = np.concatenate([np.empty(0, np.int32), *(medium.ids for medium in media)])
        return Request(tokens, media=tuple(media), namespace=Namespace(salt=salt), **options)

    def asked(self, engine: ModelEngine, prompts: list[Prompt], **sampling) -> list[Request]:
        options = Sampling(**{"max_tokens": MAX_TOKENS, "ignore_eos": True, **sampling})
        return [self.request(engine, prompt, sampling=options) for prompt in prompts]

    def arguments(self, prompt: Prompt) -> dict[str, torch.Tensor]:
        ids = torch.tensor([self.ids(prompt)])
        found = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        images = (ids == self.processor.image_token_id).long()
        if self.family in GEMMA4:
            found["mm_token_type_ids"] = images
            tower, tiles = self.processor.tower, [self.processor.tiles(self.images[i]) for i in prompt.images]
            return found | (patches_of(tiles, tower.patch_size, tower.patches) if tiles else {})
        if prompt.images:
            tiles = torch.cat([torch.from_numpy(self.processor.tiles(self.images[i])) for i in prompt.images])
            found["pixel_values"] = tiles if self.family == "gemma3" else tiles[None]
        if self.family == "gemma3":
            found["token_type_ids"] = images
        return found

    @torch.inference_mode()
    def hidden(self, prompt: Prompt, oracle=None) -> np.ndarray:
        return (oracle or self.oracle).model(**self.arguments(prompt)).last_hidden_state[0].numpy()

    @torch.inference_mode()
    def greedy(self, prompt: Prompt, max_tokens: int = MAX_TOKENS) -> list[int]:
        config = self.oracle.generation_config
        config.do_sample, config.eos_token_id = False, None
        arguments = self.arguments(prompt)
        out = self.oracle.generate(**arguments, max_new_tokens=max_tokens, pad_token_id=0)
        return out[0, arguments["input_ids"].shape[1] :].tolist()


def text(rng: np.random.Generator, size: int) -> list[int]:
    return rng.integers(3, 259, size).tolist()


def prompts() -> list[Prompt]:
    """Texts and images with common beginnings: images first, last, one behind the other, none, four in one prompt."""
    rng = np.random.default_rng(3)
    a, b = text(rng, 7), text(rng, 4)
    return [
        Prompt([a]),
        Prompt([a, 0, b]),
        Prompt([a, 0, text(rng, 3)]),
        Prompt([a, 0, b, 1, text(rng, 2)]),
        Prompt([a, 1, b]),
        Prompt([2, b]),
        Prompt([2, b, 3, 4, 0, text(rng, 5)]),
        Prompt([a, 0], ends=True),
        Prompt([a, 0, b, 1, text(rng, 6)]),
        Prompt([b, 3, 3]),
    ]


@pytest.fixture(scope="module", params=FAMILIES)
def case(request, tmp_path_factory):
    """(Case, prompts, hidden states of their last rows, what transformers generates, what it allows)"""
    folder = tiny_vision(tmp_path_factory.mktemp(request.param), request.param, settings=SETTINGS[request.param])
    found, asked = Case(folder, request.param), prompts()
    sdpa = vision_reference(folder, "sdpa")
    hidden = [found.hidden(prompt) for prompt in asked]
    own = max(np.abs(found.hidden(p, sdpa) - h).max() for p, h in zip(asked, hidden, strict=True))
    return found, asked, hidden, [found.greedy(prompt) for prompt in asked], max(1e-4, 3 * own)


def smallest(found: Case) -> int:
    """The fewest rows that a step may have."""
    return max(1, found.llm.engine.worker.facts.span_rows)


def test_the_cases_are_what_they_say(case):
    found, _, hidden, _, tolerance = case
    facts = found.llm.engine.worker.facts
    spans = found.family in ("gemma3", "gemma4 both ways")
    assert facts.of(ImageFacts).tower.layers == 2 and facts.span_rows == (9 if spans else 0)
    layouts = [found.processor.layout(image.height, image.width) for image in found.images]
    if found.family in GEMMA4:
        assert len({layout.rows for layout in layouts}) > 1
    else:
        windows = {plane.window for plane in found.llm.config.planes} - {None}
        assert not windows or max(windows) < facts.span_rows, "a window that is shorter than a span"
        assert max(layout.tiles for layout in layouts) > 1
    assert tolerance < 1e-3
    # What an image shows makes a difference to what follows it.
    assert np.abs(hidden[1][-1] - hidden[4][-1]).max() > 0.1


# Each way of sharing, and each size of steps, at least once; together with all others they take minutes.
QUICK = [("full", 0), ("full", 4096), ("mlp", 1), ("off", 30)]
SLOW = [(sharing, more) for sharing in ("full", "mlp", "off") for more in (0, 1, 30, 4096)]
SLOW = [pytest.param(*one, marks=pytest.mark.slow) for one in SLOW if one not in QUICK]


@pytest.mark.covering(1)
@pytest.mark.parametrize(("sharing", "more"), QUICK + SLOW)
def test_rows_of_the_stream(case, sharing, more):
    found, asked, hidden, _, tolerance = case
    engine = engine_of(found.llm)
    requests = [found.request(engine, prompt) for prompt in asked]
    rows = smallest(found) + more
    llm = SimpleNamespace(engine=engine)
    read = run(llm, requests, Readout("last"), sharing=sharing, rows=rows, window=40)
    for one, states in zip(read, hidden, strict=True):
        np.testing.assert_allclose(one.values, states[-1], rtol=0, atol=tolerance)
    means = run(llm, requests, Readout("mean"), sharing=sharing, rows=rows)
    for one, states in zip(means, hidden, strict=True):
        np.testing.assert_allclose(one.values, states.mean(0), rtol=0, atol=tolerance)
    images = {number for prompt in asked for number in prompt.images}
    assert engine.stats.tower_runs == len(images), "an image is encoded once, in two runs"


def test_the_executor_of_pytorch(case):
    """It is the native executor that the other tests are of."""
    native, asked, hidden, greedy, tolerance = case
    assert isinstance(native.llm.worker, NativeWorker)
    found = Case(native.folder, native.family, executor="torch")
    assert isinstance(found.llm.worker, TorchWorker)
    engine = engine_of(found.llm, rows=smallest(found) + 2, kv_memory=1 << 22)
    llm, requests = SimpleNamespace(engine=engine), [found.request(engine, prompt) for prompt in asked]
    read = run(llm, requests, Readout("last"), sharing="full", rows=smallest(found) + 2)
    for one, states in zip(read, hidden, strict=True):
        np.testing.assert_allclose(one.values, states[-1], rtol=0, atol=tolerance)
    assert tokens_of(generate(engine, found.asked(engine, asked))) == greedy


def test_bfloat16_of_both_executors(case):
    """Both round at other places: they differ by no more than each does from float32."""
    exact, asked, hidden, *_ = case
    states = {}
    for executor in ("native", "torch"):
        found = Case(exact.folder, exact.family, dtype="bfloat16", executor=executor)
        engine = engine_of(found.llm)
        requests = [found.request(engine, prompt) for prompt in asked]
        read = run(SimpleNamespace(engine=engine), requests, Readout("last"), sharing="full", rows=4096)
        states[executor] = np.stack([one.values for one in read])
    wide = np.stack([states[-1] for states in hidden])
    apart = {name: np.abs(values - wide).mean() for name, values in states.items()}
    assert apart["native"] <= 1.5 * apart["torch"] < 0.1 * np.abs(wide).mean(), apart
    assert np.abs(states["native"] - states["torch"]).mean() <= sum(apart.values())


@pytest.mark.covering(1)
@pytest.mark.parametrize("sharing", ["full", "off"])
@pytest.mark.parametrize("more", [0, 2, 5, 4096])
def test_greedy_tokens(case, sharing, more):
    found, asked, _, greedy, _ = case
    engine = engine_of(found.llm, rows=smallest(found) + more, sharing=sharing, kv_memory=1 << 22)
    assert tokens_of(generate(engine, found.asked(engine, asked))) == greedy
    assert engine.stats.tower_runs == 5
    if sharing == "full" and more == 4096:
        ids = [found.request(engine, prompt).tokens.tolist() for prompt in asked]
        unique = {tuple(tokens[: i + 1]) for tokens in ids for i in range(len(tokens))}
        assert engine.stats.generation.prefill_rows == len(unique)


@pytest.mark.parametrize("reserve", [True, False])
def test_little_memory(case, reserve):
    found, asked, _, _, _ = case
    asked, most = [asked[i] for i in (0, 1, 2, 4)], 30
    longest = max(len(found.ids(prompt)) for prompt in asked) + most
    engine = engine_of(found.llm, rows=smallest(found) + 40, slots=longest + 5, max_running=8, reserve_output=reserve)
    answers = generate(engine, found.asked(engine, asked, max_tokens=most))
    assert tokens_of(answers) == [found.greedy(prompt, most) for prompt in asked]
    if not reserve:
        assert engine.stats.generation.preemptions > 0


def test_warm_cache(case):
    found, asked, _, greedy, _ = case
    engine = engine_of(found.llm, rows=32, kv_memory=1 << 22, cache=CacheOptions(min_overlap=0))
    assert tokens_of(generate(engine, found.asked(engine, asked), window=20)) == greedy
    before, runs = engine.stats.generation.prefill_rows, engine.stats.tower_runs
    assert runs == 5
    image_scheduler(engine).clear()
    assert not bytes_held(image_scheduler(engine))
    assert tokens_of(generate(engine, found.asked(engine, asked[:7]))) == greedy[:7]
    assert engine.stats.tower_runs == runs, "an image whose rows are cached is not encoded"
    assert engine.stats.generation.prefill_rows - before == 7, "the last row of each"
    # Of a prompt that ends with an image, the last row runs once more, and needs what the tower made of it.
    assert tokens_of(generate(engine, found.asked(engine, [asked[7]]))) == [greedy[7]]
    assert engine.stats.tower_runs == runs + 1
    # Half of it evicted, in the middle of images too.
    cache = engine.generator.scheduler.cache
    while cache.rows > 40:
        cache.evict(7)
        check_books(engine.generator.scheduler)
    assert tokens_of(generate(engine, found.asked(engine, asked))) == greedy


def test_samples_and_penalties(case):
    """A repetition penalty concerns the tokens of a prompt, and no rows of images."""
    found, asked, _, _, _ = case
    engine = engine_of(found.llm, kv_memory=1 << 22)
    options = {"n": 2, "temperature": 1.0, "seed": 5, "repetition_penalty": 1.3}
    (together,) = generate(engine, found.asked(engine, [asked[3]], **options))
    alone = engine_of(found.llm, rows=smallest(found), sharing="off", kv_memory=1 << 22)
    (again,) = generate(alone, found.asked(alone, [asked[3]], **options))
    assert [sample.tokens for sample in together] == [sample.tokens for sample in again]


def test_numbers_from_the_cache(case):
    found, asked, hidden, _, tolerance = case
    engine = engine_of(found.llm, kv_memory=1 << 22, cache=CacheOptions(min_overlap=0), cache_prefill=True)
    for _ in range(2):
        requests = [found.request(engine, prompt) for prompt in asked]
        read = run(SimpleNamespace(engine=engine), requests, Readout("last"), sharing="full", rows=None)
        for one, states in zip(read, hidden, strict=True):
            np.testing.assert_allclose(one.values, states[-1], rtol=0, atol=tolerance)


@pytest.mark.parametrize("family", ["gemma3", pytest.param("smolvlm", marks=pytest.mark.slow)])
def test_two_ranks(tmp_path, family):
    found = Case(tiny_vision(tmp_path, family), family, tensor_parallel=2, max_batch_rows=20, kv_memory=1 << 20)
    asked = [prompt for prompt in prompts() if len(prompt.images) in (0, 1, 4)]
    with found.llm:
        engine = found.llm.engine
        assert tokens_of(generate(engine, found.asked(engine, asked))) == [found.greedy(prompt) for prompt in asked]
        read = run(found.llm, [found.request(engine, p) for p in asked], Readout("last"), sharing="full", rows=15)
        for one, prompt in zip(read, asked, strict=True):
            np.testing.assert_allclose(one.values, found.hidden(prompt)[-1], rtol=0, atol=2e-4)


# -------------------------------------------------------------------------------------------- when the tower runs


def answers_of(engine: ModelEngine, requests: list[Request]) -> list:
    """What a generator tells of requests that all come at once."""
    told: dict[int, object] = {}
    for number, request in enumerate(requests):
        engine.generator.add(request, None, lambda answer, number=number: told.__setitem__(number, answer))
    for _ in range(1000):
        if not engine.generator.step() and len(told) == len(requests):
            break
    return [told[number] for number in range(len(requests))]


def test_a_tower_that_fails_fails_its_requests_only(case):
    found, asked, _, greedy, _ = case
    engine = engine_of(found.llm, kv_memory=1 << 22)
    requests = found.asked(engine, asked)
    bad = requests[4].media[0]

    def fail():
        raise OSError("the file is gone")

    object.__setattr__(bad, "load", fail)
    for number, answer in enumerate(answers_of(engine, requests)):
        if 1 in asked[number].images:
            assert isinstance(answer, InputError) and "the file is gone" in str(answer) and answer.field == "image"
        else:
            assert list(answer[0].tokens) == greedy[number]
    check_books(engine.generator.scheduler)
    assert engine.stats.tower_runs == 4
    # It is tried anew for who comes later.
    object.__setattr__(bad, "load", lambda: found.processor.tiles(found.images[1]))
    assert [list(a[0].tokens) for a in answers_of(engine, requests)] == greedy


def test_tiles_that_are_no_numbers_fail_their_requests_only(case):
    found, asked, hidden, greedy, tolerance = case
    engine = engine_of(found.llm, kv_memory=1 << 22)
    requests = found.asked(engine, asked)
    bad = requests[4].media[0]
    object.__setattr__(bad, "load", lambda: np.full_like(found.processor.tiles(found.images[1]), np.nan))
    for number, answer in enumerate(answers_of(engine, requests)):
        if 1 in asked[number].images:
            assert isinstance(answer, InputError) and "not finite" in str(answer)
        else:
            assert list(answer[0].tokens) == greedy[number]
    # In a stream its rows are no numbers either, and nobody else's are touched.
    requests = [found.request(engine, prompt) for prompt in asked]
    llm = SimpleNamespace(engine=engine)
    for number, one in enumerate(run(llm, requests, Readout("last"), sharing="full", rows=20)):
        if 1 in asked[number].images:
            assert not np.isfinite(one.values).any()
        else:
            np.testing.assert_allclose(one.values, hidden[number][-1], rtol=0, atol=tolerance)


def test_others_generate_while_the_tower_runs(case, tmp_path):
    """A tower of 30 layers runs between the steps of a text, which goes on a token at a time."""
    family = case[0].family
    found = Case(tiny_vision(tmp_path, family, vision={"num_hidden_layers": 30}), family)
    engine = engine_of(found.llm, kv_memory=1 << 22)
    rng = np.random.default_rng(0)
    told: dict[str, list[Generated]] = {}
    writer, seen = Prompt([text(rng, 4)]), Prompt([text(rng, 3), 0, text(rng, 2)])
    (first,) = found.asked(engine, [writer], max_tokens=80)
    engine.generator.add(first, None, lambda answer: told.__setitem__("text", answer))
    for _ in range(5):
        engine.generator.step()
    requests = found.asked(engine, [seen, Prompt([*seen.parts, [7]])])
    for name, request in zip(("image", "same image"), requests, strict=True):
        engine.generator.add(request, None, lambda answer, name=name: told.__setitem__(name, answer))
    image_scheduler(engine).pool = AtOnce()
    steps = 0
    with pytest.MonkeyPatch.context() as patch:
        # As of a large one: a piece of work at a time, of two a layer.
        patch.setattr(image_scheduler(engine), "_stop", lambda run, seconds, idle: run.num_done + 1)
        while not engine.stats.tower_runs:
            before = engine.stats.generation.decode_rows
            assert engine.generator.step()
            assert engine.stats.generation.decode_rows == before + 1
            steps += 1
    assert 59 <= steps <= 62
    while engine.generator.has_work:
        engine.generator.step()
    assert engine.stats.tower_runs == 1, "who comes meanwhile waits for the same run"
    assert list(told["image"][0].tokens) == found.greedy(seen)
    assert list(told["text"][0].tokens) == found.greedy(writer, 80)


def test_from_several_threads(case):
    """Streams and texts on one engine, with room for the rows of one image beside those in use."""
    found, asked, hidden, greedy, tolerance = case
    engine = engine_of(found.llm, rows=40, kv_memory=1 << 22)
    image_scheduler(engine)._memory = 40 * found.llm.engine.worker.facts.of(ImageFacts).row_bytes
    failures: list[BaseException] = []

    def read():
        try:
            for _ in range(3):
                requests = [found.request(engine, prompt) for prompt in asked]
                read = run(SimpleNamespace(engine=engine), requests, Readout("last"), sharing="full", rows=30)
                for one, states in zip(read, hidden, strict=True):
                    np.testing.assert_allclose(one.values, states[-1], rtol=0, atol=tolerance)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    for _ in range(3):
        assert tokens_of(generate(engine, found.asked(engine, asked))) == greedy
    thread.join()
    assert not failures, failures
    assert bytes_held(image_scheduler(engine)) <= image_scheduler(engine)._memory + 5 * 40 * 4 * 36


def test_steps_too_small_for_an_image_are_refused(case):
    found = case[0]
    span = found.llm.engine.worker.facts.span_rows
    if not span:
        engine_of(found.llm, rows=1)
        return
    with pytest.raises(InputError, match="9 rows of an image") as caught:
        engine_of(found.llm, rows=span - 1)
    assert caught.value.field == "max_batch_rows"
    engine = engine_of(found.llm)
    with pytest.raises(InputError, match="9 rows of an image"):
        list(engine.run([], Readout("last"), max_batch_rows=span - 1))
