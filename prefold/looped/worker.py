"""Rows that go through a looped model a visit at a time: a store of their K/V and states, and steps over it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from ..attention import KVStore
from ..device import send
from ..errors import InputError, UnsupportedModelError
from ..model import NO_ADAPTERS, Adapter, RowAdapters
from ..model.decoder_layer import Layer
from ..model.ops import choose_ops
from ..schedule.steps import NOT_FINITE, NOTHING, Reads, SlotStep
from ..worker.local import LocalWorker
from ..worker.program import Program, program_of
from ..worker.protocol import DONE, Ticket, WorkerPart
from ..worker.readouts import SlotTicket
from ..worker.rows import heads_of
from ..worker.slots import SlotAttend, SlotBatch, slot_plans
from .config import LoopedConfig
from .gates import VisitOutputs, choose, summary
from .model import LoopedLM, VisitPass
from .steps import (
    DECIDES,
    LEAVES,
    PRELUDE,
    LoopedFacts,
    MakeVisitStore,
    Routing,
    VisitOptions,
    VisitResult,
    VisitRounds,
    VisitStep,
)


def looped_part(model: LoopedLM) -> WorkerPart:
    """Returns the part of a worker that takes rows through a looped model a visit at a time."""
    store: VisitStore | None = None

    def make_store(worker: LocalWorker, message: MakeVisitStore) -> Ticket:
        nonlocal store
        store = VisitStore(model, message.slots, worker.adapters)
        return DONE

    def run(worker: LocalWorker, step: VisitStep) -> Ticket:
        assert store is not None
        return store.run(step)

    visits = visit_options(model)
    slot_bytes = 1 if visits is None else visit_slot_bytes(model)
    facts = LoopedFacts(_blocks_alike(model.config), model.loop.gate, visits, slot_bytes)
    return WorkerPart({MakeVisitStore: make_store, VisitStep: run}, facts)


def _blocks_alike(config: LoopedConfig) -> bool:
    """Returns whether any block of a model may come at any visit: a plane of K/V is that of a visit, so the blocks'
    layers must have the same windows and rotary settings."""
    size = config.loop.per_block(config.layers)
    first = config.loop.prelude
    planes = config.planes[first : first + len(config.loop.order) * size]
    return all(plane == planes[number % size] for number, plane in enumerate(planes))


def visit_options(model: LoopedLM) -> VisitOptions | None:
    """Returns how rows go through a model a visit at a time; None where they cannot, for it is split over ranks. Raises
    UnsupportedModelError for a router that steps cannot follow."""
    loop = model.loop
    routing = loop.router
    if routing is not None and routing.kind != "fixed" and (routing.kind in ("soft", "top") or routing.reads == "row"):
        setting = f"kind is {routing.kind!r}" if routing.reads == "request" else 'reads is "row"'
        works = 'steps follow a router that reads requests and picks a block: give "hard" or "fixed"'
        raise UnsupportedModelError(f"loop.router.{setting}; {works}")
    routed = routing is not None and routing.kind != "fixed"
    if model.ranks.size > 1 and model.gate is not None and model.gate.reads == "features":
        message = "the gate reads what the model says after each visit, which the first rank alone knows"
        raise InputError(message, field="tensor_parallel", remedy='use 1, or a gate that reads "state"')
    if model.ranks.size > 1:
        if routed:
            message = "a router picks blocks for a model in one piece"
            raise InputError(message, field="tensor_parallel", remedy='use 1, or the kind "fixed"')
        return None
    return VisitOptions(loop.order, loop.blocks, loop.has_prelude, loop.coda > 0, routed, threshold=loop.threshold)


def visit_slot_bytes(model: LoopedLM) -> int:
    """Returns the bytes of a slot: a row's K/V of one block, its state, and the numbers that its gate reads."""
    kv = KVStore.bytes_per_slot(_most_layers(model), heads_of(model), model.device)
    return kv + model.config.hidden * model.dtype.itemsize + 12


def _most_layers(model: LoopedLM) -> int:
    return max(map(len, model.parts.values()))


class VisitStore:
    """A VisitStore holds the K/V and states of rows after their visits, and runs steps that read and write them.

    states  [slots, hidden]: the residual stream after the visit
    odds    float32 [slots, 2]: the probability of not having left before the next visit, and that of having left
    likely  int32 [slots]: the likeliest token after the visit, where the gate reads it
    """

    def __init__(self, model: LoopedLM, slots: int, adapters: Mapping[str, Adapter] | None = None):
        self.model, self.adapters = model, dict(adapters or {})
        device = model.device
        self.kv = KVStore(_most_layers(model), heads_of(model), slots, device)
        shape = (slots, model.config.hidden)
        if device.type == "cpu":  # a page takes memory when it is first written
            memory = torch.from_numpy(np.zeros((slots, shape[1] * model.dtype.itemsize), np.uint8))
            self.states = memory.view(model.dtype)
        else:
            self.states = torch.zeros(shape, dtype=model.dtype, device=device)
        self.odds = torch.zeros(slots, 2, device=device)
        self.likely = torch.zeros(slots, dtype=torch.int32, device=device)
        self._programs: dict[int, Program | None] = {}  # by block
        self._reads_features = model.gate is not None and model.gate.reads == "features"

    def run(self, step: VisitStep) -> VisitTicket:
        """Runs a step, and returns the ticket of its result."""
        if len(step.project_slots):
            self._project(step)
        if (rounds := step.rounds) is not None:
            has_left, last, num_visits = self._run_rounds(step, rounds)
            ends, slots = has_left | rounds.ends[last], step.slots[last[step.read_rows]]
        else:
            has_left = self._compute(step) if step.num_rows else np.zeros(0, bool)
            ends, slots, num_visits = has_left, step.read_slots, NOTHING
        taken_slots = step.read_rows < 0
        if step.num_rows:
            taken_slots |= ends[np.maximum(step.read_rows, 0)]
        was_read = taken_slots[step.reads]
        reads = self._read(step, slots[taken_slots], taken_slots, was_read) if was_read.any() else None
        blocks = [self._route(routing) for routing in step.routings] or [NOTHING.reshape(0, 1)]
        ids = np.full(len(was_read), -1, np.int64)
        result = VisitResult(
            ids, was_read=was_read, has_left=has_left, blocks=np.concatenate(blocks), num_visits=num_visits
        )
        return VisitTicket(result, reads)

    def _run_rounds(self, step: VisitStep, rounds: VisitRounds) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Takes rows through several visits one after another, each as long as it has not left. Returns of each row
        whether it left, the query of the last visit that it made, and how many it made."""
        num_rows = int(rounds.offsets[1])
        has_left, num_visits, last = np.zeros(num_rows, bool), np.zeros(num_rows, np.int64), np.arange(num_rows)
        cos_sin = self.model.cos_sin(send(step.positions[:num_rows], self.model.device))
        goes = np.zeros(step.num_rows, bool)  # which queries did not leave
        for number, block in enumerate(rounds.blocks.tolist()):
            first, stop = rounds.offsets[number : number + 2].tolist()
            going = None
            if number and not (goes_on := goes[rounds.before[first:stop]]).all():
                going = np.flatnonzero(goes_on)
            if (stop - first if going is None else going.size) < rounds.least[number]:
                break
            part = step.part(block, first, stop, slice(*rounds.runs[number : number + 2].tolist()), going)
            queries = np.arange(first, stop) if going is None else first + going
            rows = rounds.row[queries]
            angles = cos_sin
            if len(rows) < num_rows:
                at = send(rows, self.model.device)
                tables = {id(plane): plane.index_select(0, at) for plane in {id(p): p for p in cos_sin}.values()}
                angles = [tables[id(plane)] for plane in cos_sin]
            leaves = self._compute(part, angles)
            goes[queries] = ~leaves
            has_left[rows], last[rows] = leaves, queries
            num_visits[rows] += 1
        return has_left, last, num_visits

    # ------------------------------------------------------------------------------------------------- rows

    def _compute(self, step: VisitStep, cos_sin: list[Tensor] | None = None) -> np.ndarray:
        """Takes the rows of a step through its block, and returns which of them left, bool [n]. cos_sin: of the rows'
        positions, where it is known."""
        model, device = self.model, self.model.device
        arrays = (step.tokens, step.positions, step.slots, step.source)
        tokens, positions, slots, source = (send(array, device) for array in arrays)
        states = self._states(step, source, tokens, positions)
        part = model.parts[step.block]
        first = [model.first[layer] for layer in part]  # the plane that says each layer's window and angles
        tables = model.cos_sin(positions) if cos_sin is None else cos_sin
        planes = [model.config.planes[plane] for plane in first]
        plans, adapters = slot_plans(step, self.kv, {plane.window for plane in planes}), self._adapted(step.adapters)
        batch = SlotBatch(tokens, positions, slots, None, plans, plans, adapters)
        attend = SlotAttend(self.kv, batch, planes, model.config.scale)
        angles, ops = [tables[plane] for plane in first], choose_ops(model.dtype, device)
        rows = VisitPass(states, None, angles, attend, None, adapters, ops)
        if (program := self._program_of(step.block)) is not None:
            rows.program = partial(program.through, batch=batch, store=self.kv)
        if step.block < 0:
            if step.block == PRELUDE:
                self.odds[slots] = self.odds.new_tensor((1.0, 0.0))
            elif model.inject is not None:
                rows.x = model.normed(rows)
            model.go_through(rows, part)
            self.states[slots] = rows.stream
            return step.leaves == LEAVES
        if model.inject is not None:
            rows.prelude = self.states[send(step.preludes, device)]
        decides = step.leaves == DECIDES
        changing = np.flatnonzero(decides & np.isfinite(step.criteria[:, 1]))
        before = states.clone() if changing.size else states
        model.visit(rows, step.block)
        self.states[slots] = new_states = rows.stream
        leaves = step.leaves == LEAVES
        gated = np.flatnonzero(np.isfinite(step.criteria[:, 0]))
        if gated.size:
            at = send(gated, device)
            leaves[gated] |= decides[gated] & self._gated(gated, step, source[at], slots[at], new_states[at])
        if changing.size:
            at = send(changing, device)
            was, now = before[at].float(), new_states[at].float()
            moved = ((now - was).norm(dim=-1) / was.norm(dim=-1).clamp(min=1e-30)).cpu().numpy()
            leaves[changing] |= moved <= step.criteria[changing, 1].astype(np.float32)
        return leaves

    def _program_of(self, block: int) -> Program | None:
        """Returns the program of a block's layers, or None."""
        program = self._programs.get(block)
        if block not in self._programs or (program is not None and not program.is_current):
            layers = [(layer, self.model.first[layer]) for layer in self.model.parts[block]]
            program = self._programs[block] = program_of(self.model, layers)
        return program

    def _adapted(self, numbers: np.ndarray | None) -> RowAdapters:
        return NO_ADAPTERS if numbers is None else RowAdapters(list(self.adapters.values()), numbers, None)

    def _states(self, step: VisitStep, source: Tensor, tokens: Tensor, positions: Tensor) -> Tensor:
        """Returns the states with which rows come to the step's block."""
        first = step.source == 0
        if self.model.inject is not None and step.block >= 0:
            first = step.source == step.preludes  # from the prelude
        if not first.any():
            return self.states[source]
        begins = step.block >= 0 and self.model.inject is not None
        at = send(np.flatnonzero(first), source.device)
        fresh = self.model.noise(positions[at]) if begins else self.model.embed(tokens[at], positions[at])
        return fresh if first.all() else self.states[source].index_copy_(0, at, fresh)

    def _gated(self, gated: np.ndarray, step: VisitStep, source: Tensor, slots: Tensor, states: Tensor) -> np.ndarray:
        """Returns which rows have left by the gate's sum, bool. A row whose gate gives no number leaves with a state
        of NaN, so that the request that reads it gets an error."""
        # A row comes from the prelude, or from nowhere, and so has made no visit to a block.
        is_first = (step.source == step.preludes)[gated]
        hidden, before, first = self._hidden(states), None, send(is_first, slots.device) > 0
        if self._reads_features and not is_first.all():
            before = VisitOutputs(self._hidden(self.states[source]), self.likely[source].long())
        logit, outputs = self.model.leaves(hidden, before, first if is_first.any() else None)
        if outputs is not None:
            self.likely[slots] = outputs.likely.to(torch.int32)
        share = torch.sigmoid(logit)
        stays, leaves = self.odds[source].T
        stays, leaves = stays.masked_fill(first, 1.0), leaves.masked_fill(first, 0.0)
        now = leaves + share * stays
        self.odds[slots] = torch.stack((stays * (1 - share), now), -1)
        share_left = now.cpu().numpy()
        wrong = np.flatnonzero(np.isnan(share_left))
        if wrong.size:
            self.states[slots[send(wrong, slots.device)]] = torch.nan
        return ~(share_left < step.criteria[gated, 0].astype(np.float32))

    def _project(self, step: VisitStep) -> None:
        """Makes K/V of the step's block of the states of rows that have left."""
        device = self.model.device
        slots, sources, positions, preludes = (
            send(array, device)
            for array in (step.project_slots, step.project_sources, step.project_positions, step.project_preludes)
        )
        adapters, model = self._adapted(step.project_adapters), self.model
        states = model.injected(self.states[sources], None if model.inject is None else self.states[preludes])
        ops, planes = choose_ops(model.dtype, device), model.cos_sin(positions)
        for number, layer in enumerate(model.parts[step.block]):
            module = model.layers[layer]
            assert isinstance(module, Layer)
            k, v = module.keys_values(states.clone(), planes[model.first[layer]], ops, adapters)
            self.kv.write(number, slots, k, v)

    # ------------------------------------------------------------------------------------------ reads and routes

    def _hidden(self, states: Tensor) -> Tensor:
        """Returns hidden states as they are read, of rows after the coda, or after any visit where there is none."""
        model, ops = self.model, choose_ops(self.model.dtype, self.model.device)
        if self.model.loop.coda:
            return model.norm(states.clone(), None, ops)[1]
        return model.read(states.clone(), None, ops)

    def _read(self, step: VisitStep, slots: np.ndarray, taken_slots: np.ndarray, was_read: np.ndarray) -> SlotTicket:
        """Returns the ticket of those reads that are made, of the states in `slots`."""
        hidden = self._hidden(self.states[send(slots, self.model.device)])
        reads = (np.cumsum(taken_slots) - 1)[step.reads[was_read]]
        order, drawing, read_outs = np.cumsum(was_read) - 1, step.drawing, []
        if drawing is not None:
            drawing = drawing.pick(np.flatnonzero(was_read[drawing.reads]))
            drawing = replace(drawing, reads=order[drawing.reads]) if len(drawing.reads) else None
        for part in step.read_outs:
            is_made = was_read[part.consumers]
            targets = part.targets[is_made] if len(part.targets) else part.targets
            consumers = order[part.consumers[is_made]]
            read_outs.append(Reads(part.readout, reads[consumers], targets, None, consumers))
        return SlotTicket(self.model, hidden, SlotStep(*(NOTHING,) * 9, reads, drawing, tuple(read_outs)))

    def _route(self, routing: Routing) -> np.ndarray:
        """Returns the blocks that the router chooses for each request of a Routing, int64 [n, visits]."""
        model, summaries, rules = self.model, [], self.model.loop.router
        assert model.router is not None and rules is not None
        for first, stop in zip(routing.offsets[:-1].tolist(), routing.offsets[1:].tolist(), strict=True):
            if len(routing.tokens):
                tokens = send(routing.tokens[first:stop], model.device)
                states = model.embed(tokens, torch.arange(stop - first, device=model.device))
            else:
                states = self.states[send(routing.slots[first:stop], model.device)]
            # One request at a time: the sum does not depend on the other requests.
            summaries.append(summary(states[-1:], states.float().mean(0, keepdim=True)))
        if rules.kind == "planned":
            assert model.planner is not None
            logits = torch.cat([model.planner(states) for states in summaries], 1)
        else:
            logits = torch.cat([model.router(states, routing.step) for states in summaries])[None]
        wrong = logits[..., :-1].isnan().any(-1) | logits[..., -1].isnan()
        number = torch.arange(len(logits), device=logits.device)[:, None] + routing.step
        too_early = number < send(routing.fewest, logits.device)
        logits[..., -1].masked_fill_(too_early, -torch.inf)
        blocks = choose(logits.flatten(0, 1), rules.threshold).view(wrong.shape)
        return torch.where(wrong, NOT_FINITE, blocks).T.cpu().numpy()


@dataclass(frozen=True, slots=True)
class VisitTicket:
    """A VisitTicket is the ticket of a VisitStep, of whose result only the reads of logits are still on their way.

    ready  the result without its reads, with an id for each read
    reads  the ticket of the reads; None: there are none
    """

    ready: VisitResult
    reads: SlotTicket | None

    def result(self) -> VisitResult:
        if self.reads is None:
            return self.ready
        assert self.ready.was_read is not None
        result, at = self.reads.result(), np.flatnonzero(self.ready.was_read)
        self.ready.ids[at] = result.ids
        logprobs = {int(at[read]): values for read, values in result.logprobs.items()}
        return replace(self.ready, logprobs=logprobs, values=result.values)
