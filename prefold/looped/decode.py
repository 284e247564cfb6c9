"""Visits of rows that are generated, where nobody has a prompt to compute: drafted, laid out, booked for all at once.

A step of generation has one row of each of many sequences, so that what is done for a row by itself would take as long
as a visit. Here everything is done over arrays: those of `Tails`, and what stays the same while the same sequences run:
in which order they lie, and which slots they see of their prompts at each visit.

The rows of a step may make several visits, in rounds: as long as all that go on come to the same block. A row that may
leave on the way has slots for all of these visits; it gives back those of visits that it does not make.

A step of one round is what `visit_draft` lays out of the same rows, but for their order. Where a row that left needs
K/V that are made of its state, where there is a coda, or slots are short, there is none, and the step is drafted row by
row.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence

import numpy as np

from ..schedule.generate_step import joined
from .claims import TAIL_SLOTS, Claims
from .crew import Crew
from .decode_step import DecodeDraft, DecodeStep
from .sequence import Routed
from .steps import DECIDES, LEAVES, PRELUDE, STAYS, VisitResult, VisitRounds, VisitStep
from .tails import Tails

NOTHING = np.zeros(0, np.int64)
# Where no more than so many rows would go on, and no more than half of the sequences have such, they wait for those of
# the others: on a CPU so few take as long as twice as many, for the weights are read once for all.
FEW_ROWS = 8


class Decoding:
    """A Decoding drafts, lays out and books steps of generation.

    claims  gives out slots
    tails   what the sequences' tails have
    """

    def __init__(self, claims: Claims, tails: Tails):
        self.claims, self.visits, self.tails = claims, claims.visits, tails
        self._crew: Crew | None = None
        # Slots claimed for visits that a step's rows perhaps do not make, until it is run: place, visit, row.
        self._ahead: tuple[np.ndarray, np.ndarray, np.ndarray] = (NOTHING, NOTHING, NOTHING)

    def forget(self) -> None:
        """Forgets who runs: somebody has come or gone."""
        self._crew = None

    def clear(self) -> None:
        """Forgets who runs, and what was claimed: no tail is there any more."""
        self.forget()
        self._ahead = NOTHING, NOTHING, NOTHING

    def draft(self, running: Collection[Routed], most: int) -> DecodeDraft | None:
        """Returns who makes the next visits, at most so many rows at one visit each, with slots claimed for them; None
        where that is for Claims to say."""
        if self._crew is None:
            if self.visits.coda or self.visits.keys != "last" or not all(sequence.ready for sequence in running):
                return None
            self._crew = Crew(running, self.tails, self.tails.visits)
        crew, tails = self._crew, self.tails
        place = crew.place
        visit, row = tails.visit[place], tails.row[place]
        if not (visit < crew.length).all():
            return None
        # Rows that a step of Claims brought to a visit have not been moved on to the next; others wait for what rows
        # before them left.
        for number in np.flatnonzero(tails.done[place, visit] != row).tolist():
            self.claims.advance(crew.sequences[number])
        visit = tails.visit[place]
        if not (visit < crew.length).all():
            return None
        behind = tails.done[place, visit] != row
        unit = crew.units[crew.route, visit]
        kind = unit - PRELUDE
        if self.visits.group == "template":
            kind = (crew.route * crew.most + visit) * (kind.max() + 1) + kind
        if not self.visits.refill and visit.any():
            kind = np.where(visit > 0, kind, -1)
        chosen = self._chosen(kind, tails.waited[place])
        members = np.flatnonzero(kind == chosen)
        if len(members) > most:  # those who waited longest
            members = np.sort(members[np.argsort(-tails.waited[place[members]], kind="stable")[:most]])
        if behind[members].any():  # K/V are to be made of the states of rows that left
            return None
        at = crew.route[members] * crew.most + visit[members]
        members = members[np.argsort(at, kind="stable")]
        wanted = self.visits.step_visits
        if wanted > 1 and len(crew.sequences) <= FEW_ROWS:
            wanted = crew.most
        rounds = max(1, min(wanted, most // len(members)))
        draft = self._drafted(crew, members, rounds)
        if not self._claim(draft):
            self.withdraw()
            draft = self._drafted(crew, members, 1)
            if rounds == 1 or not self._claim(draft):
                self.withdraw()
                return None
        return draft

    def _chosen(self, kind: np.ndarray, waited: np.ndarray) -> int:
        """Returns the kind that most are of, or one of whom has waited for long."""
        patience = self.visits.patience
        longest = int(np.where(kind >= 0, waited, 0).argmax())
        if kind[longest] >= 0 and waited[longest] >= patience:
            return int(kind[longest])
        return int(np.bincount(kind[kind >= 0]).argmax())

    def _drafted(self, crew: Crew, members: np.ndarray, most: int) -> DecodeDraft:
        """Returns the draft of these members and at most so many rounds."""
        tails, place, route = self.tails, crew.place[members], crew.route[members]
        visit, row, length = tails.visit[place], tails.row[place], crew.length[members]
        goes, found, units = np.ones(len(members), bool), [], []
        for number in range(most):
            rows = np.flatnonzero(goes)
            if not rows.size:
                break
            at = visit[rows] + number
            unit = crew.units[route[rows], at]
            # All go to one block, and see there what they need of the rows before them.
            if number and ((unit != unit[0]).any() or (tails.done[place[rows], at] != row[rows]).any()):
                break
            leaves = self._leaves(int(unit[0]), crew, route[rows], at, place[rows])
            goes[rows] = (leaves != LEAVES) & (at + 1 < length[rows])
            units.append(int(unit[0]))
            found.append((np.full(len(rows), number), rows, leaves))
        return DecodeDraft(np.array(units), members, *(np.concatenate(column) for column in zip(*found, strict=True)))

    def _may_end(self, crew: Crew, unit: int) -> bool:
        """Returns whether rows that come to a block may wait there for others: for those behind rows that have left,
        which all begin with it."""
        return self.visits.refill and bool((crew.units[:, 0] == unit).all())

    def _claim(self, draft: DecodeDraft) -> bool:
        """Gives rows their slots at the visits they come to; returns whether there were enough."""
        tails, crew = self.tails, self._crew
        assert crew is not None
        members = draft.members[draft.rows]
        place = crew.place[members]
        visit, row = tails.visit[place] + draft.rounds, tails.row[place]
        needs = np.flatnonzero(~tails.owned[place, visit, row])
        place, visit, row = place[needs], visit[needs], row[needs]
        ahead = draft.rounds[needs] > 0
        short = np.flatnonzero(tails.num_spare[place, visit] == 0)
        if short.size and not self._take_spare(crew, members[needs[short]], place[short], visit[short], ahead[short]):
            return False
        tails.slots[place, visit, row] = tails.spare_at[place, visit]
        tails.owned[place, visit, row] = True
        tails.spare_at[place, visit] += 1
        tails.num_spare[place, visit] -= 1
        self._ahead = place[ahead], visit[ahead], row[ahead]
        return True

    def _take_spare(
        self, crew: Crew, members: np.ndarray, place: np.ndarray, visit: np.ndarray, ahead: np.ndarray
    ) -> bool:
        """Claims slots for rows of members at visits, and some for the rows to come, those of each side by side;
        returns whether there were enough. ahead: whether the row may never come to the visit, so that nobody makes
        room."""
        tails, pool = self.tails, self.claims.pool
        rows = crew.limit[members] - 1 - tails.row[place]
        # All together, if there is a run so long: those of an even number before the others begin with an even slot.
        counts = np.minimum(rows, TAIL_SLOTS)
        order = np.argsort(counts & 1, kind="stable")
        if (found := pool.allocate_run(int(counts.sum()))) is not None:
            place, visit, counts = place[order], visit[order], counts[order]
            tails.spare_at[place, visit] = found[counts.cumsum() - counts]
            tails.num_spare[place, visit] = counts
            self._hold(crew, members[order], counts)
            return True
        for i, count in enumerate(counts.tolist()):
            if not ahead[i]:
                self.claims.make_free(count)
            if (found := pool.allocate_run(count)) is None:
                return False
            tails.spare_at[place[i], visit[i]], tails.num_spare[place[i], visit[i]] = found[0], count
            self._hold(crew, members[i : i + 1], counts[i : i + 1])
        return True

    def _hold(self, crew: Crew, members: np.ndarray, counts: np.ndarray) -> None:
        """Counts slots for those for whom members run."""
        if crew.has_accounts:
            for number, count in zip(members.tolist(), counts.tolist(), strict=True):
                account = crew.sequences[number].tail.account
                if account is not None:
                    account.hold(count)

    def withdraw(self) -> None:
        """Takes back the slots of visits to come, where the step that was drafted last is not to be run."""
        self._give_back(*self._ahead)
        self._ahead = NOTHING, NOTHING, NOTHING

    def _give_back(self, place: np.ndarray, visit: np.ndarray, row: np.ndarray) -> None:
        """Keeps the slots that rows were given last at visits for other rows."""
        tails = self.tails
        tails.slots[place, visit, row] = 0
        tails.owned[place, visit, row] = False
        tails.spare_at[place, visit] -= 1
        tails.num_spare[place, visit] += 1

    # ------------------------------------------------------------------------------------------------ the step

    def lay_out(self, draft: DecodeDraft) -> DecodeStep:
        """Returns the step of a draft; changes nothing."""
        crew, tails, rows = self._crew, self.tails, draft.rows
        assert crew is not None
        member = draft.members[rows]
        place, route = crew.place[member], crew.route[member]
        visit, row = tails.visit[place] + draft.rounds, tails.row[place]
        slots, position = tails.slots[place, visit, row], crew.start[member] + row
        runs = self._runs(draft, route, visit, place, slots, position)
        source = np.where(visit > 0, tails.slots[place, np.maximum(visit - 1, 0), row], 0)
        given = np.where(crew.has_prelude[route] & (visit > 0), tails.slots[place, 0, row], 0)
        ends = visit == crew.length[member] - 1
        single, n = len(draft.units) == 1, len(draft.members)
        offsets = draft.rounds.searchsorted(np.arange(len(draft.units) + 1))
        may_be_read = np.zeros(n, bool)
        may_be_read[rows[ends | (draft.leaves >= DECIDES)]] = True
        reads = np.flatnonzero(may_be_read)
        read_rows = reads
        rounds = None
        if single:
            read_rows = np.where(ends[reads], -1, reads)
        else:
            query = np.full((len(draft.units), n), -1)
            query[draft.rounds, rows] = np.arange(len(rows))
            before = np.where(draft.rounds > 0, query[draft.rounds - 1, rows], -1)
            least = np.ones(len(draft.units), np.int64)
            for number, unit in enumerate(draft.units.tolist()):
                if number and self._may_end(crew, unit):
                    least[number] = min(FEW_ROWS, len(crew.sequences) // 2) + 1
            rounds = VisitRounds(draft.units, offsets, runs[3].searchsorted(offsets), rows, before, ends, least)
        message = VisitStep(
            block=int(draft.units[0]),
            tokens=tails.token[place].astype(np.int32),
            positions=position.astype(np.int32),
            source=source,
            given=given,
            slots=slots,
            leaves=draft.leaves,
            criteria=crew.criteria[member],
            run_start=runs[0], run_count=runs[1], run_position=runs[2], run_first=runs[3], run_last=runs[4],
            read_slots=slots[reads],
            read_rows=read_rows,
            reads=np.arange(len(reads)),
            rounds=rounds,
        )  # fmt: skip
        takers = [crew.sequences[number] for number in draft.members[reads].tolist()]
        return DecodeStep(message, draft, takers, reads, crew, place[:n], visit[:n], row[:n])

    def _leaves(self, unit: int, crew: Crew, route: np.ndarray, visit: np.ndarray, place: np.ndarray) -> np.ndarray:
        """Returns whether rows of tails leave after a visit, as the table of Decided says. visit: its index."""
        if unit < 0:
            return np.full(len(place), STAYS, np.int8)
        number = visit + ~crew.has_prelude[route]
        most, leaves = len(self.visits.order), self.tails.leaves[place]
        decides = (number >= self.tails.decides[place]) & (number < most)
        gone = (number >= leaves) & ((number < most) | (number == leaves))
        return np.where(gone, LEAVES, np.where(decides, DECIDES, STAYS)).astype(np.int8)

    def _runs(
        self,
        draft: DecodeDraft,
        route: np.ndarray,
        visit: np.ndarray,
        place: np.ndarray,
        slots: np.ndarray,
        position: np.ndarray,
    ) -> tuple[np.ndarray, ...]:
        """Returns the runs of keys that queries see: of prompts, of their tails, and themselves."""
        crew, tails = self._crew, self.tails
        assert crew is not None
        kind = (draft.rounds * len(crew.units) + route) * crew.most + visit
        edges = [0, *(np.flatnonzero(np.diff(kind)) + 1).tolist(), len(kind)]
        found = []
        for first, stop in itertools.pairwise(edges):
            start, count, at, begins, ends = crew.prompts(int(route[first]), int(visit[first]))
            some = draft.members[draft.rows[first:stop]]
            begins, ends = first + some.searchsorted(begins), first + some.searchsorted(ends)
            seen = ends > begins
            found.append((start[seen], count[seen], at[seen], begins[seen], ends[seen]))
        # Those of each row's tail, and last the row itself.
        number = tails.num_runs[place, visit]
        ends = (number + 1).cumsum()
        query = np.repeat(np.arange(len(place)), number + 1)
        which = np.arange(ends[-1]) - np.repeat(ends - number - 1, number + 1)
        own = ends - 1
        which[own] = 0
        at = (place * tails.visits + visit)[query] * tails.run_start.shape[2] + which
        start, count, where = (
            array.reshape(-1)[at] for array in (tails.run_start, tails.run_count, tails.run_position)
        )
        start[own], count[own], where[own] = slots, 1, position
        found.append((start, count, where, query, query + 1))
        columns = [np.concatenate(column) for column in zip(*found, strict=True)]
        order = np.argsort(columns[3], kind="stable")
        return joined(*(column[order] for column in columns))

    def begin(self, step: DecodeStep) -> int:
        """Books a step as being run. Returns how many slots all who run would need if nobody shared anything."""
        crew, tails = step.crew, self.tails
        self._ahead = NOTHING, NOTHING, NOTHING
        tails.waited[crew.place] += 1
        tails.waited[step.place] = 0
        return int(((tails.row[crew.place] + 1 + crew.start) * crew.length).sum())

    def book(self, step: DecodeStep, result: VisitResult) -> int:
        """Books the rows that a step brought to their visits. Returns how many visits those that left do not make."""
        crew, tails, draft = step.crew, self.tails, step.draft
        made, left, rows = step.made(result), result.left, draft.rows
        was = draft.rounds < made[rows]
        # The slots of visits that were not made stay with their tails.
        some = rows[~was]
        self._give_back(step.place[some], step.at[some] + draft.rounds[~was], step.row[some])
        rows, rounds = rows[was], draft.rounds[was]
        place, visit, row = step.place[rows], step.at[rows] + rounds, step.row[rows]
        tails.left[place, visit, row] = left[rows] & (rounds + 1 == made[rows])
        tails.done[place, visit] = row + 1
        start = crew.start[draft.members]
        tails.add_runs(place, visit, tails.slots[place, visit, row], 1, start[rows] + row)
        tails.visit[step.place] = step.at + made
        gone = np.flatnonzero(left)
        if not len(gone):
            return 0
        # What deeper visits see of them is there, but for K/V that are made of a state, and what comes behind such.
        route, last = crew.route[draft.members[gone]], (step.at + made - 1)[gone]
        seen = crew.seen[route, last]
        place, row = step.place[gone], step.row[gone]
        which, deeper = np.nonzero((seen >= 0) & (tails.done[place] == row[:, None]))
        seen, place, row = seen[which, deeper], place[which], row[which]
        slots = tails.slots[place, seen, row]
        tails.slots[place, deeper, row] = slots
        tails.left[place, deeper, row] = True
        tails.done[place, deeper] = row + 1
        tails.add_runs(place, deeper, slots, 1, start[gone[which]] + row)
        return int(crew.rest[route, last].sum())

    def take(
        self, step: DecodeStep, visits: Sequence[int], tokens: Sequence[int], ended: Sequence[bool], taken: np.ndarray
    ) -> list[Routed]:
        """Books that rows left after these visits and gave tokens, as `Routed.leave_with` does for one; returns the
        sequences that have ended. taken: bool, as of VisitResult."""
        crew, tails = step.crew, self.tails
        numbers = step.members[step.reads]
        blocks = (np.array(visits, np.int64) + ~crew.has_prelude[crew.route[numbers]]).tolist()
        done, places, rows, new = [], [], [], []
        for i in np.flatnonzero(taken).tolist():
            sequence, made = step.takers[i], crew.made[numbers[i]]
            if sequence.state == "ended":
                continue
            if made is None:
                if sequence.leave_with(visits[i], tokens[i], ended[i]):
                    done.append(sequence)
                continue
            made.append(blocks[i])
            tail = sequence.tail
            places.append(tail.place)
            if not ended[i]:
                tail.computed = len(tail.tokens)
                tail.tokens.append(tokens[i])
                sequence.known += 1
            rows.append(len(tail.tokens) - 1)
            new.append(tail.tokens[-1])
            if ended[i] or sequence.known == sequence.limit:
                done.append(sequence)
        tails.room_for(max(rows, default=0) + 1)
        tails.visit[places] = 0
        tails.row[places], tails.token[places] = rows, new
        return done
