"""How many rows a step may have, where interactive requests and batches share an engine; in simulated time."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from books import check_books

from prefold.engine import EngineOptions, GenerateOptions, ModelEngine
from prefold.engine import pace as module
from prefold.engine.cache import CacheOptions, SlotPool
from prefold.engine.pace import LATELY_SECONDS, LEAST_ROWS, StepPolicy, StepTimes
from prefold.engine.schedule.admission import NO_LIMITS
from prefold.engine.schedule.fair import FairAdmission
from prefold.engine.schedule.scheduler import Scheduler
from prefold.engine.worker import Facts, Worker
from prefold.spec.requests import Owner, Share


class Machine:
    """A machine whose steps take 10 ms and 0.5 ms a row, and the pace of what is asked of it.

    limits  of the next step
    steps  (when it began, rows of interactive requests, rows of batches, seconds) of each step
    """

    def __init__(self, **options):
        self.now = 100.0
        policy = FairAdmission(batch_share=options.get("batch_share", 0.02))
        self.scheduler = Scheduler(SlotPool(100_000), max_batch_rows=2048, max_running=64)
        self.scheduler.admit_by(policy)
        self.pace, self.limits = StepPolicy(policy, clock=lambda: self.now, **options), NO_LIMITS
        self.steps, self.first, self.ended, self._number = [], {}, [], 0

    def seconds_of(self, rows):
        return 0.01 + 0.0005 * rows

    def ask(self, rows, limit, *, batch=False, tenant="a"):
        self._number += 1
        tokens = np.array([self._number // 256, self._number % 256, *range(rows - 2)], np.int32)
        owner = Owner("b" if batch else tenant, batch)
        self.scheduler.submit(self._number, tokens, limit=limit, namespace=(self._number,), owner=owner)
        return self._number

    def step(self):
        assert not self.scheduler.admit(self.limits)
        self.limits = self.pace.settle(self.scheduler, 2048)
        if len(self.steps) % 16 == 0:  # it takes long: there are many slots
            check_books(self.scheduler)
        step = self.scheduler.plan(self.limits)
        if step is None:
            self.now += 0.001
            return
        batch = {n for one in self.scheduler.running if one.owner.is_batch for n in (*one.leaf.path(), one.tail)}
        rows = sum(count for node, count in step.computed_rows if node in batch)
        seconds = self.seconds_of(step.num_rows)
        self.steps.append((self.now, step.num_rows - rows, rows, seconds))
        self.now += seconds
        self.pace.times.note_step(step.num_rows, seconds)
        self.scheduler.begin(step)
        for sequence in step.consumers:
            self.first.setdefault(sequence.key, self.now)
        count = len(step.consumers)
        self.ended += [one.key for one in self.scheduler.commit(step, [1] * count, [False] * count)]

    def run(self, seconds):
        end = self.now + seconds
        while self.now < end:
            self.step()


def test_times():
    times = StepTimes()
    assert times.seconds_of(5) is None and times.rows_within(0.1) == LEAST_ROWS
    for rows in (1, 16, 100, 1000):
        times.note_step(rows, 0.01 + 0.0005 * rows)
    assert times.seconds_of(1) == pytest.approx(0.0105)
    assert times.rows_within(0.06) == 100
    assert 100 < times.rows_within(0.2) <= 380
    assert times.rows_within(0.001) == 1
    times.note_step(100, 60.0)  # a single one
    assert times.seconds_of(1) == pytest.approx(0.0105, rel=0.01)
    assert times.rows_within(0.06) == pytest.approx(100, rel=0.01)
    for _ in range(50):
        times.note_step(100, 0.12)  # the machine has become slower
    assert times.seconds_of(100) == pytest.approx(0.12, rel=0.05)
    assert times.rows_within(0.06) < 60
    times.note_step(100, 1000.0)
    assert times.seconds_of(100) < 0.2  # once is an accident


@pytest.mark.parametrize("within", [0.05, 0.25])
@pytest.mark.parametrize("before", [[1], [1, 2, 3, 4], [8, 9], [4, 40]], ids=str)
def test_times_of_large_steps_are_soon_known_though_small_ones_came_before(before, within):
    def seconds(rows):  # as of a machine that reads the weights meanwhile, however few the rows
        return max(0.010, 0.004 + 0.0004 * rows)

    times, took = StepTimes(), []
    for rows in 50 * before:
        times.note_step(rows, seconds(rows))
    for _ in range(12):
        rows = times.rows_within(within)
        took.append(seconds(rows))
        times.note_step(rows, took[-1])
    assert max(took) < 1.3 * within
    assert min(took[4:]) > 0.9 * within


def test_a_first_step_that_takes_long_is_soon_forgotten():
    times = StepTimes()
    for rows, seconds in ((16, 0.3), (16, 0.01), (64, 0.025)):
        times.note_step(rows, seconds)
    assert 90 < times.rows_within(0.05) < 200


def test_a_batch_alone_has_long_steps_but_not_without_end():
    machine = Machine()
    for _ in range(200):
        machine.ask(100, 20, batch=True)
    while len(machine.ended) < 200:
        machine.step()
    seconds = [took for _, _, _, took in machine.steps]
    assert max(seconds) < 1.3 * module.ALONE_SECONDS
    rows = sum(rows for _, _, rows, _ in machine.steps)
    steps = 20_000 / 2048 + 20  # were they as large as they may be
    assert machine.now - 100 < 1.1 * (steps * 0.01 + 0.0005 * rows)


def test_a_prompt_waits_for_no_more_than_a_short_step():
    machine = Machine()
    for _ in range(500):
        machine.ask(50, 200, batch=True)
    machine.run(3)
    waits = []
    for _ in range(40):
        asked, key = machine.now, machine.ask(60, 3)
        while key not in machine.ended:
            machine.step()
        waits.append(machine.first[key] - asked)
        machine.run(0.3)
    alone = 0.01 + 0.0005 * 60
    assert sorted(waits)[len(waits) // 2] < alone + 0.001  # asked between two steps, it waits for none
    assert all(batch == 0 for _, live, batch, _ in machine.steps if live > 1)
    lately = [took for at, live, batch, took in machine.steps if at > 104 and not live]
    assert max(lately) < 1.3 * module.SHORT_STEPS * 0.0105


class Uneven(Machine):
    """A machine that reads the weights in the time of 13 rows, and whose steps take up to a half longer: in small steps
    it does not show what a row costs."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.draw = np.random.default_rng(0)

    def seconds_of(self, rows):
        return max(0.0105, 0.0065 + 0.0003 * rows) * (1 + 0.5 * self.draw.random())


def test_who_asks_again_at_once_is_slowed_by_few_rows_and_the_batch_goes_on():
    machine = Uneven()
    for _ in range(500):
        machine.ask(60, 32, batch=True)
    machine.run(3)
    began = machine.now
    for _ in range(400):
        key = machine.ask(4, 1)
        while key not in machine.ended:
            machine.step()
        machine.now += 0.0012
    rows = [batch for at, live, batch, _ in machine.steps if live and at > began + 1]
    assert max(rows) <= LEAST_ROWS and sum(rows) > 100


def test_who_generates_is_slowed_by_no_more_than_a_quarter_and_the_batch_goes_on():
    machine = Machine()
    for _ in range(500):
        machine.ask(50, 200, batch=True)
    for _ in range(8):
        machine.ask(50, 1000)
    machine.run(8)
    mixed = [(batch, took) for at, live, batch, took in machine.steps if live == 8]
    assert max(took for _, took in mixed) < 1.3 * (0.01 + 0.0005 * 8)
    assert np.mean([batch for batch, _ in mixed]) > 4


def test_a_batch_gets_its_share_beside_prompts_that_never_end():
    machine = Machine(batch_share=0.1)
    for _ in range(500):
        machine.ask(50, 50, batch=True)
    for _ in range(1000):
        machine.ask(400, 1)
    machine.run(30)
    batch = sum(0.01 + 0.0005 * rows for _, _, rows, _ in machine.steps if rows)
    assert 0.05 < batch / 30 < 0.2
    assert any(rows > 0 for at, _, rows, _ in machine.steps if at < 110)


def test_step_seconds_bound_what_prompts_add():
    machine = Machine(step_seconds=0.05)
    for _ in range(30):
        machine.ask(1000, 20)
    machine.run(20)
    took = [seconds for _, _, _, seconds in machine.steps[5:]]
    assert max(took) < 1.3 * 0.05 and np.mean(took) > 0.6 * 0.05


def answered(machine, key):
    """Returns how long it takes until a request is answered."""
    asked = machine.now
    while key not in machine.ended:
        machine.step()
    return machine.now - asked


@pytest.mark.parametrize("weight", [1.0, 0.25])
def test_long_prompts_of_one_tenant_do_not_hold_the_short_answers_of_another(weight):
    """A prompt of 10,000 rows takes 5 s. The first answer may wait for the step that was begun before it was asked."""
    machine = Machine()
    machine.scheduler.waiting.share_of = lambda tenant: Share(weight if tenant == "c" else 1.0)
    for _ in range(6):
        machine.ask(10_000, 1)
    machine.step()
    assert answered(machine, machine.ask(60, 2, tenant="c")) < 6 * module.SHARED_SECONDS
    for _ in range(4):
        machine.run(0.3)
        assert answered(machine, machine.ask(60, 2, tenant="c")) < 6 * module.SHARED_SECONDS
    while len(machine.ended) < 11:
        machine.step()
    assert machine.now - 100 < 1.3 * 6 * 5.05  # the prompts are not held either


def test_prompts_of_several_tenants_are_computed_beside_each_other():
    machine = Machine()
    keys = [machine.ask(3000, 1, tenant=tenant) for tenant in "acd"]
    machine.run(2.5)
    assert not machine.ended
    machine.run(3.0)
    assert sorted(machine.ended) == keys


def test_steps_of_a_single_tenant_are_not_bounded():
    machine = Machine()
    for _ in range(3):
        machine.ask(10_000, 1)
    machine.run(3)
    assert [live for _, live, _, _ in machine.steps[:3]] == [2048] * 3


def test_steps_are_long_again_when_nobody_came_for_a_while():
    machine = Machine()
    for _ in range(500):
        machine.ask(50, 200, batch=True)
    machine.ask(60, 3)
    machine.run(1.5)
    assert machine.steps[-1][3] < 0.03
    machine.run(LATELY_SECONDS)
    assert machine.steps[-1][3] > 0.03
    assert machine.pace.pause == 0
    machine.pace.note_live()
    assert machine.pace.pause == pytest.approx(module.PAUSE_SECONDS)


def test_a_batch_has_all_sequences_while_nobody_else_came_lately():
    machine = Machine()
    machine.ask(50, 200, batch=True)
    machine.run(1.0)
    assert machine.limits.lends
    machine.ask(60, 3)
    machine.run(0.5)
    assert not machine.limits.lends
    machine.run(LATELY_SECONDS + 0.5)
    assert machine.limits.lends


class Still(Worker):
    """A worker of which nothing is asked."""

    facts = Facts(max_positions=60)

    def start(self, message, prepared=None):
        return SimpleNamespace(result=lambda: None)


def test_a_generator_tells_the_cache_what_tenants_may_keep():
    generation = GenerateOptions(kv_memory=100, cache=CacheOptions())
    generator = ModelEngine(Still(), EngineOptions(generation=generation)).generator
    generator.set_step_policy(StepPolicy(FairAdmission(lambda tenant: Share(2.0, max_kept_rows=7))))
    account = generator.scheduler.cache.accounts.of("a")
    assert (account.weight, account.max_rows) == (2.0, 7)
