"""When the tower runs, in what parts, and whose results are kept, over a worker that only notes what it is told."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
from books import check_books
from generating import AtOnce, bytes_held, image_scheduler
from noting import PIECES, ROWS, TOWER, Noting, desk_of, engine_of, finish, take

from prefold.engine import EngineOptions, GenerateOptions, ModelEngine
from prefold.engine.cache import CacheOptions
from prefold.engine.schedule.steps import SlotStep
from prefold.errors import InputError
from prefold.features.images.scheduler import TowerPace
from prefold.spec.requests import Request, Sampling


def test_a_piece_at_a_time():
    desk, worker, table, meter = desk_of()
    one, other = take(table, "one"), take(table, "other")
    desk.need([one, other])
    assert not desk.holds_rows(np.concatenate((one.ids, other.ids))).any()
    for piece in range(PIECES):
        assert desk.advance(0.0) is None
        assert worker.told[-1] == (one.ids[0], 1) and len(worker.told) == piece + 1
    assert (
        desk.holds_rows(one.ids).all()
        and not desk.holds_rows(other.ids).any()
        and not desk.holds_rows(one.ids + ROWS).any()
    )
    assert meter.stats.tower_runs == 1 and "tower" in meter.stats.seconds
    assert finish(desk) is None
    assert meter.stats.tower_runs == 2 and bytes_held(desk) == 80
    assert worker.told[PIECES:] == [(other.ids[0], PIECES)], "all at once, where there is time"


def test_as_much_as_the_time_allows():
    desk, worker, table, _ = desk_of()
    first, second = TOWER.pieces(1)
    desk._rate = float(first)  # so the first piece takes a second
    desk._note_rate = lambda operations, seconds: None
    desk.need([one := take(table, "one")])
    desk.advance(1.1 + second / first)
    assert worker.told == [(one.ids[0], 2)]
    desk.advance(0.9 + second / first)
    assert worker.told[1:] == [(one.ids[0], 1)]
    desk.advance(1.1 + second / first)
    assert worker.told[2:] == [(one.ids[0], 2)]


def test_a_step_and_the_tower_take_twice_the_time_of_a_step_alone():
    pace = TowerPace()
    for rows in (4, 8, 4, 8):
        assert pace.seconds_after(rows, 0.01 + 0.001 * rows, disturbed=False) == pytest.approx(0.01 + 0.001 * rows)
    # A step of eight rows takes 0.018 seconds where the tower has not run before it.
    assert pace.seconds_after(8, 0.024, disturbed=True) == pytest.approx(2 * 0.018 - 0.024)
    assert pace.seconds_after(8, 0.012, disturbed=True) == 0.012, "no more than the step"
    assert pace.seconds_after(8, 10.0, disturbed=True) == 2.5, "the tower goes on"
    for _ in range(15):
        pace.seconds_after(8, 0.03, disturbed=False)
    assert pace.seconds_after(8, 0.024, disturbed=True) == pytest.approx(2 * 0.018 - 0.024), "steps are slower yet"
    for _ in range(40):
        pace.seconds_after(8, 0.03, disturbed=False)
    assert pace.seconds_after(8, 0.04, disturbed=True) == pytest.approx(0.02, rel=0.01), "it learns"


def test_contexts_grow_while_the_tower_runs():
    pace = TowerPace()
    pace.seconds_after(8, 0.010, disturbed=False)
    for _ in range(32):
        pace.seconds_after(8, 0.011, disturbed=True)
    for seconds in (0.011, 0.022, 0.033):
        assert pace.seconds_after(8, seconds, disturbed=True) == pytest.approx(seconds * (2 / 1.1 - 1), rel=0.01)


def test_steps_beside_the_reading_of_an_image_are_not_taken_for_steps_alone():
    desk, _, table, _ = desk_of()
    desk.pool = ThreadPoolExecutor(1)
    read = threading.Event()
    one = take(table, "one", load=lambda: read.wait(60) and np.zeros((1, 3, 2, 2), np.float32))
    assert desk.seconds_after(8, 0.01) == 0.01 and not desk.is_busy
    desk.need([one])
    desk.advance(0.01, idle=False)  # which begins to read it
    assert desk.is_busy
    for _ in range(40):
        assert desk.seconds_after(8, 0.018) == pytest.approx(0.0045), "a step alone takes 0.01 seconds"
    read.set()
    while not desk.holds_rows(one.ids).all():
        desk.advance(1.0)
    assert not desk.is_busy


def test_steps_of_a_size_that_was_not_seen_alone():
    pace = TowerPace()
    assert pace.seconds_after(9, 0.026, disturbed=True) == 0.026, "nothing is known"
    for _ in range(20):
        pace.seconds_after(1, 0.010, disturbed=False)
    for _ in range(40):
        pace.seconds_after(1, 0.013, disturbed=True)
    assert pace.seconds_after(9, 0.026, disturbed=True) == pytest.approx(2 * 0.02 - 0.026, rel=0.01)


def test_others_keep_half_of_the_time():
    """A piece that takes longer than a step of others waits until they have had as much."""
    desk, worker, table, _ = desk_of()
    desk._rate, desk._note_rate = float(TOWER.pieces(1)[0]) / 0.02, lambda operations, seconds: None
    worker.takes = lambda pieces: time.sleep(0.02)
    desk.need([one := take(table, "one")])
    given, done = 0.0, []
    while not desk.holds_rows(one.ids).all():
        desk.advance(0.006, idle=False)
        given += 0.006
        done.append(len(worker.told))
    assert done[:4] == [0, 0, 0, 1], "the first piece takes 0.02 seconds"
    assert given >= 0.9 * PIECES * 0.02


def test_the_rate_is_measured():
    desk, _, table, _ = desk_of()
    desk.need([take(table, "one")])
    noted = []
    desk._note_rate = lambda operations, seconds: noted.append(operations)
    for _ in range(PIECES):
        desk.advance(0.0)
    assert noted == pytest.approx([*TOWER.pieces(1)] * 3)


def test_several_are_on_their_way():
    """An image goes on where it was, whatever else comes first meanwhile."""
    desk, worker, table, _ = desk_of()
    one, other = take(table, "one"), take(table, "other")
    for _ in range(PIECES):
        assert not desk.holds_rows(one.ids).any() and not desk.holds_rows(other.ids).any()
        for media in ([one, other], [other, one]):
            desk.need(media)
            desk.advance(0.0)
    assert desk.holds_rows(one.ids).all() and desk.holds_rows(other.ids).all()
    assert worker.told == [(first, 1) for _ in range(PIECES) for first in (one.ids[0], other.ids[0])]


def test_a_run_in_numbers_does_not_undo_what_another_waits_for():
    desk, worker, table, _ = desk_of()
    one, other = take(table, "one"), take(table, "other")
    desk.need([one])
    desk.advance(0.0)
    with desk.using(other.ids):
        assert desk.holds_rows(other.ids).all()
    finish(desk)
    assert worker.told == [(one.ids[0], 1), (other.ids[0], PIECES), (one.ids[0], PIECES - 1)]


def test_an_image_that_nobody_wants_any_more_is_given_up():
    desk, worker, table, _ = desk_of()
    one, other = take(table, "one"), take(table, "other")
    desk.need([one])
    desk.advance(0.0)
    desk.need([other])
    finish(desk)
    assert not worker.done and list(worker.made) == [other.ids[0]]
    desk.need([one])
    finish(desk)
    assert set(worker.made) == {one.ids[0], other.ids[0]}


def test_memory_and_shares_of_tenants():
    """Room for five images. A tenant's flood is at its own cost, also where each image has a salt of its own: those of
    others stay."""
    desk, worker, table, meter = desk_of(memory=5 * ROWS * 10)
    desk.set_tenants(lambda namespace: namespace[1].partition("/")[0])
    quiet = [take(table, f"quiet {i}", "quiet/") for i in range(2)]
    flood = [take(table, f"flood {i}", f"flood/{i}") for i in range(20)]
    for medium in (*quiet, *flood):
        desk.need([medium])
        finish(desk)
        assert bytes_held(desk) <= 5 * ROWS * 10
        assert bytes_held(desk) == sum(len(ids) * 10 for ids in worker.made.values())
    assert all(desk.holds_rows(medium.ids).all() for medium in (*quiet, *flood[-3:]))
    assert meter.stats.tower_runs == 22
    # Of one tenant's what was used last stays.
    desk.need([flood[-3]])
    desk.advance(1.0)
    desk.need([flood[0]])
    finish(desk)
    assert desk.holds_rows(flood[-3].ids).all() and not desk.holds_rows(flood[-2].ids).any()


def test_rows_that_somebody_waits_for_stay():
    desk, _, table, _ = desk_of(memory=2 * ROWS * 10)
    waiting = [take(table, f"waiting {i}") for i in range(3)]
    desk.need(waiting)
    finish(desk)
    assert [desk.holds_rows(medium.ids).all() for medium in waiting] == [True, True, False], (
        "no more than there is room for"
    )
    with desk.using(waiting[2].ids):
        assert all(desk.holds_rows(medium.ids).all() for medium in waiting), "who needs it now has it, in any case"
    desk.need(waiting[2:])
    others = [take(table, f"other {i}") for i in range(3)]
    for medium in others:
        with desk.using(medium.ids):
            assert desk.holds_rows(medium.ids).all()
    assert desk.holds_rows(waiting[2].ids).all() and not desk.holds_rows(waiting[0].ids).any()
    assert bytes_held(desk) <= 3 * ROWS * 10


def test_ids_of_what_is_kept_are_not_given_to_another():
    desk, _, table, _ = desk_of()
    medium = take(table, "one")
    ids = medium.ids
    desk.need([medium])
    desk.advance(0.0)
    desk.need([])
    del medium
    table.sweep()
    assert not set(take(table, "other").ids.tolist()) & set(ids.tolist()), "it is on its way through the tower"


@pytest.mark.parametrize("kind", ["load", "tower"])
def test_failures(kind):
    desk, worker, table, _ = desk_of()

    def fail():
        raise OSError("gone")

    medium = take(table, "one", load=fail) if kind == "load" else take(table, "one")
    worker.fails = {int(medium.ids[0])}
    desk.need([medium, other := take(table, "other")])
    assert finish(desk) == (medium, "gone" if kind == "load" else "made up")
    assert not worker.made and not worker.done and not desk.holds_rows(medium.ids).any()
    desk.need([other])
    assert finish(desk) is None
    assert desk.holds_rows(other.ids).all()


def test_others_go_on_while_a_file_is_read():
    desk, worker, table, _ = desk_of()
    desk.pool = ThreadPoolExecutor(2)
    may_end = threading.Event()

    def load():
        assert may_end.wait(60)
        return np.zeros((1, 3, 2, 2), np.float32)

    desk.need([one := take(table, "one", load=load)])
    for _ in range(3):
        assert desk.advance(100.0, idle=False) is None and not worker.told
    assert desk.advance(0.01) is None and not worker.told
    may_end.set()
    while not worker.told:
        desk.advance(0.01)
    assert worker.told == [(one.ids[0], 1)]
    finish(desk)
    assert desk.holds_rows(one.ids).all()

    def slow():
        raise TimeoutError("it took too long")

    desk.need([bad := take(table, "bad", load=slow)])
    assert finish(desk) == (bad, "it took too long")


def test_a_file_that_is_read_in_the_last_moment():
    """It may be there between the end of the waiting and a look whether it is."""

    class Late(Future):
        def result(self, timeout=None):
            if not self.done():
                self.set_result(np.zeros((1, 3, 2, 2), np.float32))
                raise TimeoutError
            return super().result(timeout)

    desk, worker, table, _ = desk_of()
    late = Late()
    desk.pool = SimpleNamespace(submit=lambda load: late)
    desk.need([one := take(table, "one")])
    assert desk.advance(0.01) is None and not worker.told
    late.set_result(np.zeros((1, 3, 2, 2), np.float32))
    assert finish(desk) is None and desk.holds_rows(one.ids).all()


def test_an_error_without_a_text_is_called_by_its_type():
    desk, _, table, _ = desk_of()

    def load():
        raise MemoryError

    desk.need([bad := take(table, "bad", load=load)])
    assert finish(desk) == (bad, "MemoryError")


def test_text_goes_on_while_images_wait():
    worker = Noting()
    engine = engine_of(worker)
    desk, generator = image_scheduler(engine), engine.generator
    desk._stop = lambda run, seconds, idle: run.num_done + 1
    image, told = take(image_scheduler(engine).media, "one"), {}
    text = Request(np.array([1, 2, 3], np.int32), sampling=Sampling(max_tokens=30))
    generator.add(text, None, lambda answer: told.__setitem__("text", answer))
    generator.step()
    for name in ("first", "second"):
        tokens = np.concatenate(([4], image.ids, [5, 6][: 1 + (name == "second")])).astype(np.int32)
        request = Request(tokens, sampling=Sampling(max_tokens=2), media=(image,))
        generator.add(request, None, lambda answer, name=name: told.__setitem__(name, answer))
    del image, request
    while "first" not in told:
        before = len(worker.told)
        assert generator.step()
        assert len(worker.told) <= before + 1, "one piece between two steps"
    assert [pieces for _, pieces in worker.told] == [1] * PIECES
    assert all(len(step.reads) for step in worker.steps), "the text gets a token in every step"
    while generator.has_work:
        generator.step()
    assert len(told["text"][0].tokens) == 30 and engine.stats.tower_runs == 1


def test_half_of_the_rate_is_kept_where_the_tower_makes_steps_slower(monkeypatch):
    """Of a step that takes 10 ms, and 13 ms behind the tower's work."""
    worker, clock, ran = Noting(), [0.0], [False]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    engine = engine_of(worker)
    image_scheduler(engine).pool = AtOnce()

    def encodes(pieces: int) -> None:
        clock[0], ran[0] = clock[0] + 0.004 * pieces, True

    def steps(message, prepared=None, start=worker.start):
        if isinstance(message, SlotStep):
            clock[0], ran[0] = clock[0] + (0.013 if ran[0] else 0.010), False
        return start(message, prepared)

    worker.takes, worker.start = encodes, steps
    generator, told = engine.generator, []
    generator.add(Request(np.array([1], np.int32), sampling=Sampling(max_tokens=60)), None, lambda answer: None)
    for _ in range(5):
        generator.step()
    images = [take(image_scheduler(engine).media, str(i)) for i in range(8)]
    tokens = np.concatenate([*(image.ids for image in images), [2]]).astype(np.int32)
    generator.add(Request(tokens, sampling=Sampling(max_tokens=1), media=tuple(images)), None, told.append)
    began, before = clock[0], len(worker.steps)
    while not told:
        generator.step()
    assert engine.stats.tower_runs == 8 and engine.stats.seconds["tower"] == pytest.approx(0.004 * 8 * PIECES)
    spent = (
        clock[0] - began + image_scheduler(engine)._credit
    )  # its last pieces may take more than it was given until then
    assert spent / (len(worker.steps) - before) == pytest.approx(0.020, rel=0.04)


def test_who_waits_is_told_when_the_tower_fails():
    worker = Noting()
    engine = engine_of(worker)
    generator, told = engine.generator, {}
    bad, good = take(image_scheduler(engine).media, "bad"), take(image_scheduler(engine).media, "good")
    worker.fails = {int(bad.ids[0])}
    for name, images in {"bad": (bad,), "both": (good, bad), "good": (good,), "text": ()}.items():
        tokens = np.concatenate(([1], *(image.ids for image in images), [2])).astype(np.int32)
        request = Request(tokens, sampling=Sampling(max_tokens=2), media=images)
        generator.add(request, None, lambda answer, name=name: told.__setitem__(name, answer))
    while generator.has_work:
        generator.step()
        check_books(generator.scheduler)
    assert {name for name, answer in told.items() if isinstance(answer, InputError)} == {"bad", "both"}
    assert told["bad"].code == "image_failed" and "made up" in str(told["bad"])


def test_requests_that_are_cancelled_stop_the_tower():
    worker = Noting()
    engine = engine_of(worker)
    generator, image = engine.generator, take(image_scheduler(engine).media, "one")
    image_scheduler(engine)._stop = lambda run, seconds, idle: run.num_done + 1
    tokens = np.concatenate(([1], image.ids, [2])).astype(np.int32)
    key = generator.add(Request(tokens, sampling=Sampling(max_tokens=2), media=(image,)), None, lambda answer: None)
    generator.step()
    generator.cancel(key)
    before = len(worker.told)
    assert not generator.step()
    assert len(worker.told) == before and not image_scheduler(engine)._needed


def test_an_image_whose_rows_are_cached_is_not_encoded():
    worker = Noting()
    generation = GenerateOptions(kv_memory=100, cache=CacheOptions(min_overlap=0))
    engine = ModelEngine(worker, EngineOptions(max_batch_rows=20, generation=generation))
    generator = engine.generator
    for number in range(2):
        image = take(image_scheduler(engine).media, "one")
        tokens = np.concatenate(([1], image.ids, [2 + number])).astype(np.int32)
        generator.add(Request(tokens, sampling=Sampling(max_tokens=2), media=(image,)), None, lambda answer: None)
        while generator.has_work:
            generator.step()
        image_scheduler(engine)._drop(image)
        assert not worker.made
    assert engine.stats.tower_runs == 1
