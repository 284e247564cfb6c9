"""Time decode steps, with and without reading shared K/V once, and a whole job: the section `decode` of gpu.py."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from gpu_common import Bench
from gpu_rerank import time_shares
from harness import median, timed

from prefold.engine import EngineOptions, GenerateOptions, ModelEngine
from prefold.engine.schedule.steps import SlotStep
from prefold.spec.requests import Request, Sampling
from prefold.worker.torch.attention.gpu import place_slots
from prefold.worker.torch.attention.store import KVStore
from prefold.worker.torch.device import runs_triton
from prefold.worker.torch.slots import SlotAttend, make_store, prepare_slots
from prefold.worker.torch.worker import TorchWorker

BATCHES, SHARED, OWN = (64, 256), 2048, 256


def run(bench: Bench) -> None:
    names = bench.models if bench.smoke else [m for m in bench.models if m in ("qwen3-0.6b", "qwen3-8b")]
    for name in names:
        bench.attempt(f"decode steps {name}", lambda name=name: steps(bench, name))
        bench.attempt(f"decode job {name}", lambda name=name: job(bench, name))


def decode_step(batch: int, shared: int, own: int, *, grouped: bool) -> SlotStep:
    """Return a decode step. Each sequence sees `shared` common rows and `own` rows of its own; the last one is new.

    With `grouped` the common rows are one run of K/V. Otherwise each sequence has its own run with the same slots.
    """
    query = np.arange(batch)
    tails = 1 + shared + query * own
    one = np.ones(batch, np.int64)
    if grouped:
        head = [np.array([x]) for x in (1, shared, 0, 0, batch)]
    else:
        head = [one, one * shared, one * 0, query, query + 1]
    tail = [tails, one * (own - 1), one * shared, query, query + 1]
    new = [tails + own - 1, one, one * (shared + own - 1), query, query + 1]
    start, count, position, first, last = (np.concatenate(x) for x in zip(head, tail, new, strict=True))
    order = np.lexsort((position, first))
    runs = dict(zip(("run_start", "run_count", "run_position", "run_first", "run_last"),
                    (x[order] for x in (start, count, position, first, last)), strict=True))  # fmt: skip
    return SlotStep(
        tokens=(query % 500).astype(np.int32),
        positions=np.full(batch, shared + own - 1, np.int32),
        slots=tails + own - 1,
        **runs,
        read_rows=query,
    )


def fill(store: KVStore) -> None:
    """Fill a store with random K/V. The store of the compiled kernels stays zero."""
    for keys_and_values in getattr(store, "_memory", ()):
        for plane in keys_and_values:
            if plane.is_floating_point():
                plane.normal_()


def steps(bench: Bench, name: str) -> None:
    model = bench.model(name)
    config = model.config
    batches, shared, own = ((4,), 24, 8) if bench.smoke else (BATCHES, SHARED, OWN)
    slot_bytes = 2 * config.kv_size * len(config.planes) * bench.dtype.itemsize
    weights = config.linear_flops // 2 * bench.dtype.itemsize + config.hidden * config.vocab_size * bench.dtype.itemsize
    rows = []
    for batch in batches:
        store = make_store(model, 1 + shared + batch * own)
        fill(store)
        times, planned = {}, {}
        for grouped in (True, False):
            step = decode_step(batch, shared, own, grouped=grouped)

            def prepared(step=step, store=store):
                slots = prepare_slots(step, store, config, {})
                if runs_triton(store.device):  # otherwise the first plane does it
                    for plan in slots.plans.values():
                        place_slots(plan, store.heads[0], store.device)
                return slots

            slots = prepared()

            @torch.inference_mode()
            def once(slots=slots, store=store) -> None:
                attend = SlotAttend(store, slots, config.planes, config.scale)
                hidden = model(slots.tokens, slots.positions, attend, slots.read_rows)
                model.logits(hidden).argmax(-1)

            times[grouped] = median(bench.seconds(once, 5 * bench.repeats, warm=2))
            planned[grouped] = timed(prepared, 1)[0]
        moved = weights + slot_bytes * (shared + batch * own)
        floor = moved / bench.limits()["bandwidth"]
        rows.append(
            [
                batch,
                f"{1e3 * times[True]:.2f}",
                f"{1e3 * times[False]:.2f}",
                f"{times[False] / times[True]:.2f}",
                f"{1e3 * floor:.2f}",
                f"{floor / times[True]:.0%}",
                f"{1e3 * planned[True]:.2f}",
            ]
        )
        print("  ", *rows[-1], flush=True)
        del store, slots, once
        bench.free()
    headers = [
        "batch",
        "grouped ms",
        "not grouped ms",
        "gain",
        "bytes floor ms",
        "of floor",
        "planned ms",
    ]
    bench.show("decode", headers, rows, model=name, shared=shared, own=own)


GREEDY = Sampling()


@dataclass(frozen=True)
class Mode:
    """The options of a job."""

    name: str
    sharing: str = "full"
    ahead: bool = True  # whether a step is planned while the step before it runs
    sampling: Sampling = GREEDY
    part: float = 1.0  # share of the requests to run, below 1 in a slow mode


DRAWN = Sampling(temperature=0.8, top_p=0.95, seed=1)
MODES = (
    Mode("full"),
    Mode("full, one step at a time", ahead=False),
    Mode("full, drawn", sampling=DRAWN),
    Mode("off", sharing="off", part=0.25),
)


def job(bench: Bench, name: str) -> None:
    """Time jobs of requests with one long common prefix, from arrival to the last token, greedy and sampled."""
    model = bench.model(name)
    count, shared, own, new = (6, 24, 4, 4) if bench.smoke else (512, 2048, 32, 128)
    rng = np.random.default_rng(0)
    prefix = rng.integers(0, 500, shared)
    prompts = [np.concatenate((prefix, rng.integers(0, 500, own))).astype(np.int32) for _ in range(count)]
    rows = []
    for mode in MODES:
        asked = prompts[: max(2, int(count * mode.part))]
        options = GenerateOptions(kv_memory=(1 << 24) if bench.smoke else None, max_running=256)
        most = 64 if bench.smoke else 4096
        worker = TorchWorker(model, depth=None if mode.ahead else 1)
        engine = ModelEngine(worker, EngineOptions(sharing=mode.sharing, max_batch_rows=most, generation=options))
        sampling = replace(mode.sampling, max_tokens=new, ignore_eos=True)

        def once(engine=engine, asked=asked, sampling=sampling) -> None:
            for prompt in asked:
                request = Request(prompt, sampling=sampling)
                engine.generator.add(request, None, lambda answer: None)
            while engine.generator.step():
                pass

        found = bench.seconds(once, 1)
        shares = bench.attempt(f"decode profile {mode.name}", lambda once=once: time_shares(bench, once)) or {}
        rate = len(asked) * new / median(found)
        parts = (f"{shares.get(kind, 0):.0%}" for kind in ("attention", "linears", "other", "busy"))
        rows.append([mode.name, len(asked), f"{rate:.0f}", f"{median(found):.2f}", *parts])
        print("  ", *rows[-1], flush=True)
        del engine, once
        bench.free()
    headers = ["mode", "requests", "tokens/s", "s", "attention", "linears", "other", "GPU busy"]
    bench.show("decode_job", headers, rows, model=name, shared=shared, own=own, new=new)
