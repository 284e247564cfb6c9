"""Slots, layout and bookkeeping of the rows of sequences that generate, for all of them at once, over arrays.

A step has one row of each of many sequences that generate, so that work done row by row would take as long as a visit.
Here all work is done over arrays: those of `OutputRows`, and those of `DecodeBatch`, which stay the same while the same
sequences generate: their order, and the slots that they see of their prompts at each visit.

The rows of a step may make several visits, in rounds: as long as all that go on come to the same block. A row that may
leave on the way has slots for all of these visits; when it leaves, it gives back those of visits that it does not make.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from ..cache.tree import Node
from ..schedule.generate_step import join_runs, tree_above
from .cache import OUTPUT_SLOTS, SlotAllocator
from .outputs import OutputRows, ragged
from .sequence import LoopedSequence, leaves_after
from .steps import DECIDES, LEAVES, PRELUDE, STAYS, VisitOptions, VisitResult, VisitRounds

# (numbers of sequences with a row in a step, and of late rows: `late_members`, `late_rows`, `projected` of DecodeRows)
Part = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
NOTHING = np.zeros(0, np.int64)
# If at most this many rows would go on, and at most half of the sequences have such rows, they wait for the rows of the
# others: on a CPU so few rows take as long as twice as many, because a step reads the weights once for all its rows.
FEW_ROWS = 8


class DecodeBatch:
    """A DecodeBatch holds the n sequences that generate, and arrays that change only when sequences come or go.

    sequences  by route, and depth-first
    number     the index of each sequence in that order
    place      int64 [n]: the place of each sequence's output in OutputRows
    start      int64 [n]: the position of the first row of each output
    limit      int64 [n]: as of SequenceState
    route      int64 [n]: the number of each sequence's route
    criteria   float64 [n, 2]: as of VisitStep
    length     int64 [n]: how many visits each sequence's route has
    units      int64 [routes, visits]: the blocks of each route
    rest       int64 [routes, visits]: how many visits to blocks come after each
    earlier    int64 [routes, visits]: the last visit to the same block before each; -1: there is none
    reused     int64 [routes, visits, visits]: the visit whose slot the second visit uses for a row that left after the
               first; -1: its K/V must be computed from its state there, or at a visit between the two
    has_accounts   whether the slots of any sequence count for a tenant
    exit_visits    by sequence: after how many visits the rows of its output left, as in ExitRecord
    plain      by sequence: whether its next rows leave by its rule alone, without a call of `LoopedSequence.when`
    blocks     int64 [routes, visits]: how many visits to blocks there are up to each, itself included
    """

    def __init__(self, sequences: Collection[LoopedSequence], outputs: OutputRows, visits: VisitOptions):
        self.outputs, self.most = outputs, outputs.visits
        numbers: dict[tuple[int, ...], int] = {}
        for sequence in sequences:
            numbers.setdefault(tuple(sequence.route), len(numbers))
        self.routes = list(numbers)
        order = _depth_first(sequences)
        self.sequences = sorted(order, key=lambda sequence: numbers[tuple(sequence.route)])
        self.number = {sequence: number for number, sequence in enumerate(self.sequences)}
        self.route = np.array([numbers[tuple(sequence.route)] for sequence in self.sequences], np.int64)
        self.place = np.array([sequence.tail.place for sequence in self.sequences], np.int64)
        self.start = np.array([sequence.leaf.stop for sequence in self.sequences], np.int64)
        self.limit = np.array([sequence.limit for sequence in self.sequences], np.int64)
        self.has_accounts = any(sequence.tail.account is not None for sequence in self.sequences)
        self.criteria = np.array([sequence.criteria for sequence in self.sequences], np.float64).reshape(-1, 2)
        self.exit_visits = [sequence.exit_record.tails.setdefault(sequence.sample, []) for sequence in self.sequences]
        self.plain = [
            not sequence.exits.visits and len(exit_visits) < len(sequence.tail.tokens)
            for sequence, exit_visits in zip(self.sequences, self.exit_visits, strict=True)
        ]
        size = (len(numbers), self.most)
        self.units = np.full(size, PRELUDE - 2, np.int64)
        self.blocks, self.rest = np.zeros(size, np.int64), np.zeros(size, np.int64)
        self.earlier, self.reused = np.full(size, -1, np.int64), np.full((*size, self.most), -1, np.int64)
        for number, route in enumerate(numbers):
            blocks = np.array([unit >= 0 for unit in route], np.int64)
            self.units[number, : len(route)] = route
            self.blocks[number, : len(route)] = blocks.cumsum()
            self.rest[number, : len(route)] = blocks.sum() - blocks.cumsum()
            for exit_visit in range(len(route)):
                last = {unit: at for at, unit in enumerate(route[: exit_visit + 1])}
                if exit_visit + 1 < len(route):
                    self.earlier[number, exit_visit + 1] = last.get(route[exit_visit + 1], -1)
                for at in range(exit_visit + 1, len(route) if visits.keys == "last" else 0):
                    if route[at] not in last:
                        break
                    self.reused[number, exit_visit, at] = last[route[at]]
        self.length = np.array([len(route) for route in numbers], np.int64)[self.route]
        self.has_prelude = self.units[:, 0] == PRELUDE
        self._tables: dict[tuple[int, int], tuple[np.ndarray, ...]] = {}

    def prompts(self, route: int, visit: int) -> tuple[np.ndarray, ...]:
        """Returns the runs of prompt slots that sequences see at a visit of a route: the start, count and position of
        each run, the number of the first sequence that sees it, and the number after that of the last."""
        table = self._tables.get((route, visit))
        if table is None:
            runs: list[tuple[int, int, int, int, int]] = []
            first_of, *_, last_of = np.flatnonzero(self.route == route).repeat(2).tolist()
            prefix = self.sequences[first_of].prefixes[visit]
            open_nodes: list[tuple[Node, int, int]] = []  # (node, its first run, the run behind its last)
            for number in range(first_of, last_of + 2):
                path = self.sequences[number].leaf.path() if number <= last_of else []
                same = 0
                while same < min(len(path), len(open_nodes)) and open_nodes[same][0] is path[same]:
                    same += 1
                for _, first, stop in open_nodes[same:]:
                    for at in range(first, stop):
                        runs[at] = (*runs[at][:4], number)
                del open_nodes[same:]
                for node in path[same:]:
                    node_visit, first = node.visits[prefix], len(runs)  # type: ignore[attr-defined]
                    runs += [(*run, number, number) for run in node_visit.runs]
                    open_nodes.append((node, first, len(runs)))
            columns = np.array(runs, np.int64).reshape(-1, 5).T
            table = self._tables[route, visit] = tuple(np.ascontiguousarray(column) for column in columns)
        return table


@dataclass(slots=True)
class DecodeRows:
    """A DecodeRows holds the rows of generating sequences in one step: the last row of each of n sequences, which makes
    one visit or several, and m late rows, which left before this visit and whose K/V the visit needs all the same.

    batch         all sequences that generate
    members       int64 [n]: the numbers in the batch of the n sequences, grouped by route and visit
    place, at, row  int64 [n]: the place of each output in OutputRows, the first visit that its row makes, and the row
    late_members  int64 [m]: the number in the batch of each late row's sequence
    late_rows     int64 [m]: the number of each late row in its sequence's output
    projected     bool [m]: whether a late row's K/V are computed from its state; if not, they are in an earlier slot
    units         int64 [rounds]: the block that is visited in each round
    rounds        int64 [queries]: the round of each query, ascending
    rows          int64 [queries]: the index in `members` of the sequence whose row the query computes
    leaves        int8 [queries]: as of VisitStep
    reads         int64: the indices in `members` of the sequences whose row is read if it leaves or its route ends
    """

    batch: DecodeBatch
    members: np.ndarray
    place: np.ndarray
    at: np.ndarray
    row: np.ndarray
    late_members: np.ndarray
    late_rows: np.ndarray
    projected: np.ndarray
    units: np.ndarray = field(init=False)
    rounds: np.ndarray = field(init=False)
    rows: np.ndarray = field(init=False)
    leaves: np.ndarray = field(init=False)
    reads: np.ndarray = field(init=False)

    def num_visits(self, result: VisitResult) -> np.ndarray:
        """Returns how many visits each row made, int64 [n]."""
        return result.num_visits if len(self.units) > 1 else np.ones(len(self.members), np.int64)

    def block_calls(self, result: VisitResult) -> int:
        """Returns how many rows went through a block."""
        num_visits = self.num_visits(result)
        return sum(int((num_visits > number).sum()) for number, unit in enumerate(self.units.tolist()) if unit >= 0)


class Decoding:
    """A Decoding chooses the rows of generating sequences for a step, gives them slots, lays them out and books them.

    slots    gives out slots
    outputs  the slots and the state of the sequences' output rows
    """

    def __init__(self, slots: SlotAllocator, outputs: OutputRows):
        self.slots, self.visits, self.outputs = slots, slots.visits, outputs
        self._batch: DecodeBatch | None = None

    def forget(self) -> None:
        """Forgets the batch, because a sequence has come or gone."""
        self._batch = None

    def batch(self, running: Collection[LoopedSequence]) -> DecodeBatch:
        """Returns the DecodeBatch of those running sequences that generate."""
        if self._batch is None:
            ready = [sequence for sequence in running if sequence.ready]
            self._batch = DecodeBatch(ready, self.outputs, self.visits)
        return self._batch

    # ------------------------------------------------------------------------------------------------ the draft

    def choose(self, batch: DecodeBatch, numbers: np.ndarray, most: int) -> tuple[Part, int]:
        """Chooses which of these sequences, whose next block is the same, have rows in a step, and gives them slots.
        Returns the chosen rows, and how many of them are computed or projected: `most` at most, first the rows of the
        sequences that have waited longest.

        Where a sequence has more rows to be projected than there is room for, only the first of these are chosen.
        """
        outputs = self.outputs
        late = self._late(batch, numbers)
        cost = 1 + np.bincount(np.searchsorted(numbers, late[0][late[2]]), minlength=len(numbers))
        if cost.sum() > most:
            order = np.argsort(-outputs.steps_waited[batch.place[numbers]], kind="stable")
            fits = order[cost[order].cumsum() <= most]
            is_chosen = np.isin(late[0], numbers[fits] if fits.size else numbers[order[0]])
            if not fits.size:
                is_chosen &= (late[2] & is_chosen).cumsum() <= most
            numbers, late = np.sort(numbers[fits]), tuple(array[is_chosen] for array in late)
        if len(late[0]):
            place = batch.place[late[0]]
            visit = outputs.visit[place]
            needs = np.flatnonzero(late[2] & ~outputs.owns_slot[place, visit, late[1]])
            slots = self.slots.allocate(len(needs))
            at = needs[: len(slots)]
            outputs.slots[place[at], visit[at], late[1][at]] = slots
            outputs.owns_slot[place[at], visit[at], late[1][at]] = True
            self._hold(batch, late[0][at], np.ones_like(at))
            if len(slots) < len(needs):
                first = needs[len(slots)]
                numbers = numbers[~np.isin(numbers, late[0][first:])]
                late = tuple(array[:first] for array in late)
        numbers = numbers[self._give(batch, numbers, np.zeros_like(numbers))]
        return (numbers, *late), len(numbers) + int(np.count_nonzero(late[2]))

    def _late(self, batch: DecodeBatch, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns the late rows of sequences, which left before their sequence's next visit and are not settled there:
        of each the number of its sequence, the row, and whether its K/V is projected. Enters the slots of others."""
        outputs, place = self.outputs, batch.place[numbers]
        visit = outputs.visit[place]
        num_settled = outputs.num_settled[place, visit]
        if (num_settled == outputs.row[place]).all():
            return NOTHING, NOTHING, np.zeros(0, bool)
        members, rows = ragged(outputs.row[place] - num_settled)
        rows += num_settled[members]
        place, visit, earlier = place[members], visit[members], batch.earlier[batch.route[numbers], visit][members]
        reuses = earlier >= 0
        if self.visits.keys == "project":
            reuses &= (earlier > 0) & outputs.has_left[place, np.maximum(earlier - 1, 0), rows]
        slots = outputs.slots[place, np.maximum(earlier, 0), rows]
        outputs.slots[place[reuses], visit[reuses], rows[reuses]] = slots[reuses]
        return numbers[members], rows, ~reuses

    def rows(self, batch: DecodeBatch, parts: Sequence[Part]) -> DecodeRows:
        """Returns the DecodeRows of the rows that `choose` chose, all of which go to the same block."""
        outputs = self.outputs
        numbers, *late = (np.concatenate(column) for column in zip(*parts, strict=True))
        numbers.sort()
        at = batch.route[numbers] * batch.most + outputs.visit[batch.place[numbers]]
        numbers, order = numbers[np.argsort(at, kind="stable")], np.argsort(late[0], kind="stable")
        place = batch.place[numbers]
        drafted = DecodeRows(batch, numbers, place, outputs.visit[place], outputs.row[place], *(a[order] for a in late))
        self._set_rounds(drafted, 1)
        return drafted

    def go_on(self, drafted: DecodeRows, most: int) -> None:
        """Lets the rows make several visits in the same step, where the options ask for it and there are slots. A step
        so extended has no rows of prompts, and at most `most` rows, where a row counts once for each of its visits."""
        step_visits, members = self.visits.step_visits, len(drafted.members)
        if step_visits > 1 and len(drafted.batch.sequences) <= FEW_ROWS:
            step_visits = drafted.batch.most
        rounds = min(step_visits, most // max(1, members))
        if rounds < 2 or len(drafted.late_rows) or self.visits.coda:
            return
        self._set_rounds(drafted, rounds)
        if not self._give(drafted.batch, drafted.members[drafted.rows], drafted.rounds).all():
            self._set_rounds(drafted, 1)

    def _set_rounds(self, drafted: DecodeRows, most: int) -> None:
        """Decides which visits the rows of a draft make, in `most` rounds at most."""
        batch, outputs, place = drafted.batch, self.outputs, drafted.place
        route, visit, row = batch.route[drafted.members], drafted.at, drafted.row
        length = batch.length[drafted.members]
        goes, queries, units = np.ones(len(place), bool), [], []
        for number in range(most):
            rows = np.flatnonzero(goes)
            if not rows.size:
                break
            at = visit[rows] + number
            unit = batch.units[route[rows], at]
            # All go to one block, and see there what they need of the rows before them.
            if number and ((unit != unit[0]).any() or (outputs.num_settled[place[rows], at] != row[rows]).any()):
                break
            if unit[0] < 0:
                leaves = np.full(len(rows), STAYS, np.int8)
            else:
                decides, leaves = outputs.decides[place[rows]], outputs.leaves[place[rows]]
                leaves = leaves_after(at + ~batch.has_prelude[route[rows]], decides, leaves, len(self.visits.order))
            goes[rows] = (leaves != LEAVES) & (at + 1 < length[rows])
            units.append(int(unit[0]))
            queries.append((np.full(len(rows), number), rows, leaves))
        drafted.units = np.array(units, np.int64)
        drafted.rounds, drafted.rows, drafted.leaves = (
            (np.concatenate(column) for column in zip(*queries, strict=True)) if queries else (NOTHING,) * 3
        )
        may_be_read = np.zeros(len(place), bool)
        ends = (visit + 1)[drafted.rows] + drafted.rounds == length[drafted.rows]
        # What is read of a model with a coda is read after it.
        may_be_read[drafted.rows[ends if self.visits.coda else ends | (drafted.leaves >= DECIDES)]] = True
        drafted.reads = np.flatnonzero(may_be_read)

    def _give(self, batch: DecodeBatch, numbers: np.ndarray, rounds: np.ndarray) -> np.ndarray:
        """Gives the last row of each sequence a slot at the visit that lies `rounds` after its next visit, as far as
        there are slots. Returns which rows have a slot, bool. No sequence has the same round twice."""
        outputs, place = self.outputs, batch.place[numbers]
        visit, row = outputs.visit[place] + rounds, outputs.row[place]
        needs = ~outputs.owns_slot[place, visit, row]
        short = np.flatnonzero(needs & (outputs.num_spare[place, visit] == 0))
        if short.size:
            self._take_spare(batch, numbers[short], visit[short], rounds[short] > 0)
        takers = np.flatnonzero(needs & (outputs.num_spare[place, visit] > 0))
        at = place[takers], visit[takers]
        outputs.slots[(*at, row[takers])] = outputs.spare_at[at]
        outputs.owns_slot[(*at, row[takers])] = True
        outputs.spare_at[at] += 1
        outputs.num_spare[at] -= 1
        return outputs.owns_slot[place, visit, row]

    def _take_spare(self, batch: DecodeBatch, numbers: np.ndarray, visit: np.ndarray, ahead: np.ndarray) -> None:
        """Reserves slots for the last row of each sequence and its next rows at a visit, side by side, as far as there
        are slots. ahead: whether the row may leave before that visit, so that no other rows are evicted for it"""
        outputs, pool, place = self.outputs, self.slots.pool, batch.place[numbers]
        rows = batch.limit[numbers] - 1 - outputs.row[place]
        # All together, if there is a run so long: those of an even number before the others begin with an even slot.
        counts = np.minimum(rows, OUTPUT_SLOTS)
        order = np.argsort(counts & 1, kind="stable")
        if (slots := pool.allocate_run(int(counts.sum()))) is not None:
            place, visit, counts = place[order], visit[order], counts[order]
            outputs.spare_at[place, visit] = slots[counts.cumsum() - counts]
            outputs.num_spare[place, visit] = counts
            self._hold(batch, numbers[order], counts)
            return
        for i, count in enumerate(counts.tolist()):
            if not ahead[i]:
                self.slots.make_free(count)
            if (slots := pool.allocate_run(count)) is None:
                slots = NOTHING if ahead[i] else self.slots.allocate(1)
            if not len(slots):
                return
            outputs.spare_at[place[i], visit[i]], outputs.num_spare[place[i], visit[i]] = slots[0], len(slots)
            self._hold(batch, numbers[i : i + 1], np.array([len(slots)]))

    def _hold(self, batch: DecodeBatch, members: np.ndarray, counts: np.ndarray) -> None:
        """Adds the slots that each member got to the account of the tenant whom it runs for."""
        if batch.has_accounts:
            for number, count in zip(members.tolist(), counts.tolist(), strict=True):
                account = batch.sequences[number].tail.account
                if account is not None:
                    account.hold(count)

    # ------------------------------------------------------------------------------------------------ the step

    def lay_out(self, drafted: DecodeRows, first: int) -> tuple[dict[str, np.ndarray], VisitRounds | None]:
        """Returns the fields of a VisitStep of these rows, whose first query is number `first`, and their rounds;
        changes nothing."""
        batch, outputs, rows = drafted.batch, self.outputs, drafted.rows
        member, place = drafted.members[rows], drafted.place[rows]
        route, visit, row = batch.route[member], drafted.at[rows] + drafted.rounds, drafted.row[rows]
        slots, position = outputs.slots[place, visit, row], batch.start[member] + row
        runs = self._runs(drafted, route, visit, place, position)
        source = np.where(visit > 0, outputs.slots[place, self._state_of(place, visit, row), row], 0)
        prelude = np.where(batch.has_prelude[route] & (visit > 0), outputs.slots[place, 0, row], 0)
        ends = visit == batch.length[member] - 1
        reads = read_rows = drafted.reads
        rounds = None
        if len(drafted.units) < 2:
            read_rows = np.where(ends[reads], -1, reads)
        else:
            offsets = drafted.rounds.searchsorted(np.arange(len(drafted.units) + 1))
            query = np.full((len(drafted.units), len(drafted.members)), -1)
            query[drafted.rounds, rows] = np.arange(len(rows))
            before = np.where(drafted.rounds > 0, query[drafted.rounds - 1, rows], -1)
            least = np.ones(len(drafted.units), np.int64)
            for number, unit in enumerate(drafted.units.tolist()):
                # Rows may wait at a block for those behind rows that have left, where all of these begin with it.
                if number and self.visits.refill and (batch.units[:, 0] == unit).all():
                    least[number] = min(FEW_ROWS, len(batch.sequences) // 2) + 1
            rounds = VisitRounds(drafted.units, offsets, runs[3].searchsorted(offsets), rows, before, ends, least)
        late_member, late_row = drafted.late_members[drafted.projected], drafted.late_rows[drafted.projected]
        late = batch.place[late_member]
        at = outputs.visit[late]
        columns = {
            "tokens": outputs.token[place].astype(np.int32),
            "positions": position.astype(np.int32),
            "source": source,
            "preludes": prelude,
            "slots": slots,
            "leaves": drafted.leaves.astype(np.int8),
            "criteria": batch.criteria[member],
            "run_start": runs[0], "run_count": runs[1], "run_position": runs[2],
            "run_first": runs[3] + first, "run_last": runs[4] + first,
            "project_slots": outputs.slots[late, at, late_row],
            "project_sources": outputs.slots[late, outputs.has_left[late, :, late_row].argmax(1), late_row],
            "project_preludes": outputs.slots[late, 0, late_row] * batch.has_prelude[batch.route[late_member]],
            "project_positions": batch.start[late_member] + late_row,
            "read_slots": slots[reads],
            "read_rows": np.where(read_rows < 0, -1, read_rows + first),
            "reads": np.arange(len(reads)),
        }  # fmt: skip
        return columns, rounds

    def _state_of(self, place: np.ndarray, visit: np.ndarray, row: np.ndarray) -> np.ndarray:
        """Returns the visit whose output state each row brings to its visit: the visit before, and for a row that left,
        which comes to the coda alone, the visit after which it left."""
        before = np.maximum(visit - 1, 0)
        if not self.visits.coda or not len(place):
            return before
        has_left = self.outputs.has_left[place, :, row]
        return np.where(has_left.any(1), np.minimum(has_left.argmax(1), before), before)

    def _runs(
        self, drafted: DecodeRows, route: np.ndarray, visit: np.ndarray, place: np.ndarray, position: np.ndarray
    ) -> tuple[np.ndarray, ...]:
        """Returns the runs of keys that queries see: those of their prompts and outputs, and their own."""
        batch, outputs = drafted.batch, self.outputs
        kind = (drafted.rounds * len(batch.units) + route) * batch.most + visit
        edges = [0, *(np.flatnonzero(np.diff(kind)) + 1).tolist(), len(kind)] if len(kind) else []
        parts = []
        for first, stop in itertools.pairwise(edges):
            start, count, at, begins, ends = batch.prompts(int(route[first]), int(visit[first]))
            queries = drafted.members[drafted.rows[first:stop]]
            begins, ends = first + queries.searchsorted(begins), first + queries.searchsorted(ends)
            visible = ends > begins
            parts.append((start[visible], count[visible], at[visible], begins[visible], ends[visible]))
        # Those of each row's output; then the rows that left before and are settled with this step, and the row itself.
        number, num_settled = outputs.num_runs[place, visit], outputs.num_settled[place, visit]
        query, members = ragged(number)
        of_output = (outputs.run_start, outputs.run_count, outputs.run_position)
        columns = [runs[place[query], visit[query], members] for runs in of_output]
        parts.append((*columns, query, query + 1))
        row = position - batch.start[drafted.members[drafted.rows]]
        query, members = ragged(row - num_settled + 1)
        members += num_settled[query]
        start = outputs.slots[place[query], visit[query], members]
        parts.append((start, np.ones_like(start), position[query] - row[query] + members, query, query + 1))
        columns = [np.concatenate(column) for column in zip(*parts, strict=True)]
        order = np.argsort(columns[3], kind="stable")
        return join_runs(*(column[order] for column in columns))

    def begin(self, batch: DecodeBatch, drafted: DecodeRows | None) -> int:
        """Resets the waiting time of sequences with rows in a step, and raises that of the others. Returns how many
        slots all sequences that generate would need if nothing was shared."""
        outputs = self.outputs
        outputs.steps_waited[batch.place] += 1
        if drafted is not None:
            outputs.steps_waited[drafted.place] = 0
            outputs.steps_waited[batch.place[drafted.late_members]] = 0
        return int(((outputs.row[batch.place] + 1 + batch.start) * batch.length).sum())

    def book(self, drafted: DecodeRows, result: VisitResult, has_left: np.ndarray) -> int:
        """Books the rows that a step brought to their visits. has_left: bool [n], whether each left after the last
        visit that it made. Returns how many visits those that left do not make."""
        batch, outputs = drafted.batch, self.outputs
        late = drafted.late_rows
        rank = np.arange(len(late)) - np.searchsorted(drafted.late_members, drafted.late_members)
        for number in range(int(rank.max(initial=-1)) + 1):  # those of one sequence one after the other
            members, row = drafted.late_members[rank == number], late[rank == number]
            place = batch.place[members]
            visit = outputs.visit[place]
            outputs.has_left[place, visit, row] = True
            outputs.num_settled[place, visit] = row + 1
            outputs.add_runs(place, visit, outputs.slots[place, visit, row], 1, batch.start[members] + row)
        num_visits, rows = drafted.num_visits(result), drafted.rows
        in_round = drafted.rounds < num_visits[rows]
        rows, rounds = rows[in_round], drafted.rounds[in_round]
        place, visit, row = drafted.place[rows], drafted.at[rows] + rounds, drafted.row[rows]
        outputs.has_left[place, visit, row] = has_left[rows] & (rounds + 1 == num_visits[rows])
        outputs.num_settled[place, visit] = row + 1
        start = batch.start[drafted.members]
        outputs.add_runs(place, visit, outputs.slots[place, visit, row], 1, start[rows] + row)
        outputs.visit[drafted.place] = drafted.at + num_visits
        exits = np.flatnonzero(has_left)
        if not len(exits):
            return 0
        route, last = batch.route[drafted.members[exits]], (drafted.at + num_visits - 1)[exits]
        place, row = drafted.place[exits], drafted.row[exits]
        if self.visits.coda:
            outputs.visit[place] = batch.length[drafted.members[exits]] - 1
        # Slots of visits that they do not make are for the rows behind them.
        numbers, deeper = np.nonzero(outputs.owns_slot[place, :, row] & (np.arange(batch.most) > last[:, None]))
        at = place[numbers], deeper
        outputs.owns_slot[(*at, row[numbers])] = False
        outputs.spare_at[at] -= 1
        outputs.num_spare[at] += 1
        # Deeper visits reuse the K/V of these rows, unless K/V must be made of a state for the row or one before it.
        reused = batch.reused[route, last]
        numbers, deeper = np.nonzero((reused >= 0) & (outputs.num_settled[place] == row[:, None]))
        reused, place, row = reused[numbers, deeper], place[numbers], row[numbers]
        slots = outputs.slots[place, reused, row]
        outputs.slots[place, deeper, row] = slots
        outputs.has_left[place, deeper, row] = True
        outputs.num_settled[place, deeper] = row + 1
        outputs.add_runs(place, deeper, slots, 1, start[exits[numbers]] + row)
        return int(batch.rest[route, last].sum())

    def note_exits(self, drafted: DecodeRows, was_read: np.ndarray) -> None:
        """Records after how many visits rows left. was_read: bool [reads], which of the reads were made"""
        batch, reads = drafted.batch, drafted.reads[was_read]
        numbers, place, row = drafted.members[reads], drafted.place[reads], drafted.row[reads]
        has_left = self.outputs.has_left[place, :, row]
        last = np.where(has_left.any(1), has_left.argmax(1), batch.length[numbers] - 1)
        blocks = batch.blocks[batch.route[numbers], last]
        for number, of_row, count in zip(numbers.tolist(), row.tolist(), blocks.tolist(), strict=True):
            if len(batch.exit_visits[number]) == of_row:  # else it is recorded already
                batch.exit_visits[number].append(count)

    def take(self, consumers: Iterable[tuple[LoopedSequence, int, bool, bool]]) -> list[LoopedSequence]:
        """Appends to each sequence its next token, and returns the sequences that have ended. consumers: (sequence,
        token, whether the sequence ends without it, whether its next row leaves by the sequence's rule alone)"""
        outputs, finished, places, rows, last = self.outputs, [], [], [], []
        for sequence, token, ends, is_plain in consumers:
            tail = sequence.tail
            if not ends:
                tail.num_computed = len(tail.tokens)
                tail.tokens.append(token)
                sequence.num_known += 1
            if ends or sequence.num_known == sequence.limit:
                finished.append(sequence)
            if is_plain:
                places.append(tail.place)
                rows.append(len(tail.tokens) - 1)
                last.append(tail.tokens[-1])
            else:
                sequence.enter_row()
        outputs.room_for(max(rows, default=0) + 1)
        outputs.visit[places] = 0
        outputs.row[places], outputs.token[places] = rows, last
        return finished


def _depth_first(running: Collection[LoopedSequence]) -> list[LoopedSequence]:
    """Returns the sequences ordered by a depth-first walk over the tree of their prompts."""
    at: dict[Node, list[LoopedSequence]] = {}
    for sequence in running:
        at.setdefault(sequence.leaf, []).append(sequence)
    stack, below = tree_above(at)
    stack.reverse()
    order: list[LoopedSequence] = []
    while stack:
        node = stack.pop()
        order += at.get(node, ())
        stack += reversed(below.get(node, ()))
    return order
