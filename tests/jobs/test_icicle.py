"""The icicle: every prompt and every row is somewhere in it, however much is folded."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from shapes import shape_of

from prefold.jobs.report.icicle import StreamShape, icicle, to_data, trie_picture, walk
from prefold.jobs.report.page import Report, StepLog, write_report

PROMPTS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=7), min_size=1, max_size=60)


def unique_prefixes(prompts):
    return {tuple(p[:n]) for p in prompts for n in range(1, len(p) + 1)}


@settings(max_examples=150)
@given(prompts=PROMPTS, pieces=st.integers(1, 4), max_nodes=st.sampled_from([1, 2, 3, 5, 10, 1000]))
def test_every_prompt_and_every_row_is_counted_once(prompts, pieces, max_nodes):
    shape = shape_of(prompts, pieces)
    assert shape.num_rows == len(unique_prefixes(prompts)) and shape.num_requests == len(prompts)
    root = icicle(shape, max_nodes=max_nodes)
    nodes = [node for node, _ in walk(root)]
    assert len(nodes) <= max_nodes and root.prompts == len(prompts) and root.rows == shape.num_rows
    for node in nodes:
        below = sum(kid.rows for kid in node.kids) + (node.rest.rows if node.rest else 0)
        assert node.rows == node.length + below
        through = node.ending + sum(kid.prompts for kid in node.kids) + (node.rest.prompts if node.rest else 0)
        assert node.prompts == through
        assert all(kid.start == node.start + node.length and kid.length >= 1 for kid in node.kids)
        assert [kid.first for kid in node.kids] == sorted(kid.first for kid in node.kids)


@settings(max_examples=80)
@given(prompts=PROMPTS)
def test_an_icicle_with_room_for_all_is_the_trie(prompts):
    shape = shape_of(prompts)
    ordered = sorted(prompts)
    found = {}
    for node, _ in walk(icicle(shape)):
        assert node.rest is None
        for depth in range(node.start + 1, node.start + node.length + 1):
            found[tuple(ordered[node.first][:depth])] = node.prompts
    want = {prefix: sum(tuple(p[: len(prefix)]) == prefix for p in prompts) for prefix in unique_prefixes(prompts)}
    assert found == want


def test_samples_give_the_text_of_large_nodes():
    rng = np.random.default_rng(0)
    prompts = [[1, 2, 3, int(rng.integers(4)), *rng.integers(100, size=5).tolist()] for _ in range(3000)]
    shape = shape_of(prompts, 7, samples=64)
    assert len(shape._samples) <= 64
    seen = 0
    for node, _ in walk(icicle(shape, max_nodes=40)):
        if node.length and node.prompts > 200:
            ordered = sorted(prompts)
            assert shape.tokens_of(node).tolist() == ordered[node.first][node.start : node.start + node.length]
            seen += 1
    assert seen >= 5


def test_a_chain_of_prefixes_is_no_deep_recursion():
    prompts = [list(range(n)) for n in range(1, 1500)]
    data = to_data(shape_of(prompts), icicle(shape_of(prompts), max_nodes=5000), None)
    assert len(data) == 1500 and data[1499][0] == 1498


def test_the_picture_shows_depth_and_sharing():
    lines = trie_picture(shape_of([[1, 2, 3, 4], [1, 2, 5, 6], [1, 2, 5, 7]]), width=12, height=4)
    assert lines[0] == lines[1] == "█" * 12
    assert lines[2][:4] == "░" * 4 and lines[2][4:] == "▐███████"
    assert "▏" in lines[3] and len(lines) == 4
    assert trie_picture(StreamShape()) == []
    wide = trie_picture(shape_of([[i, 1] for i in range(1000)]), width=50)
    assert [len(line) for line in wide] == [50, 50]


def test_steps_are_added_up_when_there_are_many():
    log = StepLog(limit=100)
    for i in range(1000):
        log.add(float(i), 0.5, 10, i % 3)
    bins = log.bins()
    assert len(log) <= 100 and bins[:, 2].sum() == 1000 and bins[:, 3].sum() == 10_000
    assert bins[:, 1].sum() == pytest.approx(500) and (np.diff(bins[:, 0]) > 0).all() and bins[0, 0] == 0


def report(**options):
    shape = shape_of([[1, 2, 3], [1, 2, 4], [5]])
    steps = StepLog()
    steps.add(1.0, 0.25, 5, 0, 3)
    cards, settings = [("records", "3")], [("a", "b")]
    return Report("t </script><b>", "now", 7, 5, 0.5, cards, settings, shape=shape, steps=steps, **options)


def test_the_page_is_self_contained_and_holds_its_data(tmp_path):
    path = tmp_path / "page.html"
    write_report(report(decode=lambda ids: f"</script>{ids.tolist()}"), path)
    page = path.read_text()
    assert not re.search(r"""(src|href)\s*=\s*["']?\w+:|@import|url\(|https?://(?!www\.w3\.org/2000/svg)""", page)
    assert page.count("</script>") == 2
    data = json.loads(re.search(r'application/json">(.*?)</script>', page, re.S)[1])
    assert data["title"] == "t </script><b>" and data["totals"] == {"tokens": 7, "rows": 5}
    assert [n[1:5] for n in data["nodes"]] == [[0, 0, 3, 5], [0, 2, 2, 4], [2, 1, 1, 1], [2, 1, 1, 1], [0, 1, 1, 1]]
    assert data["nodes"][1][7] == "</script>[1, 2]" and data["steps"] == [[1.0, 0.25, 1.0, 5.0, 0.0, 3.0]]
    assert data["generation"] == []
    assert "2 others" in data["barText"] and "0.2 s more" in data["barText"]
    assert [p.name for p in tmp_path.iterdir()] == ["page.html"]


def test_200_000_rows_make_a_small_page(tmp_path):
    rng = np.random.default_rng(0)
    prompts = [[1, 2, int(rng.integers(50)), *rng.integers(1000, size=20).tolist()] for _ in range(10_000)]
    path = tmp_path / "page.html"
    page = Report("t", "now", 1, 1, 0, [], [], shape=shape_of(prompts), decode=lambda ids: "x" * 500)
    assert page.shape.num_rows > 180_000
    write_report(page, path)
    assert path.stat().st_size < 900_000
