"""The part of a worker that takes the rows of a step through a looped model: block by block, by their routes, until
each of them leaves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile

import numpy as np
import torch
from torch import Tensor

from ...engine.schedule.steps import SlotStep
from ...engine.worker import Ticket
from ...errors import InputError, UnsupportedModelError
from ...model import NO_ADAPTERS, RowAdapters
from ...model.device import send
from ...model.layer import Layer
from ...model.ops import choose_ops
from ...worker.local import LocalWorker
from ...worker.parts import WorkerPart
from ...worker.program import Program, program_of
from ...worker.slots import SlotAttend, SlotBatch, slot_plans
from .gates import VisitOutputs, choose, summary
from .model import CODA, PRELUDE, LoopedLM, VisitPass
from .steps import LoopedFacts, Passage, PassResult


def looped_part(model: LoopedLM) -> WorkerPart:
    """Return the part of a worker for a looped model. Raise UnsupportedModelError for a router that steps cannot
    follow, and InputError for a gate or a router that cannot be split over ranks."""
    loop, programs = model.loop, Programs(model)
    routing = loop.router if loop.router is not None and loop.router.kind != "fixed" else None
    if routing is not None and (routing.kind in ("soft", "top") or routing.reads == "row"):
        setting = f"kind is {routing.kind!r}" if routing.reads == "request" else 'reads is "row"'
        works = 'steps follow a router that reads requests and picks a block: give "hard" or "fixed"'
        raise UnsupportedModelError(f"loop.router.{setting}; {works}")
    if model.ranks.size > 1 and model.gate is not None and model.gate.reads == "features":
        message = "the gate reads what the model says after each visit, which the first rank alone knows"
        raise InputError(message, field="tensor_parallel", remedy='use 1, or a gate that reads "state"')
    if model.ranks.size > 1 and routing is not None:
        message = "a router picks blocks for a model in one piece"
        raise InputError(message, field="tensor_parallel", remedy='use 1, or the kind "fixed"')

    def run(worker: LocalWorker, step: SlotStep) -> Ticket:
        rows = SlotPass(worker, model, programs, step)
        hidden, step = rows.run()
        return PassTicket(worker.read_slots(step, hidden), rows.visits, rows.saved, rows.routes)

    facts = LoopedFacts(loop.order, loop.gate, loop.threshold, routing is not None, model.ranks.size == 1)
    return WorkerPart({SlotStep: run}, facts)


@dataclass(frozen=True, slots=True)
class PassTicket:
    """The ticket of a SlotStep of a looped model. reads: the step's read-outs; the other fields are as in
    PassResult."""

    reads: Ticket
    visits: np.ndarray
    saved: int
    routes: Sequence[tuple[int, ...]]

    def result(self) -> PassResult:
        read = self.reads.result()
        return PassResult(read.ids, read.logprobs, read.values, self.visits, self.saved, self.routes)


class Programs:
    """The compiled programs of a looped model's parts, each made when it is first needed."""

    def __init__(self, model: LoopedLM):
        self._model = model
        self._made: dict[tuple[int, int], Program | None] = {}

    def of(self, part: int, first: int) -> Program | None:
        """Return the program of a part; None: its layers run as modules.

        first  the plane of the part's first layer, if the part ends with the model's last plane and leaves only the
               rows that are read; else 0
        """
        program = self._made.get((part, first))
        if (part, first) not in self._made or (program is not None and not program.is_current):
            layers = [(layer, self._model.first[layer]) for layer in self._model.parts[part]]
            program = self._made[part, first] = program_of(self._model, layers, first)
        return program


class ExitRules:
    """The rules by which m rows of a step leave, or are read.

    rows  int64 [m]: the row of each rule
    """

    def __init__(self, model: LoopedLM, rows: np.ndarray, rules: np.ndarray, *, leave: bool):
        """rules: float64 [m, 4], as of `Passage.leave_after`. leave: whether rows leave, and are not only read"""
        self.rows, self._model, self._leave = rows, model, leave
        threshold, self._change, self._fewest, self._most = rules.T
        self._threshold = np.where(threshold < 1, threshold, np.nan).astype(np.float32)
        self._is_gated = ~np.isnan(self._threshold)
        self._is_open = np.ones(len(rows), bool)
        # Of each row the probability of not having left before the next visit, and of having left.
        self._stays = torch.ones(len(rows), device=model.device)
        self._share_left = torch.zeros(len(rows), device=model.device)
        self._before: VisitOutputs | None = None

    @property
    def compares(self) -> bool:
        """Whether states before and after a visit are compared."""
        return bool(np.isfinite(self._change).any())

    @property
    def open(self) -> np.ndarray:
        """The numbers of the rules whose row has not left, or has not been read."""
        return np.flatnonzero(self._is_open)

    def after(self, visits: int, place: np.ndarray, x: Tensor, before: Tensor) -> np.ndarray:
        """Return the numbers of the rules whose row leaves, or is read, after so many visits.

        place      int64 [rows of the step]: where each row's state is in x; -1: the row makes no visit any more
        x, before  the states of rows after and before the visit
        """
        at = place[self.rows]
        some = np.flatnonzero(self._is_open & (at >= 0))
        leaves = self._most[some] <= visits
        decides = ~leaves & (self._fewest[some] <= visits)
        gated = np.flatnonzero(~leaves & self._is_gated[some])
        if gated.size:
            share = self._gated(some[gated], send(at[some[gated]], x.device), x)
            leaves[gated] = decides[gated] & (share >= self._threshold[some[gated]])
            wrong = gated[np.isnan(share)]
            if self._leave and wrong.size:  # the request that reads this state gets an error
                x[send(at[some[wrong]], x.device)] = torch.nan
                leaves[wrong] = True
        changing = np.flatnonzero(decides & ~leaves & np.isfinite(self._change[some]))
        if changing.size:
            places = send(at[some[changing]], x.device)
            was, now = before[places].float(), x[places].float()
            moved = ((now - was).norm(dim=-1) / was.norm(dim=-1).clamp(min=1e-30)).cpu().numpy()
            leaves[changing] = moved <= self._change[some[changing]].astype(np.float32)
        left = some[leaves]
        self._is_open[left] = False
        return left

    def _gated(self, some: np.ndarray, places: Tensor, x: Tensor) -> np.ndarray:
        """Return the probability of having left of some rows, float32, by the gate's sum (see `visits_at_exit`)."""
        numbers = send(some, x.device)
        hidden = self._model.read(x[places], None, choose_ops(self._model.dtype, x.device))
        before = self._before
        if before is not None:
            before = VisitOutputs(before.hidden[numbers], before.likely[numbers])
        logit, outputs = self._model.leaves(hidden, before)
        if outputs is not None:
            if self._before is None:
                rows = len(self.rows)
                self._before = VisitOutputs(
                    outputs.hidden.new_zeros(rows, hidden.shape[1]), outputs.likely.new_zeros(rows)
                )
            self._before.hidden[numbers], self._before.likely[numbers] = outputs.hidden, outputs.likely
        share, stays = torch.sigmoid(logit), self._stays[numbers]
        has_left = self._share_left[numbers] + share * stays
        self._share_left[numbers], self._stays[numbers] = has_left, stays * (1 - share)
        return has_left.cpu().numpy()


class SlotPass:
    """One pass of a step's rows through a looped model, over the slots of the KV store.

    visits  int64 [n]: how many visits each row made
    saved   how many visits rows did not make because they had left
    routes  the blocks that the router chose for each of `Passage.asks`
    """

    def __init__(self, worker: LocalWorker, model: LoopedLM, programs: Programs, step: SlotStep):
        assert worker.store is not None
        passage = step.feature if isinstance(step.feature, Passage) else Passage((model.loop.order,))
        self._model, self._step, self._passage, self._programs = model, step, passage, programs
        self._store, self._device, self._ops = worker.store, model.device, choose_ops(model.dtype, model.device)
        self._batch, self._parts = worker.prepare_slots(step), dict[bytes, SlotBatch]()
        self._angles: dict[int, list[Tensor]] = {}  # by the identity of a batch
        asked, count = len(passage.asks), len(passage.routes)
        self.visits, self.saved = np.zeros(step.num_rows, np.int64), 0
        self.routes: list[tuple[int, ...]] = [()] * asked
        # The block of each visit of each route; -1: the route has ended. Routes that the router chooses come last.
        self._blocks = np.full((count + asked, len(model.loop.order)), -1)
        for number, route in enumerate(passage.routes):
            self._blocks[number, : len(route)] = route
        self._route = np.zeros(step.num_rows, np.int64) if passage.route is None else passage.route.copy()
        for number, (first, stop) in enumerate(passage.asks[:, :2].tolist(), count):
            self._route[first:stop] = number
        self._ended: list[tuple[np.ndarray, Tensor]] = []  # rows that make no visit any more, and their states
        self._unfilled: list[tuple[np.ndarray, Tensor]] = []  # rows in `_ended` without K/V of deeper visits

    def run(self) -> tuple[Tensor, SlotStep]:
        """Return the hidden states of the rows that are read, and the step, whose `reads` count in these."""
        model, step, loop = self._model, self._step, self._model.loop
        rows, leaving, reading = np.arange(step.num_rows), self._leaving(), self._reading()
        at_once = leaving is not None and self._see_each_other()
        x = self._through(model.embed(self._batch.tokens, self._batch.positions), rows, PRELUDE, 0)
        self._given: Tensor | None = None
        if model.inject is not None:
            self._given, x = x, model.noise(self._batch.positions)
        states: Tensor | None = None  # of `reading`
        for visit in range(len(loop.order)):
            self._ask(visit, rows, x)
            blocks = self._blocks[self._route[rows], visit]
            if (blocks < 0).any():
                self._end(rows[blocks < 0], x[send(np.flatnonzero(blocks < 0), self._device)])
                rows, x = self._keep(np.flatnonzero(blocks >= 0), rows, x)
                blocks = blocks[blocks >= 0]
            if not len(rows):
                break
            before = x.clone() if leaving is not None and leaving.compares else x
            self.visits[rows] += 1
            rows, x = self._visit(visit, blocks, rows, x)
            if visit == len(loop.order) - 1:
                break
            place = np.full(step.num_rows, -1)
            place[rows] = np.arange(len(rows))
            if reading is not None and len(read := reading.after(visit + 1, place, x, before)):
                states = x.new_empty(len(reading.rows), x.shape[1]) if states is None else states
                states[send(read, self._device)] = x[send(place[reading.rows[read]], self._device)]
            if leaving is not None and len(left := leaving.after(visit + 1, place, x, before)):
                left = place[leaving.rows[left]]
                self._leave(rows[left], x[send(left, self._device)], at_once)
                rows, x = self._keep(np.delete(np.arange(len(rows)), left), rows, x)
        self._end(rows, x)
        if self._unfilled:
            parts, of_parts = zip(*self._unfilled, strict=True)
            self._fill(np.concatenate(parts), torch.cat(of_parts))
        if reading is None:
            return self._hidden(step.read_rows), step
        hidden = self._hidden(reading.rows)
        if states is not None:
            read = np.delete(np.arange(len(reading.rows)), reading.open)
            at = send(read, self._device)
            hidden[at] = model.read(states[at], None, self._ops)
        places, kept = np.split(np.arange(len(reading.rows)), [len(step.reads)])
        read_outs = tuple(replace(reads, rows=reads.consumers) for reads in step.read_outs)
        return hidden, replace(step, read_rows=reading.rows, reads=places, state_reads=kept, read_outs=read_outs)

    # ------------------------------------------------------------------------------------------- rows and rules

    def _leaving(self) -> ExitRules | None:
        rules = self._passage.leave_after
        if rules is None:
            return None
        rows = np.flatnonzero(~np.isnan(rules[:, :2]).all(1) | np.isfinite(rules[:, 3]))
        return ExitRules(self._model, rows, rules[rows], leave=True) if len(rows) else None

    def _reading(self) -> ExitRules | None:
        if (limits := self._passage.read_after) is None:
            return None
        step = self._step
        rows = step.read_rows[np.concatenate((step.reads, step.state_reads))]
        threshold = np.where(np.isnan(limits[:, 0]), self._model.loop.threshold, limits[:, 0])
        rules = np.column_stack((threshold, np.full(len(rows), np.nan), limits[:, 1:]))
        return ExitRules(self._model, rows, rules, leave=False)

    def _see_each_other(self) -> bool:
        """Return whether any row of the step sees another row of the step."""
        step = self._step
        several = step.run_last - step.run_first > 1
        start, slots = step.run_start[several], np.sort(step.slots)
        stop = start + step.run_count[several]
        return bool((np.searchsorted(slots, start) < np.searchsorted(slots, stop)).any())

    def _keep(self, kept: np.ndarray, rows: np.ndarray, x: Tensor) -> tuple[np.ndarray, Tensor]:
        """Return the rows at these places alone, and their states."""
        return rows[kept], x[send(kept, self._device)]

    def _end(self, rows: np.ndarray, x: Tensor) -> None:
        if len(rows):
            self._ended.append((rows, x))

    def _leave(self, rows: np.ndarray, x: Tensor, at_once: bool) -> None:
        """Let rows leave. at_once: whether rows that go on need the K/V of their deeper visits"""
        self._end(rows, x)
        lengths = (self._blocks[self._route[rows]] >= 0).sum(1)
        self.saved += int((lengths - self.visits[rows]).sum())
        if at_once:
            self._fill(rows, x)
        else:
            self._unfilled.append((rows, x))

    # ------------------------------------------------------------------------------------------- the router

    def _ask(self, visit: int, rows: np.ndarray, x: Tensor) -> None:
        """Ask the router, or once the planner, where prompts go next."""
        model, asks, count = self._model, [], len(self._passage.routes)
        rules = model.loop.router
        for number, (first, stop, _, most) in enumerate(self._passage.asks.tolist()):
            at = int(np.searchsorted(rows, first))
            if visit < most and at < len(rows) and rows[at] == first:
                asks.append((number, at, at + stop - first))
        if not asks or (visit and rules is not None and rules.kind == "planned"):
            return
        assert rules is not None and model.router is not None
        # One request at a time: the sum does not depend on the other requests.
        parts = [x[first:stop] for _, first, stop in asks]
        states = torch.cat([summary(part[-1:], part.float().mean(0, keepdim=True)) for part in parts])
        if rules.kind == "planned":
            assert model.planner is not None
            logits = model.planner(states)
        else:
            logits = model.router(states, visit)[None]
        wrong = (logits[..., :-1].isnan().any(-1) | logits[..., -1].isnan()).any(0).tolist()
        fewest = send(self._passage.asks[[number for number, _, _ in asks], 2], self._device)
        too_early = torch.arange(len(logits), device=self._device)[:, None] + visit < fewest
        logits[..., -1].masked_fill_(too_early, -torch.inf)
        blocks = choose(logits.flatten(0, 1), rules.threshold).view(logits.shape[:2]).T.tolist()
        for (number, first, stop), chosen, is_wrong in zip(asks, blocks, wrong, strict=True):
            if is_wrong:  # the request that reads these states gets an error
                x[first:stop] = torch.nan
                chosen = [model.loop.blocks]
            most = int(self._passage.asks[number, 3])
            route = [*self.routes[number], *takewhile(lambda block: block < model.loop.blocks, chosen)][:most]
            self.routes[number] = tuple(route)
            self._blocks[count + number, : len(route)] = route

    # ------------------------------------------------------------------------------------------- layers

    def _visit(self, visit: int, blocks: np.ndarray, rows: np.ndarray, x: Tensor) -> tuple[np.ndarray, Tensor]:
        """Take each row through its block. Return the rows that are left, and their states: after the last visit of a
        model without a coda these may be the rows that are read alone."""
        model, loop = self._model, self._model.loop
        plane = loop.prelude + visit * loop.per_block(model.config.layers)
        last = visit == len(loop.order) - 1 and not loop.coda
        given = None if self._given is None else self._given[send(rows, self._device)]
        if (blocks == blocks[0]).all():
            x = self._through(x, rows, int(blocks[0]), plane, given, last=last)
            return rows if len(x) == len(rows) else rows[np.isin(rows, self._step.read_rows)], x
        found = []
        for block in np.unique(blocks).tolist():
            at = np.flatnonzero(blocks == block)
            some = send(at, self._device)
            own = self._through(x[some], rows[at], block, plane, None if given is None else given[some], last=last)
            found.append((rows[at] if len(own) == len(at) else rows[at][np.isin(rows[at], self._step.read_rows)], own))
        rows = np.concatenate([some for some, _ in found])
        order = np.argsort(rows)
        return rows[order], torch.cat([x for _, x in found])[send(order, self._device)]

    def _through(
        self, x: Tensor, rows: np.ndarray, part: int, plane: int, given: Tensor | None = None, *, last: bool = False
    ) -> Tensor:
        """Return the states of rows after the layers of a part; may write into x.

        plane  of the part's first layer
        given  what the prelude gave, if it is put in before each visit
        last   whether only the states of rows that are read are needed; then others may be missing
        """
        model, config, layers = self._model, self._model.config, self._model.parts[part]
        if not len(layers):
            return x
        batch, likes = self._batch_of(rows), [model.first[layer] for layer in layers]
        planes = {plane + at: config.planes[like] for at, like in enumerate(likes)}
        last = last and batch.read_rows is not None and config.planes[likes[-1]].window == config.planes[-1].window
        attend = SlotAttend(self._store, batch, planes, config.scale)
        state = VisitPass(
            x, None, {}, attend, batch.read_rows if last else None, batch.adapters, self._ops, plane, given
        )
        if (program := self._programs.of(part, plane if last else 0)) is not None:
            state.program = partial(program.through, batch=batch, store=self._store, first=plane)
        else:
            tables = self._angles.get(id(batch))
            if tables is None:
                tables = self._angles[id(batch)] = model.cos_sin(batch.positions)
            state.cos_sin = {plane + at: tables[like] for at, like in enumerate(likes)}
        if part < 0:
            model.go_through(state, layers)
        else:
            model.visit(state, part)
        return state.stream

    def _batch_of(self, rows: np.ndarray) -> SlotBatch:
        """Return the batch of some rows of the step."""
        step, whole, planes = self._step, self._batch, self._model.config.planes
        if len(rows) == step.num_rows:
            return whole
        if (found := self._parts.get(rows.tobytes())) is not None:
            return found
        at, plans = send(rows, self._device), slot_plans(step, self._store, {plane.window for plane in planes}, rows)
        of_read, read_plans = None, plans
        if len(step.read_rows) < step.num_rows and not (is_read := np.isin(rows, step.read_rows)).all():
            of_read = np.flatnonzero(is_read)
            read_plans = slot_plans(step, self._store, {planes[-1].window}, rows[of_read])
        adapters = whole.adapters
        if adapters is not NO_ADAPTERS:
            adapters = RowAdapters(adapters.adapters, adapters.numbers[rows], of_read)
        part = SlotBatch(
            whole.tokens[at], whole.positions[at], whole.slots[at],
            None if of_read is None else send(of_read, self._device), plans, read_plans, adapters,
        )  # fmt: skip
        self._parts[rows.tobytes()] = part
        return part

    # ------------------------------------------------------------------------------------------- K/V and states

    def _fill(self, rows: np.ndarray, states: Tensor) -> None:
        """Write the K/V that deeper visits see of rows that have left. states: with which they left"""
        size, of_route = self._model.loop.per_block(self._model.config.layers), self._route[rows]
        for number in np.unique(of_route).tolist():
            at = np.flatnonzero(of_route == number)
            route, made = self._blocks[number], self.visits[rows[at]]
            for block in np.unique(route[route >= 0]).tolist():
                visits = np.flatnonzero(route == block)
                # The visit whose K/V is copied to each row's deeper visits; -1: K/V are made of its state.
                source = np.concatenate(([-1], visits))[np.searchsorted(visits, made)]
                if self._passage.keys == "project":
                    source[:] = -1
                deeper = [(visit, np.flatnonzero(made <= visit)) for visit in visits[visits >= made.min()].tolist()]
                needed = np.flatnonzero(made <= visits[-1])
                for layer in range(size) if deeper else ():
                    kv = self._kv_of(rows[at[needed]], states, at[needed], source[needed], block, layer)
                    for visit, some in deeper:
                        own = send(np.searchsorted(needed, some), self._device)
                        plane, slots = self._plane(visit, layer), self._batch.slots[send(rows[at[some]], self._device)]
                        self._store.write(plane, slots, *(part[own] for part in kv))

    def _plane(self, visit: int, layer: int) -> int:
        loop = self._model.loop
        return loop.prelude + visit * loop.per_block(self._model.config.layers) + layer

    def _kv_of(
        self, rows: np.ndarray, states: Tensor, at: np.ndarray, source: np.ndarray, block: int, layer: int
    ) -> tuple[Tensor, Tensor]:
        """Return the keys and values that deeper visits to a block see of rows, in one of its layers: those of the
        visits in `source`, or made of the states at these places."""
        parts, order = [], []
        for visit in np.unique(source).tolist():
            some = np.flatnonzero(source == visit)
            order.append(some)
            if visit >= 0:
                slots = self._batch.slots[send(rows[some], self._device)]
                parts.append(self._store.read(self._plane(visit, layer), slots))
            else:
                parts.append(self._projected(rows[some], states[send(at[some], self._device)], block, layer))
        if len(parts) == 1:
            return parts[0]
        back = send(np.argsort(np.concatenate(order)), self._device)
        k, v = (torch.cat(tensors)[back] for tensors in zip(*parts, strict=True))
        return k, v

    def _projected(self, rows: np.ndarray, states: Tensor, block: int, layer: int) -> tuple[Tensor, Tensor]:
        """Return the keys and values that a layer of a block makes of states with which rows left."""
        model, number = self._model, self._model.parts[block][layer]
        at, adapters = send(rows, self._device), self._batch.adapters
        states = model.injected(states, None if self._given is None else self._given[at])
        if adapters is not NO_ADAPTERS:
            adapters = RowAdapters(adapters.adapters, adapters.numbers[rows], None)
        module, cos_sin = model.layers[number], model.cos_sin(self._batch.positions[at])[model.first[number]]
        assert isinstance(module, Layer)
        return module.keys_values(states.clone(), cos_sin, self._ops, adapters)

    def _hidden(self, rows: np.ndarray) -> Tensor:
        """Return hidden states of rows, [rows, hidden], as they are read after their last visit."""
        model, loop = self._model, self._model.loop
        wanted = np.arange(self._step.num_rows) if loop.coda else rows
        if not len(wanted):
            return model.embedding.new_empty(0, model.config.hidden)
        ended, x = np.concatenate([some for some, _ in self._ended]), torch.cat([x for _, x in self._ended])
        if len(ended) != len(wanted) or (ended != wanted).any():
            place = np.full(self._step.num_rows, -1)
            place[ended] = np.arange(len(ended))
            x = x[send(place[wanted], self._device)]
        if not loop.coda:
            return model.read(x, None, self._ops)
        if model.inject is not None:
            x = model.norm(x, None, self._ops)
        x = self._through(x, wanted, CODA, len(model.config.planes) - loop.coda, last=True)
        if len(x) != len(rows):
            x = x[send(rows, self._device)]
        return model.norm(x, None, self._ops)
