"""The pass of a step's rows through a looped model: block by block, along their routes, until each row leaves.

Both executors run this code on their arrays. `StepRows` has the operations that differ between executors. No torch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Generic, TypeVar

import numpy as np

from ...engine.schedule.steps import SlotStep
from ...engine.worker import Ticket
from ...errors import InputError, UnsupportedModelError
from ...worker.arrays import Array, Arrays
from .config import Loop
from .gates import (
    LoopedModel,
    VisitOutputs,
    choose,
    gate_logits,
    handed_on,
    injected,
    planner_logits,
    read_state,
    router_logits,
    summary,
)
from .steps import LoopedFacts, Passage, PassResult

Batch = TypeVar("Batch")


def facts_of(loop: Loop, ranks: int = 1) -> LoopedFacts:
    """Return the facts of a looped model that is split over `ranks` ranks.

    Raise UnsupportedModelError for a router that steps cannot follow, and InputError for a gate or a router that cannot
    be split over ranks.
    """
    router = loop.router if loop.router is not None and loop.router.kind != "fixed" else None
    if router is not None and (router.kind in ("soft", "top") or router.reads == "row"):
        setting = f"kind is {router.kind!r}" if router.reads == "request" else 'reads is "row"'
        works = 'only routers that read requests and pick one block work: give "hard" or "fixed"'
        raise UnsupportedModelError(f"loop.router.{setting}; {works}")
    if ranks > 1 and loop.gate and loop.gate_reads == "features":
        message = "the gate reads logits after each visit, which only the first rank computes"
        raise InputError(message, field="tensor_parallel", remedy='use 1, or a gate that reads "state"')
    if ranks > 1 and router is not None:
        message = "a router needs a model that is not split over ranks"
        raise InputError(message, field="tensor_parallel", remedy='use 1, or the kind "fixed"')
    return LoopedFacts(loop.order, loop.gate, loop.threshold, router is not None, ranks == 1)


class StepRows(ABC, Generic[Array, Batch]):
    """The rows of one step, as an executor runs them through a looped model.

    In all methods, `rows` are numbers of rows of the step, ascending. An array of states has one row for each of them.

    Attributes:
        model: the model
        positions: int64 [rows]
        read_rows: int64: rows of the step that are read, ascending
        whole: the batch of all rows
    """

    def __init__(self, model: LoopedModel[Array], positions: np.ndarray, read_rows: np.ndarray, whole: Batch):
        self.model: LoopedModel[Array] = model
        self.positions, self.read_rows, self.whole = positions, read_rows, whole
        self._parts = dict[bytes, Batch]()

    @abstractmethod
    def start(self) -> Array:
        """Return the states of all rows after the embedding and the prelude."""

    @abstractmethod
    def go_through(self, x: Array, batch: Batch, layers: range, plane: int, is_last: bool) -> Array:
        """Return the states of a batch's rows after some layers. May overwrite x.

        Args:
            x: the states before
            batch: the rows
            layers: the layers to run
            plane: the plane of the first layer's K/V
            is_last: the pass ends here, so rows that are not read are dropped
        """

    # Only for steps over slots: rows of a stream make all visits together.

    def part(self, rows: np.ndarray, of_read: np.ndarray | None) -> Batch:
        """Return the batch of some rows.

        Args:
            of_read: indices into `rows` of the rows that are read; None: all are read
        """
        raise NotImplementedError

    def project(self, x: Array, rows: np.ndarray, layer: int) -> tuple[Array, Array]:
        """Return a layer's keys and values for states, [rows, kv_heads, dim]."""
        raise NotImplementedError

    def read(self, plane: int, rows: np.ndarray) -> tuple[Array, Array]:
        """Return the keys and values of rows in a plane, [rows, kv_heads, dim]."""
        raise NotImplementedError

    def write(self, plane: int, rows: np.ndarray, keys: Array, values: Array) -> None:
        """Write the keys and values of rows in a plane."""
        raise NotImplementedError

    def batch_of(self, rows: np.ndarray) -> Batch:
        """Return the batch of some rows."""
        if len(rows) == len(self.positions):
            return self.whole
        if (found := self._parts.get(rows.tobytes())) is None:
            is_read = np.isin(rows, self.read_rows)
            found = self.part(rows, None if is_read.all() else np.flatnonzero(is_read))
            self._parts[rows.tobytes()] = found
        return found


@dataclass(frozen=True, slots=True)
class PassTicket:
    """The ticket of a looped model's SlotStep.

    Attributes:
        reads: the step's read-outs; other fields are as in PassResult
    """

    reads: Ticket
    visits: np.ndarray
    saved: int
    routes: Sequence[tuple[int, ...]]

    def result(self) -> PassResult:
        read = self.reads.result()
        return PassResult(read.ids, read.logprobs, read.values, self.visits, self.saved, self.routes)


def run_slots(
    rows: StepRows[Array, Batch], step: SlotStep, read_slots: Callable[[SlotStep, Array], Ticket]
) -> PassTicket:
    """Run the rows of a step over slots through a looped model, and return the ticket of the read-outs.

    Args:
        read_slots: the worker's function that computes read-outs from hidden states
    """
    order = rows.model.config.loop.order
    passage = step.feature if isinstance(step.feature, Passage) else Passage((order,))
    reading = None
    if (limits := passage.read_after) is not None:
        reading = reading_rules(rows.model, step.read_rows[np.concatenate((step.reads, step.state_reads))], limits)
    one = LoopedPass(rows, passage, reading, sees_itself(step))
    hidden = one.run()
    if reading is not None:  # the hidden states are in the order of the rules
        places, kept = np.split(np.arange(len(reading.rows)), [len(step.reads)])
        read_outs = tuple(replace(reads, rows=reads.consumers) for reads in step.read_outs)
        step = replace(step, read_rows=reading.rows, reads=places, state_reads=kept, read_outs=read_outs)
    return PassTicket(read_slots(step, hidden), one.visits, one.saved, one.routes)


def sees_itself(step: SlotStep) -> bool:
    """Return whether any row of a step sees another row of the step."""
    several = step.run_last - step.run_first > 1
    start, slots = step.run_start[several], np.sort(step.slots)
    stop = start + step.run_count[several]
    return bool((np.searchsorted(slots, start) < np.searchsorted(slots, stop)).any())


class ExitRules(Generic[Array]):
    """The rules by which m rows of a step leave, or are read.

    Args:
        rows: int64 [m]: the row of each rule
        rules: float64 [m, 4], as in `Passage.leave_after`
        leave: whether the rows leave; if not, they are only read
    """

    def __init__(self, model: LoopedModel[Array], rows: np.ndarray, rules: np.ndarray, *, leave: bool):
        self.rows, self._leave = rows, leave
        self._model: LoopedModel[Array] = model
        self._arrays: Arrays[Array] = model.arrays
        threshold, self._change, self._fewest, self._most = rules.T
        self._threshold = np.where(threshold < 1, threshold, np.nan).astype(np.float32)
        self._is_gated = ~np.isnan(self._threshold)
        self._is_open = np.ones(len(rows), bool)
        # For each row, the probability of not having left before the next visit, and the probability of having left.
        self._stays, self._share_left = np.ones(len(rows), np.float32), np.zeros(len(rows), np.float32)
        self._before: tuple[np.ndarray, VisitOutputs[Array]] | None = None  # numbers of rules, and their outputs

    @property
    def compares(self) -> bool:
        """Whether states before and after a visit are compared."""
        return bool(np.isfinite(self._change).any())

    @property
    def open(self) -> np.ndarray:
        """The numbers of the rules that are not met: their rows have not left, or have not been read."""
        return np.flatnonzero(self._is_open)

    def after(self, visits: int, place: np.ndarray, x: Array, before: Array) -> np.ndarray:
        """Return the numbers of the rules that are met after this number of visits: their rows leave, or are read.

        Args:
            visits: number of completed visits
            place: int64 [rows of the step]: index of each row's state in x; -1: the row makes no more visits
            x: the states of rows after the visit
            before: the states of rows before the visit
        """
        at = place[self.rows]
        some = np.flatnonzero(self._is_open & (at >= 0))
        leaves = self._most[some] <= visits
        decides = ~leaves & (self._fewest[some] <= visits)
        gated = np.flatnonzero(~leaves & self._is_gated[some])
        if gated.size:
            share = self._gated(some[gated], self._arrays.take(x, self._arrays.send(at[some[gated]])))
            leaves[gated] = decides[gated] & (share >= self._threshold[some[gated]])
            wrong = gated[np.isnan(share)]
            if self._leave and wrong.size:  # NaN: the request that reads this state gets an error
                x[self._arrays.send(at[some[wrong]])] = np.nan
                leaves[wrong] = True
        changing = np.flatnonzero(decides & ~leaves & np.isfinite(self._change[some]))
        if changing.size:
            moved = self._moved(self._arrays.send(at[some[changing]]), x, before)
            leaves[changing] = moved <= self._change[some[changing]].astype(np.float32)
        left = some[leaves]
        self._is_open[left] = False
        return left

    def _moved(self, places: Array, x: Array, before: Array) -> np.ndarray:
        """Return the relative change `|after - before| / |before|` of the state of each of these rows, float32."""
        arrays = self._arrays
        was, now = (arrays.float32(arrays.take(states, places)) for states in (before, x))
        change = now - was
        of_change, of_state = arrays.fetch(arrays.dots(change, change), arrays.dots(was, was))()
        shares: np.ndarray = np.sqrt(of_change) / np.maximum(np.sqrt(of_state), np.float32(1e-30))
        return shares

    def _gated(self, some: np.ndarray, x: Array) -> np.ndarray:
        """Return the probability of having left for the rows of some rules, float32 (see `visits_at_exit`).

        Args:
            x: the states of these rows
        """
        hidden, before = read_state(self._model, x), None
        if self._before is not None:  # the open rules are a subset of the rules that were open then
            at, outputs = np.searchsorted(self._before[0], some), self._before[1]
            before = VisitOutputs(self._arrays.take(outputs.hidden, self._arrays.send(at)), outputs.likely[at])
        logit, seen = gate_logits(self._model, hidden, before)
        self._before = None if seen is None else (some, seen)
        with np.errstate(over="ignore"):
            share = 1 / (1 + np.exp(-self._arrays.fetch(logit)()[0]))
        stays = self._stays[some]
        has_left: np.ndarray = self._share_left[some] + share * stays
        self._share_left[some], self._stays[some] = has_left, stays * (1 - share)
        return has_left


def leaving_rules(model: LoopedModel[Array], rules: np.ndarray | None) -> ExitRules[Array] | None:
    """Return the rules by which rows of a step leave, or None if no row leaves.

    Args:
        rules: `Passage.leave_after`
    """
    if rules is None:
        return None
    rows = np.flatnonzero(~np.isnan(rules[:, :2]).all(1) | np.isfinite(rules[:, 3]))
    return ExitRules(model, rows, rules[rows], leave=True) if len(rows) else None


def reading_rules(model: LoopedModel[Array], rows: np.ndarray, limits: np.ndarray) -> ExitRules[Array]:
    """Return the rules by which rows are read.

    Args:
        limits: float64 [rows, 3], as in `Passage.read_after`
    """
    threshold = np.where(np.isnan(limits[:, 0]), model.config.loop.threshold, limits[:, 0])
    rules = np.column_stack((threshold, np.full(len(rows), np.nan), limits[:, 1:]))
    return ExitRules(model, rows, rules, leave=False)


class LoopedPass(Generic[Array, Batch]):
    """One pass of a step's rows through a looped model.

    Args:
        reading: the rules by which rows are read; None: each row is read after its last visit
        is_joined: whether rows may see each other

    Attributes:
        visits: int64 [n]: number of visits of each row
        saved: number of visits that rows skipped because they had left
        routes: the router's choice of blocks for each of `Passage.asks`
    """

    def __init__(
        self,
        rows: StepRows[Array, Batch],
        passage: Passage,
        reading: ExitRules[Array] | None = None,
        is_joined: bool = True,
    ):
        self._rows: StepRows[Array, Batch] = rows
        self._reading: ExitRules[Array] | None = reading
        self._passage, self._is_joined = passage, is_joined
        self._model: LoopedModel[Array] = rows.model
        self._arrays: Arrays[Array] = rows.model.arrays
        self._config, self._loop = rows.model.config, rows.model.config.loop
        asked, count, num_rows = len(passage.asks), len(passage.routes), len(rows.positions)
        self.visits, self.saved = np.zeros(num_rows, np.int64), 0
        self.routes: list[tuple[int, ...]] = [()] * asked
        # The block of each visit of each route; -1: the route has ended. Routes from the router come last.
        self._blocks = np.full((count + asked, len(self._loop.order)), -1)
        for number, route in enumerate(passage.routes):
            self._blocks[number, : len(route)] = route
        self._route = np.zeros(num_rows, np.int64) if passage.route is None else passage.route.copy()
        for number, (first, stop) in enumerate(passage.asks[:, :2].tolist(), count):
            self._route[first:stop] = number
        self._given: Array | None = None  # the prelude's output for `injected`
        self._ended: list[tuple[np.ndarray, Array]] = []  # rows that make no more visits, and their states
        self._unfilled: list[tuple[np.ndarray, Array]] = []  # rows of `_ended` whose K/V of deeper visits are missing
        self._seen: list[tuple[np.ndarray, Array]] = []  # rules of `reading` that are met, and the states to read

    def run(self) -> Array:
        """Return the hidden states of the rows that are read, in the order of the reading rules, or of `read_rows`."""
        rows, leaving = np.arange(len(self._rows.positions)), leaving_rules(self._model, self._passage.leave_after)
        x = self._rows.start()
        x, self._given = handed_on(self._model, x, self._arrays.send(self._rows.positions))
        last = len(self._loop.order) - 1
        for visit in range(last + 1):
            self._ask(visit, rows, x)
            rows, x = self._on_route(visit, rows, x)
            if not len(rows):
                break
            before = self._arrays.copy(x) if leaving is not None and leaving.compares else x
            self.visits[rows] += 1
            rows, x = self._visit(visit, rows, x)
            if visit < last:
                rows, x = self._after(visit + 1, leaving, rows, x, before)
        self._end(rows, x)
        if self._unfilled:
            parts, states = zip(*self._unfilled, strict=True)
            self._fill(np.concatenate(parts), self._arrays.join(states))
        return self._read()

    # ------------------------------------------------------------------------------------------- rows and rules

    def _on_route(self, visit: int, rows: np.ndarray, x: Array) -> tuple[np.ndarray, Array]:
        """Return the rows with this visit in their route, and their states."""
        goes_on = self._blocks[self._route[rows], visit] >= 0
        if goes_on.all():
            return rows, x
        self._end(*self._keep(~goes_on, rows, x))
        return self._keep(goes_on, rows, x)

    def _after(
        self, visits: int, leaving: ExitRules[Array] | None, rows: np.ndarray, x: Array, before: Array
    ) -> tuple[np.ndarray, Array]:
        """Return the rows that continue after this number of visits, and their states."""
        place = np.full(len(self._rows.positions), -1)
        place[rows] = np.arange(len(rows))
        reading = self._reading
        if reading is not None and len(read := reading.after(visits, place, x, before)):
            self._seen.append((read, self._take(x, place[reading.rows[read]])))
        if leaving is None or not len(left := leaving.after(visits, place, x, before)):
            return rows, x
        goes_on = np.ones(len(rows), bool)
        goes_on[place[leaving.rows[left]]] = False
        self._leave(*self._keep(~goes_on, rows, x))
        return self._keep(goes_on, rows, x)

    def _take(self, x: Array, places: np.ndarray) -> Array:
        return self._arrays.take(x, self._arrays.send(places))

    def _keep(self, kept: np.ndarray, rows: np.ndarray, x: Array) -> tuple[np.ndarray, Array]:
        """Return the rows where `kept` (bool [rows]) is true, and their states."""
        return rows[kept], self._take(x, np.flatnonzero(kept))

    def _end(self, rows: np.ndarray, x: Array) -> None:
        if len(rows):
            self._ended.append((rows, x))

    def _leave(self, rows: np.ndarray, x: Array) -> None:
        """Let rows leave. Write their K/V of deeper visits now if other rows of the step need them, else at the end."""
        self._end(rows, x)
        lengths = (self._blocks[self._route[rows]] >= 0).sum(1)
        self.saved += int((lengths - self.visits[rows]).sum())
        if self._is_joined:
            self._fill(rows, x)
        else:
            self._unfilled.append((rows, x))

    # ------------------------------------------------------------------------------------------- the router

    def _ask(self, visit: int, rows: np.ndarray, x: Array) -> None:
        """Ask the router about the next visit of prompts, or, before the first visit, the planner about all visits."""
        asks, rules = [], self._loop.router
        for number, (first, stop, _, most) in enumerate(self._passage.asks.tolist()):
            at = int(np.searchsorted(rows, first))
            if visit < most and at < len(rows) and rows[at] == first:
                asks.append((number, at, at + stop - first))
        if not asks or rules is None or (visit and rules.kind == "planned"):
            return
        # One request at a time, so that the sum does not depend on other requests.
        parts = [x[first:stop] for _, first, stop in asks]
        arrays = self._arrays
        states = arrays.join([summary(arrays, part[-1:], arrays.float32(part).mean(0)[None]) for part in parts])
        planned = rules.kind == "planned"
        logits = planner_logits(self._model, states) if planned else router_logits(self._model, states, visit)[None]
        chosen = self._chosen(visit, [number for number, _, _ in asks], arrays.fetch(logits)()[0], rules.threshold)
        for (number, first, stop), blocks in zip(asks, chosen, strict=True):
            if blocks is None:  # NaN: the request that reads these states gets an error
                x[first:stop] = np.nan
            else:
                self._go_on(number, blocks)

    def _chosen(
        self, visit: int, numbers: Sequence[int], logits: np.ndarray, threshold: float
    ) -> list[list[int] | None]:
        """Return the next blocks of each of these prompts, or None if its logits are NaN.

        Args:
            logits: float32 [visits, prompts, blocks + 1], for the next visit and the visits after it
        """
        wrong = (np.isnan(logits[..., :-1]).any(-1) | np.isnan(logits[..., -1])).any(0)
        too_early = np.arange(len(logits))[:, None] + visit < self._passage.asks[list(numbers), 2]
        logits = logits.copy()
        logits[..., -1][too_early] = -np.inf
        blocks = choose(logits.reshape(-1, logits.shape[-1]), threshold).reshape(logits.shape[:2]).T
        return [None if is_wrong else one.tolist() for is_wrong, one in zip(wrong, blocks, strict=True)]

    def _go_on(self, number: int, chosen: Sequence[int]) -> None:
        """Append blocks to the route of a prompt, until it leaves."""
        most = int(self._passage.asks[number, 3])
        route = [*self.routes[number], *takewhile(lambda block: block < self._loop.blocks, chosen)][:most]
        self.routes[number] = tuple(route)
        self._blocks[len(self._passage.routes) + number, : len(route)] = route

    # ------------------------------------------------------------------------------------------- layers

    def _visit(self, visit: int, rows: np.ndarray, x: Array) -> tuple[np.ndarray, Array]:
        """Run each row through its block, and return the remaining rows and their states.

        After the last visit of a model without a coda, only the rows that are read may remain.
        """
        blocks = self._blocks[self._route[rows], visit]
        if (blocks == blocks[0]).all():
            return self._through(visit, int(blocks[0]), rows, x)
        found = []
        for block in np.unique(blocks).tolist():
            found.append(self._through(visit, block, *self._keep(blocks == block, rows, x)))
        rows = np.concatenate([some for some, _ in found])
        order = np.argsort(rows)
        return rows[order], self._take(self._arrays.join([states for _, states in found]), order)

    def _through(self, visit: int, block: int, rows: np.ndarray, x: Array) -> tuple[np.ndarray, Array]:
        """Run rows through a block."""
        given = self._given
        if given is not None and len(rows) < len(self._rows.positions):
            given = self._take(given, rows)
        is_last = visit == len(self._loop.order) - 1 and not self._loop.coda
        x = self._layers(injected(self._model, x, given), rows, self._block(block), self._plane(visit), is_last)
        if self._loop.between == "norm":
            x = self._model.norm_rows(x)
        return rows if len(x) == len(rows) else rows[np.isin(rows, self._rows.read_rows)], x

    def _layers(self, x: Array, rows: np.ndarray, layers: range, plane: int, is_last: bool) -> Array:
        # Only the layer that ends a whole pass drops the rows that are not read.
        is_last = is_last and layers[-1] == self._config.pass_layers[-1]
        return self._rows.go_through(x, self._rows.batch_of(rows), layers, plane, is_last)

    def _block(self, number: int) -> range:
        return self._loop.block(number, self._config.layers)

    def _plane(self, visit: int, layer: int = 0) -> int:
        return self._loop.prelude + visit * self._loop.per_block(self._config.layers) + layer

    # ------------------------------------------------------------------------------------------- K/V and states

    def _fill(self, rows: np.ndarray, states: Array) -> None:
        """Write the K/V of rows that have left for deeper visits.

        Args:
            states: their states when they left
        """
        size, of_route = self._loop.per_block(self._config.layers), self._route[rows]
        for number in np.unique(of_route).tolist():
            at = np.flatnonzero(of_route == number)
            route, made = self._blocks[number], self.visits[rows[at]]
            for block in np.unique(route[route >= 0]).tolist():
                visits = np.flatnonzero(route == block)
                # The visit from which K/V are copied to the row's deeper visits; -1: K/V are computed from the row's
                # state.
                source = np.concatenate(([-1], visits))[np.searchsorted(visits, made)]
                if self._passage.keys == "project":
                    source[:] = -1
                deeper = [(visit, np.flatnonzero(made <= visit)) for visit in visits[visits >= made.min()].tolist()]
                needed = np.flatnonzero(made <= visits[-1])
                for layer in range(size) if deeper else ():
                    keys, values = self._kv_of(rows[at[needed]], states, at[needed], source[needed], block, layer)
                    for visit, some in deeper:
                        own, plane = np.searchsorted(needed, some), self._plane(visit, layer)
                        self._rows.write(plane, rows[at[some]], self._take(keys, own), self._take(values, own))

    def _kv_of(
        self, rows: np.ndarray, states: Array, at: np.ndarray, source: np.ndarray, block: int, layer: int
    ) -> tuple[Array, Array]:
        """Return the keys and values of rows for deeper visits to a block, in one of its layers.

        They are copied from the visits in `source`, or, for -1, computed from the states with the indices `at`.
        """
        parts, order = [], []
        for visit in np.unique(source).tolist():
            some = np.flatnonzero(source == visit)
            order.append(some)
            if visit >= 0:
                parts.append(self._rows.read(self._plane(visit, layer), rows[some]))
            else:
                given = None if self._given is None else self._take(self._given, rows[some])
                entering = injected(self._model, self._take(states, at[some]), given)
                parts.append(self._rows.project(entering, rows[some], self._block(block)[layer]))
        if len(parts) == 1:
            return parts[0]
        back = np.argsort(np.concatenate(order))
        keys, values = (self._take(self._arrays.join(halves), back) for halves in zip(*parts, strict=True))
        return keys, values

    def _read(self) -> Array:
        """Return the hidden states of the rows that are read."""
        reading = self._reading
        if reading is None:
            return self._hidden(self._rows.read_rows)
        hidden = self._hidden(reading.rows)
        for rules, states in self._seen:
            hidden[self._arrays.send(rules)] = read_state(self._model, states)
        return hidden

    def _hidden(self, rows: np.ndarray) -> Array:
        """Return hidden states of rows as read after their last visit, [rows, hidden]."""
        model, coda = self._model, self._loop.coda
        wanted = np.arange(len(self._rows.positions)) if coda else rows
        if not len(wanted) or not self._ended:
            return model.rounded(self._arrays.empty((0, self._config.hidden)))
        ended, x = np.concatenate([some for some, _ in self._ended]), self._arrays.join([x for _, x in self._ended])
        if len(ended) != len(wanted) or (ended != wanted).any():
            place = np.full(len(self._rows.positions), -1)
            place[ended] = np.arange(len(ended))
            x = self._take(x, place[wanted])
        if not coda:
            return read_state(model, x)
        if self._loop.between == "inject":
            x = model.norm_rows(x)
        layers = range(self._config.layers - coda, self._config.layers)
        x = self._layers(x, wanted, layers, len(self._config.planes) - coda, is_last=True)
        if len(x) != len(rows):
            x = self._take(x, rows)
        return model.norm_rows(x)
