"""The Python face of generation: generate, chat, stream, and the same from an event loop."""

from __future__ import annotations

import asyncio
import json

import pytest
from adapters import merged, write_adapter
from books import check_books
from generating import reference_tokens, slowed, until_idle
from tiny import reference, tiny_checkpoint

from prefold import LLM
from prefold.engine.cache import CacheOptions
from prefold.errors import InputError
from prefold.spec.requests import Namespace
from prefold.tasks.run import run_works
from prefold.wire.completions import chat_logprobs


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    folder = tiny_checkpoint(tmp_path_factory.mktemp("face"), "llama")
    made = LLM(str(folder), dtype="float32", kv_memory=1 << 22, cache=CacheOptions(min_overlap=0))
    made.folder = folder
    return made


def test_one_and_many(llm):
    ids = llm.tokenizer.encode("yes no the").tolist()
    expected = reference_tokens(reference(llm.folder), [ids], 8)[0]
    one = llm.generate("yes no the", max_tokens=8, ignore_eos=True)
    assert list(one.tokens) == expected
    assert one.text == llm.tokenizer.decode(expected)
    assert one.finish_reason == "length"
    many = llm.generate(["yes no the", ids, "no"], max_tokens=8, ignore_eos=True)
    assert [m.tokens for m in many[:2]] == [one.tokens] * 2
    samples = llm.generate(["yes", "no"], max_tokens=4, n=3, temperature=1.0, seed=1, ignore_eos=True)
    assert [len(s) for s in samples] == [3, 3]
    again = llm.generate("yes", max_tokens=4, n=3, temperature=1.0, seed=1, ignore_eos=True)
    assert [s.tokens for s in again] == [s.tokens for s in samples[0]]
    assert llm.generate([]) == []


def test_prompts_of_a_list_with_one_seed_draw_numbers_of_their_own(llm):
    options = {"max_tokens": 6, "temperature": 1.0, "seed": 2**64 - 1, "ignore_eos": True}
    made = [one.tokens for one in llm.generate(["yes"] * 6, **options)]
    assert len(set(made)) == 6
    assert [one.tokens for one in llm.generate(["yes"] * 6, **options)] == made
    # One prompt alone is the first of a list, in each way to ask for it.
    assert llm.generate("yes", **options).tokens == made[0]
    assert [*llm.stream("yes", **options)][-1].done.tokens == made[0]
    chats = [[{"role": "user", "content": "yes"}]] * 3
    assert len({one.tokens for one in llm.chat(chats, **options)}) == 3
    # An item's own seed stays as it is.
    own = [{"prompt": "yes", "sampling": {"seed": options["seed"]}}] * 2
    assert [one.tokens for one in llm.generate(own, **options | {"seed": 5})] == [made[0]] * 2


def test_special_tokens_in_an_answer(llm):
    start, yes = (llm.tokenizer.token_id(token) for token in ("<|im_start|>", "yes"))
    options = {"max_tokens": 2, "logit_bias": {start: 100, yes: 50}, "ignore_eos": True, "logprobs": 0}
    kept = llm.generate("no", **options, skip_special_tokens=False)
    assert (kept.text, llm.generate("no", **options).text) == ("<|im_start|>" * 2, "")
    pieces = [piece.text for piece in llm.stream("no", **options, skip_special_tokens=False)]
    assert "".join(pieces) == kept.text
    # A choice may be a special token, and may hold one. Its text shows it.
    for choice, tokens in (("<|im_start|>", (start,)), ("yes<|im_start|>", (yes, start))):
        made = llm.generate("no", grammar={"choice": [choice, "no"]}, logit_bias=options["logit_bias"])
        assert (made.text, made.tokens) == (choice, tokens)
        assert (
            "".join(p.text for p in llm.stream("no", grammar={"choice": [choice]}, logit_bias={start: 100})) == choice
        )
    with pytest.raises(InputError, match="logprobs"):
        llm.generate("no", logprobs=2**63)


def test_the_bytes_of_parts_of_letters_join_to_the_answer(llm):
    task = llm.task("generate", grammar={"choice": ["😊在 it"]}, logprobs=1)
    (line,) = llm.run(task, ["no"])
    content = chat_logprobs(line["logprobs"])["content"]
    assert bytes(byte for token in content for byte in token["bytes"]).decode() == line["text"] == "😊在 it"


def test_chat_and_what_is_kept(llm):
    chat = [{"role": "user", "content": "is it the one? yes or no"}]
    first = llm.chat(chat, max_tokens=5, ignore_eos=True)
    second = llm.chat(chat, max_tokens=5, ignore_eos=True)
    assert second.tokens == first.tokens
    prompt = llm.tokenizer.encode(llm.tokenizer.render_chat(chat, add_generation_prompt=True), special=False)
    assert second.cached_tokens == len(prompt)
    assert llm.stats.generation.cross_window_hits >= len(prompt)
    apart = llm.chat(chat, max_tokens=5, ignore_eos=True, salt="another tenant")
    assert (apart.tokens, apart.cached_tokens) == (first.tokens, 0)
    assert llm.cache.pin(Namespace(), prompt) == len(prompt)
    llm.cache.clear()
    assert llm.chat(chat, max_tokens=5, ignore_eos=True).cached_tokens == len(prompt)
    llm.cache.unpin(Namespace(), prompt)
    llm.cache.clear()
    assert llm.engine.generator.scheduler.pool.used_slots == 0


def test_logprobs_are_those_of_score(llm):
    found = llm.generate("the yes", max_tokens=6, logprobs=2, ignore_eos=True)
    ids = llm.tokenizer.encode("the yes").tolist()
    score = llm.score([ids], [list(found.tokens)])[0]
    assert [t.logprob for t in found.logprobs] == pytest.approx(score.logprobs.tolist(), abs=1e-4)
    assert score.greedy
    assert all(t.top[0][1] == pytest.approx(t.logprob, abs=1e-5) and len(t.top) == 2 for t in found.logprobs)


def test_grammar(llm):
    pytest.importorskip("llguidance")
    assert llm.generate("the", max_tokens=20, grammar={"choice": ["yes", "no"]}).text in ("yes", "no")
    schema = {"type": "object", "properties": {"a": {"enum": ["yes", "no"]}}, "required": ["a"]}
    schema["additionalProperties"] = False
    text = llm.generate("the", max_tokens=120, grammar={"json_schema": schema}).text
    assert json.loads(text)["a"] in ("yes", "no")


def test_stream(llm):
    whole = llm.generate("no the", max_tokens=9, ignore_eos=True)
    pieces = list(llm.stream("no the", max_tokens=9, ignore_eos=True))
    assert "".join(p.text for p in pieces) == whole.text
    assert pieces[-1].done.tokens == whole.tokens
    for _ in llm.stream("no the", max_tokens=9, ignore_eos=True):
        break
    until_idle(llm.engine)
    check_books(llm.engine.generator.scheduler)


def test_event_loop(llm):
    whole = llm.generate(["yes", "no", "the"], max_tokens=7, ignore_eos=True)

    async def together():
        return await asyncio.gather(*(llm.agenerate(p, max_tokens=7, ignore_eos=True) for p in ("yes", "no", "the")))

    assert [one.tokens for one in asyncio.run(together())] == [one.tokens for one in whole]

    async def streamed():
        return [piece async for piece in llm.astream("yes", max_tokens=7, ignore_eos=True)]

    pieces = asyncio.run(streamed())
    assert "".join(p.text for p in pieces) == whole[0].text

    async def refused():
        await llm.agenerate([5] * 511, max_tokens=7)

    with pytest.raises(InputError, match="context"):
        asyncio.run(refused())

    async def given_up():
        task = asyncio.ensure_future(llm.agenerate("yes", max_tokens=400, ignore_eos=True))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return await llm.agenerate("no", max_tokens=7, ignore_eos=True)

    with slowed(llm.worker):
        assert asyncio.run(given_up()).tokens == whole[1].tokens


def test_errors_name_the_prompt(llm):
    with pytest.raises(InputError, match="item 1"):
        llm.generate(["yes", [5] * 600])
    with pytest.raises(InputError, match="temperature"):
        llm.generate("yes", temperatur=1.0)
    with pytest.raises(InputError, match="cache is"):
        LLM(str(llm.folder), cache="newest")
    small = LLM(str(llm.folder), dtype="float32", kv_memory=20_000, cache=CacheOptions(ttl=60))
    with pytest.raises(InputError, match=r"item 0.*kv_memory"):
        small.generate([[5] * 300], max_tokens=10)


def test_where_what_is_pinned_leaves_no_room_the_error_says_so(llm):
    small = LLM(str(llm.folder), dtype="float32", kv_memory=20_000, cache=CacheOptions(min_overlap=0))
    rows = small.engine.generator.scheduler.pool.num_slots
    prompt = list(range(3, rows - 3))
    small.generate(prompt, max_tokens=1)
    assert small.pin(prompt) == len(prompt)
    message = rf"KV store holds {rows} rows \({len(prompt)} of them pinned\), too few for .*; unpin prompts, give a"
    with pytest.raises(InputError, match=message):
        small.generate([2] * 8, max_tokens=8)


def test_adapters(llm, tmp_path):
    folders = {name: str(write_adapter(tmp_path / name, llm.folder, seed=i)) for i, name in enumerate(("a", "b"))}
    adapted = LLM(str(llm.folder), dtype="float32", kv_memory=1 << 22, adapters=folders)
    ids = llm.tokenizer.encode("yes no the").tolist()
    expected = {name: reference_tokens(merged(llm.folder, tmp_path / name), [ids], 8)[0] for name in folders}
    expected[None] = reference_tokens(reference(llm.folder), [ids], 8)[0]
    task = adapted.task("generate", max_tokens=8, ignore_eos=True)
    items = [{"prompt": ids, "adapter": name} for name in (None, "a", "b", "a", None)]
    works = task.prepare(items)
    for _ in range(2):  # the second time what is kept is used
        answers = [answer for (answer,) in run_works(adapted.engine, task, works)]
        assert [list(a[0].tokens) for a in answers] == [expected[item["adapter"]] for item in items]
    assert len({tuple(tokens) for tokens in expected.values()}) == 3
    with pytest.raises(InputError, match="adapter"):
        adapted.generate(ids, adapter="c")


def test_a_grammar_that_cannot_be_followed_is_an_error(llm, monkeypatch):
    """Some grow too complex on the way: a text cut short there is not what was asked for."""
    pytest.importorskip("llguidance")
    from prefold.text.grammar import GrammarCompiler, Matcher

    class Complex(Matcher):
        num_taken = 0

        def accept(self, token):
            self.num_taken += 1
            super().accept(token)

        @property
        def failed(self):
            return "too complex" if self.num_taken > 2 else None

        @property
        def is_done(self):
            return self.num_taken > 2

    matcher = GrammarCompiler.matcher

    def complex_one(compiler, grammar):
        made = matcher(compiler, grammar)
        made.__class__ = Complex
        return made

    monkeypatch.setattr(GrammarCompiler, "matcher", complex_one)
    with pytest.raises(InputError, match="the grammar could not be followed after 3 tokens: too complex"):
        llm.generate("the", max_tokens=20, grammar={"regex": "[a-z]{30}"})
    until_idle(llm.engine)


def test_a_failed_step_leaves_nothing_of_who_waited(llm, monkeypatch):
    generator = llm.engine.generator

    def fail(self):
        raise RuntimeError("the device is gone")

    async def ask() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(type(generator), "step", fail)
            with pytest.raises(RuntimeError, match="the device is gone"):
                await llm.agenerate("yes no", max_tokens=5)
        for _ in range(500):
            if not generator.has_work:
                break
            await asyncio.sleep(0.01)

    asyncio.run(ask())
    assert not generator.has_work and not generator.open
    assert llm.generate("yes no", max_tokens=2).text is not None
