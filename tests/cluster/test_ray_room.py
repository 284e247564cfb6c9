"""How many replicas a Ray cluster has room for: each lies on one of its nodes."""

from __future__ import annotations

import ctypes
import os
import signal
import threading

import pytest

pytest.importorskip("ray")

from prefold.cluster import ray_replicas
from prefold.cluster.ray_replicas import RayReplicas
from prefold.errors import JobError


@pytest.fixture
def room(monkeypatch):
    """What is asked of Ray for a replica, how many there shall be, and what is said."""

    def found(nodes, count=None, **options):
        monkeypatch.setattr(ray_replicas, "_nodes", lambda: nodes)
        replicas, notes = RayReplicas.__new__(RayReplicas), []
        replicas._options = options
        needs = replicas._needs(count)
        return needs["GPU"] or needs["CPU"], replicas._check_room(count, needs, notes.append), notes

    return found


@pytest.fixture
def init_by(monkeypatch):
    """Lets a function stand for `ray.init`."""
    return lambda function: monkeypatch.setattr(ray_replicas.ray, "init", function)


TWO = [{"CPU": 16.0}, {"CPU": 16.0, "memory": 1e9}]


@pytest.mark.parametrize(
    "count, options, each, replicas",
    [
        (None, {}, 16, 2),
        (1, {}, 16, 1),
        (2, {}, 16, 2),
        (3, {}, 8, 3),
        (4, {"tensor_parallel": 2}, 8, 4),
        (None, {"threads": 12}, 12, 2),
        (None, {"threads": 4}, 4, 8),
    ],
)
def test_threads_are_those_of_a_node(room, count, options, each, replicas):
    assert room(TWO, count, device="cpu", **options) == (each, replicas, [])


def test_gpus_of_two_nodes_are_not_those_of_one(room):
    nodes = [{"CPU": 8.0, "GPU": 4.0}] * 2
    assert room(nodes, 2, tensor_parallel=4) == (4, 2, [])
    each, count, (note,) = room(nodes, None, tensor_parallel=8)
    assert (each, count) == (8, 1) and "has 1" not in note
    assert "8 CPU, 4 GPU; 8 CPU, 4 GPU on its nodes: 0 start now, the first when a node has enough resources" in note
    assert "the job needs 1 replicas with 1 CPU and 8 GPU each" in note
    with pytest.raises(JobError, match="needs 1 CPU and 8 GPU, and the machine has 8 CPU, 4 GPU"):
        room(nodes[:1], None, tensor_parallel=8)


def test_more_replicas_than_there_is_room_for(room):
    _, count, (note,) = room(TWO, 40, device="cpu")
    assert count == 40 and "40 replicas with 1 CPU each" in note and "32 start now" in note


@pytest.mark.parametrize(
    "address, wanted",
    [(None, "Ray does not start on this machine: The"), ("ray:1", "there is no Ray cluster at ray:1: The")],
)
def test_a_ray_that_does_not_start_is_an_error_that_says_so(monkeypatch, init_by, address, wanted):
    def init(**options):
        raise Exception("The current node timed out during startup.\n\nThis could happen because of the load.")

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    init_by(init)
    with pytest.raises(JobError, match=f"^{wanted} current node timed out during startup. This could happen"):
        RayReplicas("model", {}, address=address)


def test_a_ray_that_never_answers_is_not_waited_for(monkeypatch, init_by):
    go_on, threads = threading.Event(), []

    def init(**options):
        threads.append(threading.current_thread())
        go_on.wait()
        raise Exception("it is too late")

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray_replicas, "_START_SECONDS", 0.05)
    init_by(init)
    with pytest.raises(JobError, match=r"^Ray does not start on this machine: it has not answered for"):
        RayReplicas("model", {})
    assert threads[0] is not threading.main_thread()
    go_on.set()
    threads[0].join(60)
    assert not threads[0].is_alive()


def test_sigterm_reaches_the_handler_of_before(init_by):
    """As Ray does, what begins it sets a handler in C, of which Python does not know."""
    signals, ignored = [], ctypes.c_void_p(1)
    init_by(lambda **_: ctypes.CDLL(None).signal(signal.SIGTERM.value, ignored))
    before = signal.signal(signal.SIGTERM, lambda number, frame: signals.append(number))
    try:
        ray_replicas._connect(None).set()
        os.kill(os.getpid(), signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert signals == [signal.SIGTERM]
