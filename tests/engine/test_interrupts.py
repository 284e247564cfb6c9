"""Ctrl-C within a numeric run, wherever it falls: the next call works, and nothing of the run is left."""

from __future__ import annotations

import random
import signal
import sys
import threading
import time
import weakref

import numpy as np
import pytest
from tiny import tiny_checkpoint

from prefold import LLM
from prefold.engine import stream, thread

TEXTS = ["a common start, and one", "a common start, and two", "another", "a common"]


@pytest.mark.parametrize("interrupts", [100, pytest.param(5000, marks=pytest.mark.slow)])
def test_the_call_after_an_interrupt_works(tmp_path, interrupts):
    llm = LLM(str(tiny_checkpoint(tmp_path, "llama")), dtype="float32", device="cpu", max_batch_rows=9)
    expected = llm.embed(TEXTS)
    rng = random.Random(0)
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    hit = tries = 0
    try:
        while hit < interrupts:
            tries += 1
            assert tries < 50 * interrupts, "nothing is interrupted"
            try:
                signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-4, 8e-3))
                llm.embed(TEXTS)
                signal.setitimer(signal.ITIMER_REAL, 0)
            except KeyboardInterrupt:
                hit += 1
            signal.setitimer(signal.ITIMER_REAL, 0)
            if tries % 10 == 0:
                np.testing.assert_allclose(llm.embed(TEXTS), expected, atol=1e-5)
                llm.engine.call(lambda: None)  # what was asked for before is done
                assert not llm.engine.worker.paths and not llm.engine.meter.has_listeners
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    np.testing.assert_allclose(llm.embed(TEXTS), expected, atol=1e-5)
    llm.engine.call(lambda: None)
    assert not llm.engine.worker.paths


FILES = {stream.__file__, thread.__file__, weakref.__file__}


class Interrupt:
    """Raises KeyboardInterrupt before the line of this number that this thread runs in FILES. lines: counts them"""

    def __init__(self, number):
        self.number, self.lines, self._thread = number, 0, threading.current_thread()

    def __call__(self, frame, event, argument):
        if frame.f_code.co_filename not in FILES:
            return None
        if event == "line":
            self.lines += 1
            if self.lines == self.number:
                sys.settrace(None)
                raise KeyboardInterrupt
        return self


def test_an_interrupt_at_any_line_leaves_no_path(tmp_path):
    llm = LLM(str(tiny_checkpoint(tmp_path, "llama")), dtype="float32", device="cpu", max_batch_rows=9)
    expected, number, before = llm.embed(TEXTS), 0, sys.gettrace()
    while True:
        number += 1
        sys.settrace(interrupt := Interrupt(number))
        try:
            llm.embed(TEXTS)
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(before)
        if interrupt.lines < number:
            break
        for _ in range(200):  # a thread that prepares a step may hold the stream for a moment
            llm.engine.call(lambda: None)
            if not llm.engine.worker.paths:
                break
            time.sleep(0.01)
        assert not llm.engine.worker.paths and not llm.engine.meter.has_listeners, f"line {number}"
    assert number > 100
    np.testing.assert_allclose(llm.embed(TEXTS), expected, atol=1e-5)
