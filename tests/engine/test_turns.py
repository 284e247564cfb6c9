"""In which order numbers are read for those who wait."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

from prefold.engine import reading as module
from prefold.engine.reading import Part, Reading, read_next
from prefold.engine.turns import IDLE_OWNERS, Turns
from prefold.types import Owner, Readout, Share

LAST, MEAN = Readout("last"), Readout("mean")


def part(tenant, tokens=10, readout=LAST, batch=False):
    return parts(tenant, 1, tokens, readout, batch)[0]


def parts(tenant, count, tokens=10, readout=LAST, batch=False):
    """Parts of one reading."""
    reply = SimpleNamespace(owner=Owner(tenant, batch), is_cancelled=False)
    reading = Reading(reply, [None] * count, readout)
    return [Part(reading, [i], tokens) for i in range(count)]


def owners(parts):
    return [part.reading.reply.owner.tenant for part in parts]


def test_one_owner_is_served_in_order():
    turns, parts = Turns(), [part(None) for _ in range(9)]
    for one in parts:
        turns.add([one])
    assert turns.take(50) == parts[:5] and len(turns) == 4
    assert turns.take(1) == parts[5:6]
    parts[6].reading.reply.is_cancelled = True
    assert turns.take(1000) == parts[7:] and not turns


def test_who_comes_to_a_flood_is_next():
    turns = Turns()
    for _ in range(100):
        turns.add([part("flood")])
    assert owners(turns.take(200)) == ["flood"] * 20
    turns.add([part("other")])
    assert "other" in owners(turns.take(20))


def test_who_was_away_has_no_claim_on_what_it_did_not_use():
    turns = Turns()
    turns.add([part("away")])
    for _ in range(50):
        turns.add([part("here")])
    turns.take(310)
    for _ in range(20):
        turns.add([part("away")])
    assert Counter(owners(turns.take(100)))["away"] in (4, 5, 6)


def test_weights_and_classes():
    turns = Turns()
    turns.share_of = lambda tenant: Share(3.0 if tenant == "a" else 1.0)
    for _ in range(100):
        for tenant in "ab":
            turns.add([part(tenant)])
        turns.add([part("c", batch=True)])
    assert Counter(owners(turns.take(400))) == {"a": 30, "b": 10}
    while turns:
        last = owners(turns.take(300))
    assert set(last) == {"c"}


def test_only_what_reads_the_same_is_taken_together():
    turns = Turns()
    for readout in (LAST, MEAN, LAST):
        turns.add([part("a", readout=readout)])
    turns.add([part("b", readout=MEAN)])
    assert [one.reading.readout for one in turns.take(100)] == [LAST, LAST]
    assert owners(turns.take(100)) in (["a", "b"], ["b", "a"]) and not turns


def test_a_reading_larger_than_a_window_is_read_alone():
    turns = Turns()
    for _ in range(2):
        turns.add([part("a", tokens=1000)])
    assert len(turns.take(100)) == 1 and len(turns.take(100)) == 1


def test_those_who_wait_are_kept_where_idle_ones_are_forgotten():
    """Two newcomers may wait before one `take`."""
    turns = Turns()
    for i in range(2 * IDLE_OWNERS):
        turns.add([part(i)])
        turns.take(10)
    for i in range(20):  # all others were given more than these
        turns.add([part(f"new {i}")])
    assert sorted(owners(turns.take(1000))) == sorted(f"new {i}" for i in range(20))
    turns._now[False] += 1000
    turns.add([part("last")])
    assert set(turns._given) == {Owner("last", False)}


def test_readings_of_one_owner_take_turns():
    turns = Turns()
    large = part("a")
    turns.add([Part(large.reading, [i], 10) for i in range(5)])
    turns.add([part("a")])
    small = turns.take(20)
    assert [one.reading is large.reading for one in small] == [True, False]
    assert len(turns.take(10)) == 4, "it is alone now"
    turns.give_back([Part(large.reading, [3], 10), Part(large.reading, [4], 10)])
    turns.add([part("a")])
    assert [one.numbers for one in turns.take(30)] == [[3], [0], [4]] and not turns


def test_a_large_reading_has_its_share_beside_small_ones_that_read_other_numbers(monkeypatch):
    """Its parts have slightly fewer rows than are taken at a time, and none is taken that is not read."""
    turns, windows = Turns(), []
    turns.add(parts("a", 100, tokens=95))
    for _ in range(1000):
        turns.add([part("b", readout=MEAN)])

    def read(engine, found, *, stopping, **how):
        for number, one in enumerate(found):
            windows.append(owners([one]) if number == 0 else windows.pop() + owners([one]))
            one.reading.book(one.numbers[0], object())
            if stopping():
                break
        assert number == len(found) - 1, "something is given back"

    monkeypatch.setattr(module, "read_numbers", read)
    how = dict.fromkeys(("done", "fail", "on_step"))
    for _ in range(60):
        engine = SimpleNamespace(max_batch_rows=50)
        read_next(engine, turns, begin=list, is_due=lambda: False, **how)
    counts = Counter(window[0] for window in windows)
    assert 29 <= counts["a"] <= 32 and all(window in (["a"], ["b"] * 10) for window in windows), counts


def test_small_parts_of_a_reading_are_read_together_beside_others():
    turns = Turns()
    turns.add(parts("a", 20))
    turns.add([part("b", readout=MEAN)])
    assert owners(turns.take(100)) == ["a"] * 10


def test_a_reading_of_a_batch_that_gave_way_is_not_behind_by_what_was_not_read():
    turns = Turns()
    large = parts("a", 100, tokens=100, batch=True)
    turns.add(large)
    taken = turns.take(100)
    assert len(taken) == 16
    turns.give_back(taken[1:])
    turns.add(parts("b", 100, tokens=100, batch=True))
    assert 4 <= Counter(owners([turns.take(100)[0] for _ in range(10)]))["a"] <= 5
