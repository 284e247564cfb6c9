"""Every row once, whatever happens: one table through every way to a fleet, and a fleet whose replicas are killed,
stopped and slow; see fleet.py. What counts is that nothing is lost, doubled or different, not the seconds.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from prefold.worker.noise import gumbel, hash_ids, make_key, make_stream

OPTIONS = {"threads": 1, "dtype": "float32", "device": "cpu"}

DAFT = """
import sys
import daft
model, folder, out, partitions, replicas = sys.argv[1:]
if int(partitions):
    import ray
    ray.init(num_cpus=3, include_dashboard=False, log_to_driver=False)
    daft.set_runner_ray()
import prefold.integrations.daft
from daft.functions import embed_text
df = daft.read_parquet(f"{folder}/*.parquet")
if int(partitions):
    df = df.into_partitions(int(partitions))
more = {"replicas": int(replicas)} if int(partitions) else {}
more |= {"threads": 1, "dtype": "float32", "device": "cpu"}
asked = embed_text(daft.col("text"), provider="prefold", model=model, on_error="ignore", **more)
df.with_column("embedding", asked).write_parquet(out)
"""

RAY_DATA = """
import sys
import ray
from prefold.integrations.ray_data import PrefoldBatches
model, folder, out, *_ = sys.argv[1:]
ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
ray.data.DataContext.get_current().enable_progress_bars = False
ray.data.read_parquet(folder).map_batches(
    PrefoldBatches,
    fn_constructor_kwargs={
        "task": "embed", "column": "text", "model": model, "threads": 1, "dtype": "float32", "device": "cpu"
    },
    compute=ray.data.ActorPoolStrategy(size=2, max_tasks_in_flight_per_actor=4, max_concurrent_calls_per_actor=4),
    batch_size=512,
).write_parquet(out)
"""


def texts(rows: int) -> list[str | None]:
    """Texts that share beginnings; some are null, some far too long."""
    rng = random.Random(0)
    found: list[str | None] = []
    for i in range(rows):
        text = f"the instruction {i % 200} is shared by many: " + "yes no " * rng.randint(0, 4) + str(i)
        found.append(None if i % 97 == 7 else "no " * 3000 if i % 1009 == 5 else text)
    return found


def ways(rows: int, model: str) -> list[dict[str, Any]]:
    """The same table through `prefold run`, Daft and Ray Data."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    given = texts(rows)
    bad = {i for i, text in enumerate(given) if text is None or len(text) > 5000}
    table: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for files in (1, 16):
            (Path(folder) / f"in{files}").mkdir()
            for part in range(files):
                ids = list(range(part, rows, files))
                data = pa.table({"id": ids, "text": pa.array([given[i] for i in ids], pa.string())})
                pq.write_table(data, Path(folder) / f"in{files}" / f"{part}.parquet")

        def run(*fleet: str) -> list[str]:
            return [
                sys.executable, "-m", "prefold", "run", "in16", "--task", "embed", "--prompt", "text", "--id", "id",
                "-m", model, "-o", f"out{len(table)}.parquet", "--threads", "1", "--dtype", "float32", "--quiet",
                *fleet,
            ]  # fmt: skip

        def daft(files: int, partitions: int, replicas: int) -> list[str]:
            return [
                sys.executable,
                "-c",
                DAFT,
                model,
                f"in{files}",
                f"out{len(table)}.parquet",
                str(partitions),
                str(replicas),
            ]

        commands: dict[str, Callable[[], list[str]]] = {
            "prefold run, one process": run,
            "prefold run --ray --replicas 2": lambda: run("--ray", "--replicas", "2"),
            **{f"Daft on Ray, {n} partitions": lambda n=n: daft(16, n, 1 + (n > 1)) for n in (1, 2, 4, 16)},
            **{f"Daft, {n} files": lambda n=n: daft(n, 0, 1) for n in (1, 16)},
            "Ray Data, 2 actors": lambda: [sys.executable, "-c", RAY_DATA, model, "in16", f"out{len(table)}.parquet"],
        }
        alone: dict[int, np.ndarray] = {}

        def note(name: str, found: list[tuple[int, Any]], seconds: float) -> None:
            vectors = {i: np.array(v, np.float32) for i, v in found if v is not None}
            alone.update({} if alone else vectors)
            ids = {i for i, _ in found}
            table.append(
                {
                    "way": name, "rows": rows, "missing": rows - len(ids), "twice": len(found) - len(ids),
                    "errors": len(found) - len(vectors),
                    "other errors than expected": len(bad ^ (ids - vectors.keys())),
                    "largest difference": max(float(np.abs(v - alone[i]).max()) for i, v in vectors.items()),
                    "seconds": seconds,
                }
            )  # fmt: skip
            print(table[-1], flush=True)

        for name, command in commands.items():
            started = time.perf_counter()
            done = subprocess.run(command(), cwd=folder, capture_output=True, check=False)
            seconds = time.perf_counter() - started
            assert done.returncode in (0, 3), done.stderr.decode()[-3000:]
            out = pq.read_table(Path(folder) / f"out{len(table)}.parquet").select(["id", "embedding"])
            note(name, list(zip(out["id"].to_pylist(), out["embedding"].to_pylist(), strict=True)), seconds)
        killed = [part.replace(".parquet", ".jsonl") for part in run("--ray", "--replicas", "2")]
        started, out = time.perf_counter(), Path(folder) / f"out{len(table)}.jsonl"
        with subprocess.Popen(killed, cwd=folder, stderr=subprocess.DEVNULL, start_new_session=True) as job:
            while job.poll() is None and not (out.exists() and out.read_bytes().count(b"\n") > rows // 3):
                time.sleep(0.05)
            job.kill()
        before = out.read_bytes().count(b"\n")
        done = subprocess.run(killed, cwd=folder, capture_output=True, check=False)
        assert done.returncode == 3, done.stderr.decode()[-3000:]
        lines = [json.loads(line) for line in out.read_text().splitlines()]
        name = f"prefold run --ray, its driver killed after {before:,} lines, and resumed"
        note(name, [(line["id"], line.get("embedding")) for line in lines], time.perf_counter() - started)
    return table


def at_a_close_draw(llm: Any, prompt: np.ndarray, tokens: tuple[int, ...], others: tuple[int, ...], seed: int) -> bool:
    """Returns whether two drawn texts part where the two tokens were within 1e-4 of each other: a rounding error."""
    pairs = enumerate(zip(tokens, others, strict=False))
    place = next((i for i, (one, other) in pairs if one != other), None)
    if place is None:
        return False
    before, both = [*prompt.tolist(), *tokens[:place]], [tokens[place], others[place]]
    scores = [one.logprob for one in llm.score([before] * 2, [[token] for token in both])]
    key = np.array([make_key(make_stream(seed, 0), place)], np.uint64)
    noise = gumbel(hash_ids(np.array(both), key))
    return bool(abs(scores[0] + noise[0] - scores[1] - noise[1]) < 1e-4)


def replicas(rows: int, model: str, seeds: int) -> list[dict[str, Any]]:
    """A fleet on Ray of two replicas that generates, with faults; answers are those of one engine."""
    import psutil
    import ray

    from prefold import LLM
    from prefold.cluster.fleet import Fleet
    from prefold.cluster.ray_replicas import RayReplicas
    from prefold.stream import Spool
    from prefold.types import Readout, Request, Sampling

    rng = np.random.default_rng(0)
    heads = rng.integers(10, 300, (20, 24))
    prompts = [np.concatenate((heads[i % 20], rng.integers(10, 300, 1 + i % 9))).astype(np.int32) for i in range(rows)]

    def spooled() -> Spool:
        spool = Spool()
        for i, tokens in enumerate(prompts):
            sampling = Sampling(max_tokens=24, temperature=1.0, seed=i, ignore_eos=True)
            spool.add(Request(tokens, sampling=sampling), str(i).encode())
        return spool

    def actors() -> list[psutil.Process]:
        own = psutil.Process().children(recursive=True)
        return [child for child in own if "ray::_Actor" in " ".join(child.cmdline() or [child.name()])]

    llm = LLM(model, **OPTIONS)
    with spooled() as spool:
        windows = spool.windows(max_tokens=1 << 20)
        expected = {tag: one[0].tokens for tag, one in llm.engine.run(windows, Readout("tokens"))}
    ray.init(num_cpus=3, include_dashboard=False, log_to_driver=False, logging_level="ERROR")

    def kill(rng: random.Random) -> None:
        rng.choice(actors()).kill()

    @contextmanager
    def stopped_most_of_the_time(process: psutil.Process) -> Iterator[None]:
        over = threading.Event()

        def beat() -> None:
            while not over.wait(0.02):
                process.suspend()
                over.wait(0.08)
                process.resume()

        thread = threading.Thread(target=beat)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    table: list[dict[str, Any]] = []

    class Late(RayReplicas):
        """The second one comes when much is done."""

        def _host(self, name: str) -> Any:
            if name != self.names[0]:
                time.sleep(8.0)
            return super()._host(name)

    def run(name: str, fault: Any, seed: int, patience: float = 300.0, kind: type[RayReplicas] = RayReplicas) -> None:
        rng = random.Random(seed)
        at = rng.randrange(rows // 20, rows // 2)
        notes: list[str] = []
        found: dict[bytes, Any] = {}
        twice = 0
        members = kind(model, OPTIONS | {"max_running": 16}, count=2)
        started = time.perf_counter()
        slow = None
        with closing(Fleet(members, patience=patience, notify=notes.append)) as fleet, spooled() as spool:
            for tag, answer in fleet.run(spool.windows(max_tokens=1 << 20), Readout("tokens")):
                twice += tag in found
                found[tag] = answer
                if len(found) == at:
                    slow = fault(rng)
                    if slow is not None:
                        slow.__enter__()
            if slow is not None:
                slow.__exit__(None, None, None)
            losses = fleet.losses
        errors = [one for one in found.values() if isinstance(one, Exception)]
        texts = {tag: one[0].tokens for tag, one in found.items() if not isinstance(one, Exception)}
        other = [(int(tag), expected[tag], made) for tag, made in texts.items() if made != expected[tag]]
        rounded = sum(at_a_close_draw(llm, prompts[i], one, made, i) for i, one, made in other)
        table.append(
            {
                "fault": name, "seed": seed, "rows": rows, "missing": rows - len(found), "twice": twice,
                "errors": len(errors), "other answers": len(other) - rounded, "of a close draw": rounded,
                "losses": losses,
                "seconds": time.perf_counter() - started,
            }
        )  # fmt: skip
        print(table[-1], notes, flush=True)

    def hang(rng: random.Random) -> None:
        os.kill(rng.choice(actors()).pid, signal.SIGSTOP)

    for seed in range(seeds):
        run("killed", kill, seed)
    run("stands still, patience 5 s", hang, 0, patience=5.0)
    run("five times slower", lambda rng: stopped_most_of_the_time(rng.choice(actors())), 0)
    run("8 s late", lambda rng: None, 0, kind=Late)
    llm.close()
    ray.shutdown()
    return table


def faults(rows: int, model: str | None, seeds: int, parts: str = "ways,replicas") -> list[dict[str, Any]]:
    """The tables of the case. model: a folder with a model and a tokenizer; None: the tiny one of the tests."""
    if model is None:
        with tempfile.TemporaryDirectory() as folder:
            sys.path.append(str(Path(__file__).resolve().parents[1] / "tests" / "support"))
            from tiny import tiny_checkpoint

            return faults(rows, str(tiny_checkpoint(Path(folder), "llama")), seeds, parts)
    found: list[dict[str, Any]] = []
    if "ways" in parts.split(","):
        found += ways(rows, model)
    if "replicas" in parts.split(","):
        found += replicas(min(rows, 2000), model, seeds)
    return found
