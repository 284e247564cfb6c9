"""Kept answers: what is found again, what is not, and what a damaged or full file does."""

from __future__ import annotations

import multiprocessing
import sqlite3
from pathlib import Path

import numpy as np
import pytest
from tiny import tiny_checkpoint

from prefold import LLM
from prefold.errors import JobError
from prefold.spec.requests import Generated, Medium, Namespace, Readout, Request, Result, Sampling, TokenLogprobs
from prefold.tasks.kept import NO_KEY, KeptAnswers, answer_bytes, read_answer, read_request
from prefold.tasks.kept_file import NAME, AnswersFile

TEXTS = ["the yes and the no", "the yes", "no no no"]
ASKED = Request(np.array([5, 6, 7]))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(tiny_checkpoint(tmp_path_factory.mktemp("model"), "llama", max_position_embeddings=256))


def llm_of(folder: str, answers: Path, **options) -> LLM:
    place = {"dtype": "float32", "device": "cpu", "threads": 1, "cache": "off"}
    return LLM(folder, answers=str(answers), **place | options)


def opened(folder: Path, most: int = 1 << 30, told: list | None = None) -> AnswersFile:
    return AnswersFile(folder, most, ([] if told is None else told).append)


def kept_in(folder: Path, identity: str = "model", **options) -> KeptAnswers:
    return KeptAnswers(opened(folder, **options), {"model": identity}, {"one": "digest"})


def result(number: float, size: int = 4) -> Result:
    return Result(np.full(size, number, np.float32))


# ------------------------------------------------------------------------------------------------ what is found


CALLS = {
    "embed": lambda llm, texts: llm.embed(texts),
    "decide": lambda llm, texts: [
        [*one["a"].probabilities.values(), one["a"].label_mass]
        for one in llm.decide(texts, {"a": {"type": "choice", "instructions": "?", "criteria": {"x": None, "y": None}}})
    ],
    "classify": lambda llm, texts: [[*one.logprobs.values()] for one in llm.classify(texts, ["yes", "no", "yes no"])],
    "score": lambda llm, texts: [
        [one.logprob, one.greedy, *one.logprobs] for one in llm.score(texts, [" yes no"] * len(texts))
    ],
    "rerank": lambda llm, texts: llm.rerank("the", texts, template="{query} {document} ", words=("yes", "no")).scores,
    "generate": lambda llm, texts: [
        (one.tokens, one.text, one.logprobs, one.finish_reason)
        for one in llm.generate(texts, max_tokens=5, logprobs=2, ignore_eos=True)
    ],
}


@pytest.mark.parametrize("task", CALLS)
def test_a_later_call_computes_only_what_is_new(folder, tmp_path, task):
    with llm_of(folder, tmp_path) as llm:
        first = CALLS[task](llm, TEXTS)
        assert not llm.stats.kept
    with llm_of(folder, tmp_path) as llm:
        second = CALLS[task](llm, TEXTS)
        assert (llm.stats.rows_computed, llm.stats.steps, llm.stats.requests) == (0, 0, llm.stats.kept)
        np.testing.assert_equal(second, first)  # to the bit
        third = CALLS[task](llm, [TEXTS[1], "a new text", TEXTS[0]])
        rows = llm.stats.rows_computed
        assert rows
    with LLM(folder, dtype="float32", device="cpu", threads=1, cache="off") as plain:
        CALLS[task](plain, ["a new text"])
        assert plain.stats.rows_computed == rows
    np.testing.assert_equal([third[0], third[2]], [first[1], first[0]])


def test_draws_without_a_seed_are_never_kept(folder, tmp_path):
    options = {"max_tokens": 12, "temperature": 1.5}
    with llm_of(folder, tmp_path) as llm:
        first = llm.generate(["the"], **options)
        second = llm.generate(["the"], **options)
        assert llm.stats.kept == 0 and first[0].tokens != second[0].tokens
        assert llm.kept.file.num_bytes == 0
        seeded = [llm.generate(["the", "the"], seed=3, **options) for _ in range(2)]
        assert llm.stats.kept == 2
    assert [one.tokens for one in seeded[0]] == [one.tokens for one in seeded[1]]
    assert seeded[0][0].tokens != seeded[0][1].tokens


@pytest.mark.parametrize("change", [{"dtype": "bfloat16"}, {"weights": "dtype"}, {"context_length": 128}])
def test_what_changes_numbers_changes_the_key(folder, tmp_path, change):
    for options, kept in (({}, 0), (change, 0), ({"max_batch_rows": 8, "kv_memory": 1 << 20}, 3)):
        with llm_of(folder, tmp_path, **options) as llm:
            llm.embed(TEXTS)
            assert llm.stats.kept == kept, options


def test_other_weights_are_another_model(tmp_path):
    answers = tmp_path / "kept"
    folder = tiny_checkpoint(tmp_path / "model", "llama")
    with llm_of(str(folder), answers) as llm:
        first = llm.embed(TEXTS)
    file = folder / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-3] ^= 0x40  # one weight, at the end
    file.write_bytes(data)
    with llm_of(str(folder), answers) as llm:
        second = llm.embed(TEXTS)
        assert llm.stats.kept == 0 and not np.array_equal(first, second)


def test_a_key_is_of_the_whole_request(tmp_path):
    kept = kept_in(tmp_path)
    changed = [
        ASKED,
        Request(np.array([5, 6])),
        Request(np.array([5, 6, 7]), np.array([7])),
        Request(np.array([5, 6]), np.array([7])),
        Request(np.array([5, 6, 7]), sampling=Sampling()),
        Request(np.array([5, 6, 7]), sampling=Sampling(stop=("x",))),
        Request(np.array([5, 6, 7]), namespace=Namespace("one")),
        Request(np.array([5, 6, 7]), namespace=Namespace(salt="one")),
    ]
    reads = [Readout("last"), Readout("mean"), Readout("logits", (1, 2)), Readout("logits", (1, 2), sums=True)]
    keys = {kept.key(readout, request) for readout in reads for request in changed}
    assert len(keys) == len(reads) * len(changed)
    assert kept.key(reads[0], Request(np.array([5, 6, 7]), priority=4)) in keys
    assert kept.key(reads[0], ASKED) not in {kept_in(tmp_path, "other").key(readout, ASKED) for readout in reads}
    other = KeptAnswers(kept.file, {"model": "model"}, {"one": "trained again"})
    assert other.key(reads[0], changed[6]) not in keys and other.key(reads[0], ASKED) in keys


def test_images_count_by_their_content_not_by_their_ids(tmp_path):
    kept, readout = kept_in(tmp_path), Readout("last")

    def asked(first: int, key: bytes, tokens: list[int]) -> Request:
        medium = Medium(key, "", np.array([first, first + 1, first + 2]), lambda: np.zeros(0))
        return Request(np.array([first + one if one >= 0 else -one for one in tokens]), media=(medium,))

    one = kept.key(readout, asked(1 << 24, b"picture", [-3, 0, 1, 2, -4]))
    assert kept.key(readout, asked(1 << 25, b"picture", [-3, 0, 1, 2, -4])) == one
    assert kept.key(readout, asked(1 << 24, b"another", [-3, 0, 1, 2, -4])) != one
    assert kept.key(readout, asked(1 << 24, b"picture", [-3, 0, 2, 1, -4])) != one
    assert kept.key(readout, asked(1 << 24, b"picture", [-3, 0, 1, 2, -5])) != one


# ------------------------------------------------------------------------------------------------ the file


@pytest.mark.parametrize(
    "answer",
    [
        Result(np.array([1.5, -0.0, 3e-38], np.float32)),
        Result(np.arange(6, dtype=np.float32).reshape(2, 3), np.array([True, False])),
        [Generated((1, 2), "a\u2028é", "stop", stop="x", cached_tokens=3)],
        [Generated((), None, "length", cached_tokens=None, logprobs=()), Generated((7,), "", "stop", stop=4)],
        [Generated((1,), "b", "stop", logprobs=(TokenLogprobs(-0.1, ((3, -0.1), (4, -2.5))),))],
    ],
)
def test_answers_come_back_to_the_bit(answer):
    data = answer_bytes(answer)
    again = read_answer(data)
    if isinstance(answer, list):
        assert again == answer
    else:
        assert again.values.tobytes() == answer.values.tobytes() and again.values.shape == answer.values.shape
        np.testing.assert_equal(again.greedy, answer.greedy)


def test_what_is_no_answer_is_not_kept():
    assert answer_bytes(Result(np.array([np.nan], np.float32))) is None
    assert answer_bytes(ValueError("the grammar is wrong")) is None
    assert answer_bytes([Generated((1,), "a", "cancelled")]) is None


def test_the_answers_not_used_for_longest_go_first(tmp_path):
    now = 1_000_000
    file = AnswersFile(tmp_path, 10_000, pytest.fail, clock=lambda: now)
    model = file.model(b"digest", "{}")
    for number in range(8):
        now += 10
        file.add(model, b"%016d" % number, bytes(1000))
        file.commit()
    assert file.num_bytes == 8 * 1096
    now += 10
    assert len(file.find([b"%016d" % 0])) == 1  # now the one used last
    file.add(model, b"%016d" % 8, bytes(1000))
    file.add(model, b"%016d" % 9, bytes(1000))
    file.commit()
    assert file.num_bytes <= 9_000
    assert sorted(file.find(b"%016d" % number for number in range(10))) == [
        b"%016d" % number for number in (0, 3, 4, 5, 6, 7, 8, 9)
    ]
    assert file.prune(unused_since=now) == 5 and file.prune(most_bytes=0) == 3
    assert file.num_bytes == 0 and not file.models()


def test_a_damaged_file_is_set_aside_with_one_warning(tmp_path):
    kept_in(tmp_path).close()
    path = tmp_path / NAME
    path.write_bytes(b"no database" * 1000)
    told: list[str] = []
    file = opened(tmp_path, told=told)
    file.add(file.model(b"digest", "{}"), b"k" * 16, b"answer")
    file.close()
    assert len(told) == 1 and "damaged" in told[0]
    assert (tmp_path / f"{NAME}.damaged").read_bytes().startswith(b"no database")
    assert opened(tmp_path).find([b"k" * 16]) == {b"k" * 16: b"answer"}


def test_damage_that_shows_later_ends_keeping_and_not_the_job(folder, tmp_path, recwarn):
    with llm_of(folder, tmp_path) as llm:
        expected = llm.embed([f"the yes {i}" for i in range(200)])
    path = tmp_path / NAME
    data = bytearray(path.read_bytes())
    for page in range(len(data) // 8192, len(data) // 4096):  # not the schema, and not all of the answers
        data[page * 4096 : page * 4096 + 64] = b"\xff" * 64
    path.write_bytes(data)
    with llm_of(folder, tmp_path) as llm:
        found = llm.embed([f"the yes {i}" for i in range(200)])
        llm.embed(TEXTS)
    np.testing.assert_allclose(found, expected, atol=1e-5)
    assert sum("damaged" in str(one.message) for one in recwarn) == 1
    with llm_of(folder, tmp_path) as llm:
        llm.embed(TEXTS)
        assert llm.stats.kept == 0
        llm.embed(TEXTS)
        assert llm.stats.kept == 3


def test_an_answer_that_does_not_match_its_checksum_is_missing(tmp_path):
    file = opened(tmp_path)
    file.add(file.model(b"digest", "{}"), b"k" * 16, b"answer")
    file.commit()
    with sqlite3.connect(tmp_path / NAME) as db:
        db.execute("UPDATE answers SET answer = CAST(substr(answer, 1, 8) || 'anSwer' AS BLOB)")
    assert file.find([b"k" * 16]) == {}
    assert file.check() == ["1 answers do not match their checksum"]


def test_files_that_are_something_else_are_refused(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(JobError, match="cannot make the folder"):
        opened(tmp_path / "file" / "kept")
    with sqlite3.connect(tmp_path / NAME) as db:
        db.execute("CREATE TABLE own(x)")
    with pytest.raises(JobError, match="another program"):
        opened(tmp_path)
    opened(tmp_path / "b").close()
    with sqlite3.connect(tmp_path / "b" / NAME) as db:
        db.execute("PRAGMA user_version = 99")
    with pytest.raises(JobError, match="another version"):
        opened(tmp_path / "b")


def _keep(folder: Path, first: int) -> None:
    file = AnswersFile(folder, 1 << 30, lambda line: None)
    model = file.model(b"digest", "{}")
    for number in range(first, first + 300):
        file.add(model, b"%016d" % number, b"%d" % number)
        if number % 7 == 0:
            file.commit()
    file.close()


def test_processes_keep_in_one_file_at_once(tmp_path):
    # A fork of the tests' own process can fail: the process has mapped more than a fork may promise.
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=_keep, args=(tmp_path, first)) for first in (0, 150, 600)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert [worker.exitcode for worker in workers] == [0, 0, 0]
    file = opened(tmp_path)
    numbers = [*range(450), *range(600, 900)]
    assert file.find(b"%016d" % number for number in range(1000)) == {b"%016d" % n: b"%d" % n for n in numbers}
    assert file.check() == [] and file.models()[0].answers == 750
    assert file.num_bytes == sum(len(b"%d" % number) + 96 for number in numbers)


def test_some_requests_are_kept_to_be_computed_again(tmp_path):
    kept = kept_in(tmp_path)
    reads = kept.of(Readout("logprobs", top=2))
    requests = [Request(np.array([n, 1]), np.array([4]), namespace=Namespace("one", "salt")) for n in range(200)]
    for keyed in reads.find(requests, requests, False):
        assert keyed.answer is None and keyed.key != NO_KEY
        reads.keep(keyed.key, result(float(keyed.request.tokens[0])))
    kept.file.commit()
    rows = kept.file.with_requests(kept.model, 1000)
    assert 3 <= len(rows) <= 30  # one in 16
    for _, asked, answer in rows:
        readout, request = read_request(asked)
        assert readout == Readout("logprobs", top=2) and request.namespace == Namespace("one", "salt")
        assert request.targets.tolist() == [4] and request.sampling is None
        np.testing.assert_equal(read_answer(answer).values, result(float(request.tokens[0])).values)
