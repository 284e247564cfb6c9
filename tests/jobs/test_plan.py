"""Plans and comparisons, against obvious versions."""

from __future__ import annotations

import json

import numpy as np
import pytest
from fake_jobs import FakeEngine, FakeGenerateTask, FakeTask, digest
from shapes import shape_of

from prefold.errors import InputError
from prefold.jobs.plan import cost_of, kv_row_bytes, place, plan_job, shared_most
from prefold.jobs.record import Record
from prefold.jobs.source import open_source
from prefold.jobs.tables import TableAdapter
from prefold.jobs.verify import NEIGHBOURS, Run, compare, sample_items
from prefold.model import ModelConfig, Plane, RopeConfig
from prefold.spec.requests import Readout, Request, Result
from prefold.tasks.base import Work
from prefold.tasks.classify import softmax
from prefold.tasks.questions import read_questions
from prefold.tasks.results import Decision, Embedding
from prefold.tasks.results import Score as ScoreAnswer
from prefold.tasks.rows import Columns
from prefold.tasks.run import calibrated, run_items
from prefold.text.fields import Template


def adapter():
    return TableAdapter("embed", Columns(prompt=Template("text", "--prompt")))


def test_a_plan_counts_what_a_job_would_do(tmp_path):
    rng = np.random.default_rng(0)
    texts = [f"{'shared ' * int(rng.integers(1, 4))}{rng.integers(30)} {i % 2}" for i in range(200)]
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps({"text": t}) + "\n" for t in [*texts, None, "x" * 500]))
    plan = plan_job(open_source(str(path)), adapter(), {"embed": FakeTask()}, window=400, max_batch_rows=100)
    prefixes = {text[:n] for text in texts for n in range(1, len(text) + 1)}
    assert (plan.records, plan.errors, plan.requests) == (202, 2, 200)
    assert plan.tokens == sum(map(len, texts)) and plan.rows == len(prefixes)
    assert plan.longest == max(map(len, texts)) and plan.rows < plan.rows_mlp < plan.tokens
    assert len(plan.first_errors) == 2 and "null" in plan.first_errors[0]
    best = shared_most(plan.shape, lambda ids: bytes(ids.tolist()).decode())
    assert best[0].text == "shared " and best[0].prompts == 200 and best[0].saved == 7 * 199


def test_a_plan_of_generation_counts_its_outputs(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps({"text": "a" * n}) + "\n" for n in (1, 2, 100)))
    table = TableAdapter("generate", Columns(prompt=Template("text", "--prompt")))
    for sampling, tokens in (({"max_tokens": 950, "n": 2}, 2 * (950 + 950 + 900)), ({}, 999 + 998 + 900)):
        plan = plan_job(open_source(str(path)), table, {"generate": FakeGenerateTask(**sampling)})
        assert (plan.outputs, plan.output_tokens) == (3 * sampling.get("n", 1), tokens)
        assert (plan.tokens, plan.rows) == (103, 100)
    assert kv_row_bytes(config()) == 2 * 2 * 2 * 6 * 4


def config(planes=(None, None)):
    return ModelConfig(
        vocab_size=10, hidden=8, layers=len(planes), heads=4, kv_heads=2, head_dim=6, intermediate=20, norm_eps=1e-5,
        rope=RopeConfig(), max_positions=100, planes=tuple(Plane(w) for w in planes),
    )  # fmt: skip


def test_costs_are_counted_row_by_row():
    prompts = [[1, 2, 3, 4], [1, 2, 3, 5, 6], [7]]
    full, off = cost_of(shape_of(prompts), config((None, 3)))
    linear = 2 * 2 * (8 * 24 + 2 * 8 * 12 + 24 * 8 + 3 * 8 * 20)
    rows = {tuple(p[:n]) for p in prompts for n in range(1, len(p) + 1)}
    assert full.linear == linear * len(rows) and off.linear == linear * 10
    keys = [len(r) + min(len(r), 3) for r in rows]
    assert full.attention == 4 * 4 * 6 * sum(keys)
    assert off.attention == 4 * 4 * 6 * sum(n + min(n, 3) for p in prompts for n in range(1, len(p) + 1))


def test_samples_are_neighbours_from_all_over():
    rows = [Record(i, {"text": str(i)}) for i in range(1, 1001)]
    rows[500] = Record(501, {"text": None})
    items, bad = sample_items(rows, adapter(), 64)
    numbers = [int(item["text"]) for _, item in items]
    assert len(numbers) == 64 - bad and bad <= 1 and numbers == sorted(numbers)
    blocks = {(n - 1) // 8 for n in numbers}
    assert len(blocks) <= 9 and max(blocks) - min(blocks) > 60
    assert sample_items(rows, adapter(), 64) == (items, bad)
    assert sample_items(rows, adapter(), 64, seed=1)[0] != items
    everything, bad = sample_items(rows, adapter(), 5000)
    assert len(everything) == 999 and bad == 1


def test_items_run_in_memory():
    task = FakeTask("rerank", "logits")
    items = [{"query": "q", "documents": ["b", "a"]}, {"query": "x" * 300, "document": "y"}, {"text": "t"}]
    results = run_items(FakeEngine(), task, items)
    assert results[0].scores.tolist() == [digest(b"qb"), digest(b"qa")]
    assert isinstance(results[1], InputError) and results[2].score == digest(b"t")
    assert calibrated(FakeEngine(), task) is task


def test_differences_are_what_was_changed():
    task = FakeTask("rerank", "logits")
    items = [{"query": "q", "documents": ["a", "b", "c"]}, {"query": "r", "document": "a"}]
    items += [{"query": "r", "document": "b"}, {"query": "x" * 300, "document": "y"}]
    works = task.prepare(items)

    def results(*values):
        scores = iter(values)
        return [
            None if isinstance(w, InputError) else [Result(np.array([next(scores)], np.float32)) for _ in w.requests]
            for w in works
        ]

    one, two = results(0.1, 0.2, 0.3, 0.5, 0.6), results(0.1, 0.3, 0.25, 0.5, 0.75)
    same = compare(items, works, Run(task, one), Run(task, one))
    assert same.values == same.results == same.first == same.orders == same.pairs == 0
    found = compare(items, works, Run(task, one), Run(task, two))
    assert found.values == pytest.approx(0.15) and found.results == pytest.approx(0.15)
    assert (found.groups, found.first, found.orders, found.pairs, found.all_pairs) == (2, 1, 1, 1, 4)
    assert found.all_tokens == 0 and found.items == 3


class Embed(FakeTask):
    def finish(self, note, results):
        return Embedding(results[0].values)


def vectors(values):
    """The items, the works, and the results of a task of embeddings, [number, dim]."""
    items = [{"text": str(i)} for i in range(len(values))]
    return items, Embed().prepare(items), [[Result(vector)] for vector in np.asarray(values, np.float32)]


@pytest.mark.parametrize("place", [0, 1, 2])
def test_what_is_no_number_is_a_difference_that_no_tolerance_allows(place):
    items, works, one = vectors(np.ones((3, 4)))
    broken = np.ones((3, 4))
    broken[place, 2] = np.nan
    two = vectors(broken)[2]
    for a, b in ((one, two), (two, one), (two, two)):
        found = compare(items, works, Run(Embed(), a), Run(Embed(), b))
        assert np.isnan(found.values) and np.isnan(found.results)


def test_each_of_many_embeddings_is_ranked_against_some_others_only():
    values = np.random.default_rng(0).normal(size=(1000, 3))
    items, works, one = vectors(values)
    two = vectors(values + 1e-3)[2]
    found = compare(items, works, Run(Embed(), one), Run(Embed(), two))
    assert found.groups == 1000 and 0 < found.pairs < found.all_pairs <= 1000 * NEIGHBOURS * (NEIGHBOURS - 1) // 2


def test_a_long_ranking_is_compared_piece_by_piece():
    task = FakeTask("rerank", "logits")
    items = [{"query": "q", "document": f"{i}"} for i in range(600)]
    one, two = ([[Result(np.array([x], np.float32))] for x in values] for values in (range(600), range(600, 0, -1)))
    found = compare(items, task.prepare(items), Run(task, one), Run(task, two))
    assert found.groups == found.first == found.orders == 1 and found.pairs == found.all_pairs == 600 * 599 // 2


def test_greedy_flags_that_change_are_counted():
    class Score(FakeTask):
        def finish(self, note, results):
            logprobs = np.concatenate([result.values for result in results])
            return ScoreAnswer(float(logprobs.sum()), logprobs, True)

    work = [Work([Request(np.array([1], np.int32))])]
    a = [[Result(np.array([-1, -2], np.float32), np.array([True, False]))]]
    b = [[Result(np.array([-1, -2], np.float32), np.array([True, True]))]]
    found = compare([{"prompt": "p", "continuation": "c"}], work, Run(Score(), a), Run(Score(), b))
    assert (found.greedy, found.all_tokens, found.groups) == (1, 2, 0)


def test_labels_of_one_token_are_one_prompt_of_which_off_computes_what_is_said(tmp_path):
    """What `plan` and the summary call the tokens, and the rows of sharing "off" and "mlp", is what is computed."""
    from tiny import tiny_checkpoint

    from prefold import LLM
    from prefold.jobs.output import OutputOptions, open_output
    from prefold.jobs.report.progress import Progress
    from prefold.jobs.run import Job, run_job

    folder = str(tiny_checkpoint(tmp_path, "llama"))
    llms = {mode: LLM(folder, dtype="float32", max_batch_rows=64, sharing=mode) for mode in ("full", "mlp", "off")}
    source = tmp_path / "in.jsonl"
    source.write_text("".join(json.dumps({"text": f"the text {i % 5} {i}"}) + "\n" for i in range(12)))
    labels = {"one": ["a", "b", "c"], "more": ["a", "b", "long label", "longer label"]}
    adapter = TableAdapter("classify", Columns(prompt=Template("text", "--prompt")))
    for name, written in labels.items():
        task = llms["full"].task("classify", labels=written)
        counted = plan_job(open_source(str(source)), adapter, {"classify": task}, max_batch_rows=64)
        if name == "one":
            assert counted.requests == 12
        rows = {"off": counted.tokens, "mlp": counted.rows_mlp, "full": counted.rows}
        for sharing, want in rows.items():
            llm = llms[sharing]
            output = open_output(OutputOptions(tmp_path / f"{name}-{sharing}.jsonl"), {})
            job = Job(open_source(str(source)), adapter, {"classify": task}, lambda llm=llm: llm, output, collect=True)
            summary = run_job(job, Progress())
            assert summary.stats.rows_computed == want, sharing
            assert (summary.stats.tokens, summary.stats.requests) == (counted.tokens, counted.requests)
            assert summary.shape.num_tokens == counted.tokens and summary.errors == 0


def test_segments_of_a_plan_cover_it_evenly(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps({"text": f"head {i % 7} {i:03}"}) + "\n" for i in range(300)))
    plan = plan_job(open_source(str(path)), adapter(), {"embed": FakeTask()}, window=400)
    full, _ = cost_of(plan.shape, config())
    for replicas in (1, 4, 500):
        segments = place(plan, config(), replicas)
        assert len(segments) == replicas and sum(one.prompts for one in segments) == 300
        assert sum(one.rows - one.again for one in segments) == plan.rows
        assert max(one.again for one in segments) < plan.longest
    assert place(plan, config(), 1)[0].flops == pytest.approx(full.total)
    costs = [one.flops for one in place(plan, config(), 4)]
    assert max(costs) < 1.05 * np.mean(costs)


def test_outputs_weigh_where_a_plan_is_cut(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps({"text": f"{i:02}" * 10}) + "\n" for i in range(8)))
    table = TableAdapter("generate", Columns(prompt=Template("text", "--prompt")))
    plan = plan_job(open_source(str(path)), table, {"generate": FakeGenerateTask(max_tokens=100)})
    assert plan.limits == [100] * 8
    plan.limits[0] = 800
    assert [one.prompts for one in place(plan, config(), 2)] == [1, 7]


def test_the_most_likely_token_is_no_value_that_moves():
    class Decide:
        readout = Readout("logits", (7, 9), sums=True)

        def finish(self, note, results):
            (question,), _ = read_questions({"q": {"type": "noul"}})
            return Decision({"q": question.answer(softmax(results[0].values[:2]), None, None)})

    work = Work([Request(np.array([1]))])
    one, other = (Run(Decide(), [[Result(np.array(values))]]) for values in ([1.0, 2, 3, 50], [1.5, 1.25, 3, 9000]))
    found = compare([{"state": "s"}], [work], one, other)
    assert (found.values, found.groups, found.first) == (0.75, 1, 1)
