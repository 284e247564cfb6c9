"""A worker that knows what each slot holds, and what every request gives alone: for schedules of visits.

Numbers stand for states: a row's state after a visit is a hash of the one before, of the block, and of all that it saw.
So one wrong key anywhere changes everything behind it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from visit_books import check_visits

from prefold.looped.layout import VisitPlan
from prefold.looped.scheduler import VisitOptions, VisitScheduler
from prefold.looped.sequence import ExitRecord, LoopedSequence
from prefold.looped.steps import CODA, DECIDES, LEAVES, PRELUDE, VisitResult, VisitStep
from prefold.schedule.admission import NO_LIMITS, StepLimits
from prefold.types import Exits

TOKEN, ROUTER, PROJECTED = -3, -4, -5  # what is mixed first; blocks are -2 or more


def mixed(*numbers: int) -> int:
    return hash(numbers) & 0xFFFFFFFFFFFF


def leaves(state: int, exits: Exits) -> bool:
    """By its state alone, where the request has a threshold."""
    return exits.threshold not in (None, 1) and state % 100 < 100 * exits.threshold


def chosen(states: Sequence[int], step: int, fewest: int, blocks: int) -> int:
    """What the router says of a prompt's states."""
    return mixed(ROUTER, *states, step) % (blocks + (step >= max(1, fewest)))


def token_of(state: int, sample: int) -> int:
    """A token out of few, so that outputs meet prompts."""
    return (state + sample) % 3


class FakeWorker:
    """Runs steps with hashes. blocks: how many there are."""

    def __init__(self, blocks: int):
        self.blocks = blocks
        self.kv: dict[int, int] = {}
        self.states: dict[int, int] = {}

    def run(self, step: VisitPlan) -> tuple[VisitResult, list[int]]:
        """Returns the result, and the token at each read."""
        if step.message.rounds is not None:
            return self._run_rounds(step)
        message, left = step.message, np.zeros(step.num_rows, bool)
        for slot, source in zip(message.project_slots.tolist(), message.project_sources.tolist(), strict=True):
            self.kv[slot] = mixed(PROJECTED, message.block, self.states[source])
        of_row = {}
        for _visit, take, queries in step.takes:
            of_row |= dict.fromkeys(queries[queries >= 0].tolist(), take.sequence)
        if (decode := step.decode) is not None:
            of_row |= dict(enumerate((decode.batch.sequences[i] for i in decode.members.tolist()), step.prompt_rows))
        assert len({int(slot) for slot in message.slots}) == step.num_rows
        new: list[tuple[int, int]] = []
        for row in range(step.num_rows):
            state, left[row] = self._visited(message, message.block, row, of_row.get(row))
            new.append((int(message.slots[row]), state))
        self.states.update(new)
        taken_slots = [row < 0 or bool(left[row]) for row in message.read_rows.tolist()]
        taken = np.array([taken_slots[read] for read in message.reads.tolist()], bool)
        tokens = [
            token_of(self.states[int(message.read_slots[read])], sequence.sample) if made else -1
            for read, made, sequence in zip(message.reads.tolist(), taken.tolist(), step.consumers, strict=True)
        ]
        blocks = []
        for routing in message.routings:
            for i, (first, stop) in enumerate(
                zip(routing.offsets[:-1].tolist(), routing.offsets[1:].tolist(), strict=True)
            ):
                if len(routing.tokens):
                    states = [mixed(TOKEN, int(token)) for token in routing.tokens[first:stop]]
                else:
                    states = [self.states[int(slot)] for slot in routing.slots[first:stop]]
                blocks.append([chosen(states, routing.step, int(routing.fewest[i]), self.blocks)])
        found = np.array(blocks, np.int64).reshape(-1, 1)
        return VisitResult(np.array(tokens, np.int64), has_left=left, was_read=taken, blocks=found), tokens

    def _visited(self, message: VisitStep, block: int, query: int, sequence: LoopedSequence | None) -> tuple[int, bool]:
        """Returns the state after a query's visit, and whether its row leaves."""
        seen = self._seen(message, query)
        position, slot = int(message.positions[query]), int(message.slots[query])
        assert sorted(seen) == list(range(position + 1)), "a key is missing"
        assert seen[position] == slot
        source = int(message.source[query])
        came = mixed(TOKEN, int(message.tokens[query])) if not source else self.states[source]
        self.kv[slot] = state = mixed(came, block, *(self.kv[seen[p]] for p in range(position)))
        left = message.leaves[query] == LEAVES
        if message.leaves[query] == DECIDES:
            in_tail = position - sequence.leaf.stop
            assert in_tail < 0 or in_tail == len(sequence.tail.tokens) - 1, "a row that had left decides again"
            left = leaves(state, sequence.exits)
        return state, bool(left)

    def _run_rounds(self, step: VisitPlan) -> tuple[VisitResult, list[int]]:
        """Each row by itself: it goes on through its queries until it has left."""
        message, rounds = step.message, step.message.rounds
        count = int(rounds.offsets[1])
        assert not len(message.project_slots) and not message.routings and (message.read_rows >= 0).all()
        assert rounds.row[:count].tolist() == list(range(count)) and (rounds.before[:count] < 0).all()
        queries_of = np.bincount(rounds.row)
        left, made, ends, last = [False] * count, [0] * count, [False] * count, [0] * count
        for number, block in enumerate(rounds.blocks.tolist()):
            new = {}
            if (
                sum(not gone and made[row] == number and number < queries_of[row] for row, gone in enumerate(left))
                < (rounds.least[number])
            ):
                break
            for query in range(*rounds.offsets[number : number + 2].tolist()):
                row = int(rounds.row[query])
                if left[row] or made[row] < number:
                    continue
                if number:
                    before = int(rounds.before[query])
                    assert last[row] == before and message.source[query] == message.slots[before]
                runs = rounds.runs[number : number + 2]
                at = np.flatnonzero((message.run_first <= query) & (query < message.run_last))
                assert runs[0] <= at.min() and at.max() < runs[1]
                sequence = step.decode.batch.sequences[step.decode.members[row]]
                new[int(message.slots[query])], left[row] = self._visited(message, block, query, sequence)
                made[row], last[row], ends[row] = number + 1, query, bool(rounds.ends[query])
            self.states.update(new)
        taken = np.array([left[row] or ends[row] for row in message.read_rows.tolist()], bool)[message.reads]
        tokens = [
            token_of(self.states[int(message.slots[last[row]])], sequence.sample) if there else -1
            for row, there, sequence in zip(
                message.read_rows[message.reads].tolist(), taken.tolist(), step.consumers, strict=True
            )
        ]
        result = VisitResult(
            np.array(tokens, np.int64), has_left=np.array(left), was_read=taken, num_visits=np.array(made)
        )
        return result, tokens

    def _seen(self, message: VisitStep, row: int) -> dict[int, int]:
        seen: dict[int, int] = {}
        for i in np.flatnonzero((message.run_first <= row) & (row < message.run_last)).tolist():
            for place in range(int(message.run_count[i])):
                position = int(message.run_position[i]) + place
                assert position not in seen, "two keys of one position"
                seen[position] = int(message.run_start[i]) + place
        return seen


class Alone:
    """What a request gives that nothing runs beside. route, made (visits of each row), tokens"""

    def __init__(self, prompt: Sequence[int], sample: int, limit: int, exits: Exits, visits: VisitOptions):
        self.visits, self.exits = visits, exits
        self.states: list[list[int]] = []  # by row, after each visit that it made
        self.kv: dict[tuple[int, int], int] = {}
        self.left: list[int] = []  # the index of the visit that a row left after
        self.left_with: dict[int, int] = {}  # its state then
        self.tokens: list[int] = []
        self.rows = len(prompt)
        route = exits.route or (None if visits.routed else visits.order)
        self.route = [PRELUDE] * visits.prelude + (list(route) if route else [])
        if route:
            self.route += [CODA] * visits.coda
            for row, token in enumerate(prompt):
                self._row(row, token, True)
        else:
            self._routed(list(prompt))
        while True:
            self.tokens.append(token_of(self.states[-1][-1], sample))
            if len(self.tokens) == limit:
                break
            self._row(len(self.states), self.tokens[-1], False)

    def _routed(self, prompt: list[int]) -> None:
        """All rows of a prompt go through a visit before the next is chosen."""
        self.states, number = [[] for _ in prompt], 0
        self.left = [1 << 30] * len(prompt)
        now = [mixed(TOKEN, token) for token in prompt]
        while True:
            if self.visits.prelude and not self.states[0]:
                block = PRELUDE
            else:
                block = chosen(now, number, self.exits.min_visits, self.visits.blocks)
                if block == self.visits.blocks or number == (self.exits.max_visits or len(self.visits.order)):
                    break
                self.route.append(block)
                number += 1
            t = len(self.states[0])
            for row in range(len(prompt)):
                now[row] = self._visit(row, t, block, now[row])
                self.states[row].append(now[row])
        t = len(self.route) - 1
        if self.visits.coda:
            self.route.append(CODA)
            t += 1
            for row in range(len(prompt)):
                self.states[row].append(self._visit(row, t, CODA, now[row]))
        self.left = [t] * len(prompt)

    def _visit(self, row: int, t: int, block: int, came: int) -> int:
        state = mixed(came, block, *(self._seen(other, t) for other in range(row)))
        self.kv[row, t] = state
        return state

    def _row(self, row: int, token: int, is_prompt: bool) -> None:
        came, states, exits = mixed(TOKEN, token), [], self.exits
        self.states.append(states)
        gone, number = False, 0
        for t, block in enumerate(self.route):
            if gone and block != CODA:
                continue
            came = self._visit(row, t, block, came)
            states.append(came)
            number += block >= 0
            if t == len(self.route) - 1:
                break
            in_tail = row - self.rows
            if block >= 0 and 0 <= in_tail < len(exits.visits):
                if gone := number == exits.visits[in_tail]:
                    left, self.left_with[row] = t, came
            elif block >= 0 and (not is_prompt or exits.prompts):
                gone = number >= exits.min_visits and leaves(came, exits)
                gone = gone or (exits.max_visits is not None and number >= exits.max_visits)
                if gone:
                    left, self.left_with[row] = t, came
        self.left.append(left if gone else len(self.route) - 1)

    def _seen(self, row: int, t: int) -> int:
        if (row, t) in self.kv:
            return self.kv[row, t]
        if self.visits.keys == "last":
            for earlier in range(self.left[row], -1, -1):
                if self.route[earlier] == self.route[t]:
                    return self.kv[row, earlier]
        return mixed(PROJECTED, self.route[t], self.left_with[row])

    @property
    def made(self) -> list[int]:
        """After how many visits to blocks each row left."""
        return [sum(block >= 0 for block in self.route[: left + 1]) for left in self.left]


def run_step(
    scheduler: VisitScheduler, worker: FakeWorker, ended: dict, failed: list, limits: StepLimits = NO_LIMITS
) -> bool:
    """Makes a step, checks the books after each verb, and returns whether there was one."""
    failed += scheduler.admit(limits)
    check_visits(scheduler)
    step = scheduler.plan()
    again = scheduler.plan()
    if step is None:
        assert again is None
        return False
    for name in step.message.__dataclass_fields__:
        was, now = getattr(step.message, name), getattr(again.message, name)
        if name == "rounds" and was is not None:
            assert all(np.array_equal(getattr(was, part), getattr(now, part)) for part in was.__dataclass_fields__)
            continue
        same = name in ("routings", "block") or was is None or np.array_equal(was, now, equal_nan=name == "criteria")
        assert same, name
    assert step.num_rows + len(step.message.project_slots) <= scheduler.max_batch_rows
    scheduler.begin(step)
    result, tokens = worker.run(step)
    for done in scheduler.commit(step, tokens, [False] * len(tokens), result):
        ended[done.key, done.sample] = list(done.tokens)
    check_visits(scheduler)
    return True


def check_alone(
    prompt, sample: int, limit: int, exits: Exits, visits: VisitOptions, tokens, decided: ExitRecord
) -> None:
    """A request gave what it gives alone: its tokens, its route, and the visits that its rows made."""
    alone = Alone(prompt, sample, limit, exits, visits)
    assert list(decided.route) == alone.route
    assert tokens == alone.tokens, "a wrong key"
    rows = len(prompt)
    assert decided.tails.get(sample, []) == alone.made[rows : rows + limit - 1]
    if decided.prompt is not None:
        assert decided.prompt.tolist() == alone.made[:rows]
