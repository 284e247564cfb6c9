"""Structured output: whatever follows the masks is what the grammar describes."""

from __future__ import annotations

import json
import random
import re
import sys

import llguidance
import numpy as np
import pytest
from small_tokenizers import GgufCheckpoint, byte_level, gguf_metadata
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from prefold.errors import InputError, MissingExtraError, UnsupportedModelError
from prefold.spec.requests import Grammar
from prefold.text import Tokenizer, load_tokenizer
from prefold.text.grammar import FORMATS, GrammarCompiler, Matcher, _known, check_grammar, example_of, is_quick
from prefold.text.schemas import with_any_of
from prefold.wire.answers import grammar_of_calls

EOS = 2
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "é"]}, "maxItems": 2},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def tokenizers(backends) -> dict[str, Tokenizer]:
    made = {kind: Tokenizer(Backend.from_str(backends[kind])) for kind in ("gpt-2", "llama-bpe", "sentencepiece")}
    made["gguf"] = load_tokenizer(GgufCheckpoint(gguf_metadata(byte_level("qwen2"), "qwen2")))
    return made


@pytest.fixture(scope="module", params=["gpt-2", "llama-bpe", "sentencepiece", "gguf"])
def compiler(request, tokenizers) -> GrammarCompiler:
    """With a vocabulary larger than the tokenizer's, as models have."""
    tokenizer = tokenizers[request.param]
    made = GrammarCompiler(tokenizer, tokenizer.vocab_size + 5, [EOS])
    made.tokenizer = tokenizer
    return made


def mask_of(matcher: Matcher) -> np.ndarray:
    """Whether each token may come next, bool."""
    return np.unpackbits(matcher.mask(), bitorder="little").view(np.bool_)


def write(matcher: Matcher, rng: random.Random, most: int = 400) -> list[int]:
    """Tokens at random, of those allowed, until the text ends."""
    ids: list[int] = []
    while not matcher.is_done and len(ids) < most:
        allowed = np.flatnonzero(mask_of(matcher)).tolist()
        assert allowed
        # At random alone, numbers and blanks would go on for long.
        token = EOS if EOS in allowed and rng.random() < 0.3 else rng.choice(allowed)
        if token == EOS:
            assert matcher.is_complete
            return ids
        matcher.accept(token)
        ids.append(token)
    assert matcher.failed is None
    assert matcher.is_done and matcher.is_complete
    return ids


def check_person(text: str) -> None:
    person = json.loads(text)
    assert set(person) <= {"name", "age", "tags"} and len(person["name"]) <= 8
    assert isinstance(person["age"], int) and 0 <= person["age"] <= 120
    assert set(person.get("tags", [])) <= {"a", "é"}


CHOICES = ["été 😀", 'a "b"\n', "not", "no", "\\n", "\x00"]
CASES = {
    "json_schema": (Grammar("json_schema", json.dumps(PERSON)), check_person),
    "regex": (Grammar("regex", "(a|日本)+[0-9]{2}"), lambda text: re.fullmatch("(a|日本)+[0-9]{2}", text)[0]),
    "choice": (Grammar("choice", json.dumps(CHOICES)), CHOICES.index),
    "lark": (
        Grammar("lark", 'start: item ("," item)*\nitem: /[a-c]/ | "(" start ")"'),
        lambda text: re.fullmatch(r"[a-c(][a-c,()]*", text)[0],
    ),
}


@pytest.mark.parametrize("kind", CASES)
def test_random_texts_fit(compiler, kind):
    grammar, check = CASES[kind]
    rng = random.Random(0)
    texts = set()
    for _ in range(20):
        text = compiler.tokenizer.decode(write(compiler.matcher(grammar), rng))
        check(text)
        texts.add(text)
    assert len(texts) > 2


def fits(compiler, grammar: Grammar, text: str) -> bool:
    """Whether the whole text is one that the grammar describes."""
    matcher = compiler.matcher(grammar)
    ids = compiler.tokenizer.encode(text, special=False).tolist()
    for token in ids[ids[0] == compiler.tokenizer.token_id("▁") :]:
        if not mask_of(matcher)[token]:
            return False
        matcher.accept(token)
    return matcher.is_complete


def test_any_object(compiler):
    assert fits(compiler, Grammar("json"), '{"a": [1, {"é": null}],"b":{}}')
    assert fits(compiler, Grammar("json", compact=False), '{"a": [1, {"é": null}],\n "b": {}}')
    first = np.flatnonzero(mask_of(compiler.matcher(Grammar("json")))).tolist()
    assert all(compiler.tokenizer.decode([token]).startswith("{") for token in first)


ANY = {"type": "object", "properties": {"a": {"type": "integer", "minimum": 5, "maximum": 9}}, "required": ["a"]}


@pytest.mark.parametrize(
    ("text", "compact"),
    [
        ('{"a": 7, "b": [1, 2]}', True),
        ('{"a":7,"b":[1,2]}', True),
        ('{"a": 7}', True),
        ('{ "a": 7}', False),
        ('{"a":  7}', False),
        ('{"a":\n7}', False),
        ('{"a": 7 }', False),
        ('{"a": 7, "b": [ ]}', False),
        ('{"a" : 7}', False),
    ],
)
def test_json_is_compact_unless_white_space_is_free(compiler, text, compact):
    schema = json.dumps(ANY)
    assert fits(compiler, Grammar("json_schema", schema), text) == compact
    assert fits(compiler, Grammar("json_schema", schema, compact=False), text)
    own = json.dumps(ANY | {"x-guidance": {"whitespace_flexible": True}})
    assert fits(compiler, Grammar("json_schema", own), text)


def test_blanks_in_json_have_an_end(compiler):
    token_id = compiler.tokenizer.token_id
    blanks = [token for name in ("Ġ", "▁", "Ċ") if (token := token_id(name)) is not None]
    for compact, most in ((True, 1), (False, 66)):
        matcher = compiler.matcher(Grammar("json_schema", json.dumps(ANY), compact=compact))
        for token in compiler.tokenizer.encode('{"a":', special=False).tolist():
            if mask_of(matcher)[token]:
                matcher.accept(token)
        count = 0
        while mask_of(matcher)[blanks].any():
            matcher.accept(next(token for token in blanks if mask_of(matcher)[token]))
            count += 1
        assert count <= most and (compact or count > 60)


def test_a_choice_of_10_000_texts(tokenizers):
    rng = random.Random(0)
    texts = ["".join(rng.choice("abcdefgh é日") for _ in range(rng.randint(5, 25))) for _ in range(10_000)]
    compiler = GrammarCompiler(tokenizers["gpt-2"], tokenizers["gpt-2"].vocab_size, [EOS])
    compiler.tokenizer = tokenizers["gpt-2"]
    grammar = Grammar("choice", json.dumps(texts))
    assert all(fits(compiler, grammar, text) for text in rng.sample(texts, 20))
    assert not fits(compiler, grammar, texts[0] + "x")
    assert compiler.tokenizer.decode(write(compiler.matcher(grammar), rng)) in texts


def test_masks_never_allow_special_tokens_or_ids_without_a_token(compiler):
    matcher = compiler.matcher(Grammar("regex", "(?s:.*)"))
    mask = mask_of(matcher)
    special = [i for i, token in compiler.tokenizer.backend.get_added_tokens_decoder().items() if token.special]
    assert [token for token in special if mask[token]] == [EOS]
    assert len(matcher.mask()) == -(-(compiler.tokenizer.vocab_size + 5) // 8)
    assert not mask[compiler.tokenizer.vocab_size :].any()


def test_end_of_text(compiler):
    token = compiler.tokenizer.token_id("a")
    matcher = compiler.matcher(Grammar("regex", "aa?"))
    assert not mask_of(matcher)[EOS]
    matcher.accept(token)
    assert mask_of(matcher)[EOS] and matcher.is_complete and not matcher.is_done
    ended = matcher.copy()
    ended.accept(EOS)
    assert ended.is_done and ended.failed is None
    matcher.accept(token)
    assert matcher.is_done and matcher.is_complete


def test_copies_part_ways(compiler):
    rng = random.Random(1)
    first = compiler.matcher(Grammar("choice", '["ab", "ac", "zz"]'))
    letters = {name: compiler.tokenizer.token_id(name) for name in "abcz"}
    second = first.copy()
    second.accept(letters["a"])
    third = second.copy()
    third.accept(letters["b"])
    assert third.is_done and not second.is_done and mask_of(first)[letters["z"]]
    assert mask_of(second)[letters["c"]] and not mask_of(second)[letters["z"]]
    fresh = compiler.matcher(Grammar("choice", '["ab", "ac", "zz"]'))
    assert np.array_equal(mask_of(fresh), mask_of(first))
    assert compiler.tokenizer.decode(write(first, rng)) in ("ab", "ac", "zz")


def test_a_token_that_was_not_allowed_ends_it(compiler):
    matcher = compiler.matcher(Grammar("regex", "ab"))
    matcher.accept(compiler.tokenizer.token_id("b"))
    assert matcher.is_done and "grammar" in matcher.failed
    assert np.flatnonzero(mask_of(matcher)).tolist() == [EOS]


def test_a_text_that_no_token_can_continue_ends():
    """The tokenizer has no way to write what the grammar wants: the sample ends instead of hanging."""
    backend = Backend(models.BPE({"a": 0, "b": 1, "</s>": EOS}, []))
    backend.decoder = decoders.ByteLevel()
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.add_special_tokens(["</s>"])
    matcher = GrammarCompiler(Tokenizer(backend), 3, [EOS]).matcher(Grammar("regex", "abc"))
    matcher.accept(0)
    matcher.accept(1)
    assert np.flatnonzero(mask_of(matcher)).tolist() == [EOS]
    assert matcher.is_done and not matcher.is_complete


BAD = [
    Grammar("json_schema", "{"),
    Grammar("json_schema", "[]"),
    Grammar("json_schema", "false"),
    Grammar("json_schema", '{"type": "nope"}'),
    Grammar("json_schema", '{"not": {}}'),
    Grammar("json_schema", '{"type": "integer", "minimum": 3, "maximum": 1}'),
    Grammar("regex", "("),
    Grammar("regex", "a(?=b)"),
    Grammar("choice", "[]"),
    Grammar("choice", '["a", 3]'),
    Grammar("choice", '[""]'),
    Grammar("choice", "a"),
    Grammar("choice", '["\\ud83d"]'),
    Grammar("lark", "start: x"),
    Grammar("regex", "\ud83d"),
]


@pytest.mark.parametrize("grammar", BAD, ids=str)
def test_what_is_no_grammar_is_refused(tokenizers, grammar):
    compiler = GrammarCompiler(tokenizers["gpt-2"], tokenizers["gpt-2"].vocab_size, [EOS])
    for refuse in (check_grammar, compiler.matcher):
        with pytest.raises(InputError) as caught:
            refuse(grammar)
        assert caught.value.field == "grammar" and caught.value.remedy
        assert "\n" not in str(caught.value)


def test_a_format_that_is_not_known_says_nothing():
    """Those that are known are the library's own, and a property may be called "format"."""
    for name in FORMATS:
        source = llguidance.LLMatcher.grammar_from_json_schema(json.dumps({"type": "string", "format": name}))
        assert not llguidance.LLMatcher.validate_grammar(source)
    texts = {"type": "string", "format": "uri-reference"}
    dates = {"enum": [{"format": "regex"}]}
    schema = {
        "type": "object",
        "properties": {"format": texts, "x": dates, "day": {"type": "string", "format": "date"}},
    }
    known = json.loads(_known(json.dumps(schema)))
    assert known["properties"] == schema["properties"] | {"format": {"type": "string"}}
    check_grammar(Grammar("json_schema", json.dumps(schema)))


def test_one_of_names_what_allows_it():
    schema = {"oneOf": [{"type": "string"}, {"type": "string", "minLength": 2}]}
    with pytest.raises(InputError, match=re.escape('"x-guidance": {"coerce_one_of": true}')):
        check_grammar(Grammar("json_schema", json.dumps(schema)))
    check_grammar(Grammar("json_schema", json.dumps(schema | {"x-guidance": {"coerce_one_of": True}})))


def choices(*branches, **more) -> dict:
    return {"type": "object", "oneOf": list(branches), **more}


def tagged(value, *, required=("kind",), **more) -> dict:
    shut = {"required": list(required), "additionalProperties": False}  # or random texts would not end
    return {"type": "object", "properties": {"kind": value, **more}, **shut}


NAMED = {"$defs": {"a": tagged({"const": "a"}), "b": {"allOf": [{"$ref": "#/$defs/c"}]}, "c": tagged({"enum": ["b"]})}}
DISJOINT = {
    "types": {"oneOf": [{"type": "string"}, {"type": ["integer", "null"]}, {"type": "array"}, {"type": "object"}]},
    "values": {"oneOf": [{"const": 1}, {"enum": [2, "1"]}, {"const": True}, {"enum": [{"a": 1}, [1]]}]},
    "a discriminator": choices(tagged({"const": "a"}), tagged({"enum": ["b", "c"]}), tagged({"type": "number"})),
    "one that only one requires": choices(tagged({"const": 1}, required=()), tagged({"const": 2})),
    "references": choices({"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}, **NAMED),
    "nested discriminators": choices(tagged(tagged({"const": "a"})), tagged(tagged({"const": "b"}))),
    "properties that others lack": choices(tagged({"const": 1}), tagged({}, required=("x",), x={"const": 2})),
    "branches of branches": choices({"anyOf": [tagged({"const": 1}), tagged({"const": 2})]}, tagged({"const": 3})),
    "beside anyOf": choices(tagged({"const": 1}), tagged({"const": 2}), anyOf=[{"required": ["kind"]}]),
    "additionalProperties": choices(tagged({"const": "a"}), {"additionalProperties": {"const": 0}, "maxProperties": 0}),
}  # fmt: skip
NOT_DISJOINT = {
    "types": {"oneOf": [{"type": "integer"}, {"type": "number"}]},
    "values": {"oneOf": [{"enum": [1, 2]}, {"const": 2.0}]},
    "no type": {"oneOf": [{"properties": {"a": {"const": 1}}, "required": ["a"]}, {"type": "string"}]},
    "not required": choices(tagged({"const": 1}, required=()), tagged({"const": 2}, required=())),
    "required": choices({"required": ["a"]}, {"required": ["b"]}),
    "patterns": choices(tagged({}) | {"patternProperties": {"x": {}}}, tagged({}, required=("x",), x={})),
    "beside a reference": {"oneOf": [{"$ref": "#/$defs/a", "const": 3}, {"const": 4}], "$defs": {"a": {}}},
    "an endless reference": choices({"$ref": "#/oneOf/1"}, {"$ref": "#/oneOf/0"}),
    "other documents": choices({"$ref": "https://a/b#/c"}, tagged({"const": 1})),
}


@pytest.mark.parametrize("name", DISJOINT)
def test_a_one_of_without_a_value_of_two_branches_is_an_any_of(tokenizers, name):
    jsonschema = pytest.importorskip("jsonschema")
    schema, rng = DISJOINT[name], random.Random(0)
    assert "oneOf" not in json.dumps(with_any_of(schema))
    compiler = GrammarCompiler(tokenizers["gpt-2"], tokenizers["gpt-2"].vocab_size, [EOS])
    whole = 0
    for _ in range(8):
        matcher = compiler.matcher(Grammar("json_schema", json.dumps(schema)))
        ids = write(matcher, rng)
        if matcher.is_complete:
            whole += 1
            jsonschema.Draft7Validator(schema).validate(json.loads(tokenizers["gpt-2"].decode(ids)))
    assert whole


@pytest.mark.parametrize("name", NOT_DISJOINT)
def test_any_other_one_of_stays(name):
    assert with_any_of(NOT_DISJOINT[name]) == NOT_DISJOINT[name]


def test_the_proof_is_bounded():
    twice = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(200)}
    schema = {"oneOf": [{"$ref": "#/$defs/d0"}] * 2, "items": {"oneOf": [{"const": i} for i in range(3000)]}}
    assert json.dumps(with_any_of(schema | {"$defs": twice})).count("oneOf") == 2


def test_a_grammar_that_takes_too_long_is_refused_and_harms_no_other(monkeypatch):
    def patterns(count: int) -> Grammar:
        named = {f"^a{i}.*b{i}$": {"type": "integer"} for i in range(count)}
        return Grammar("json_schema", json.dumps({"type": "object", "patternProperties": named}))

    monkeypatch.setattr("prefold.text.grammar_process.SECONDS", 0.3)
    bomb = {"allOf": [{"pattern": f"^(a|b)*a(a|b){{{k}}}$"} for k in range(8, 30)]}  # of 700 letters
    for grammar in (patterns(300), Grammar("json_schema", json.dumps(bomb))):
        for _ in range(2):  # the second time it is known
            with pytest.raises(InputError, match=r"more than 0\.3 s of processor time") as caught:
                check_grammar(grammar)
            assert (caught.value.field, caught.value.code) == ("grammar", "invalid_grammar")
            assert caught.value.remedy.startswith("make it smaller")
        check_grammar(patterns(4))
    with pytest.raises(InputError, match="Unimplemented"):
        check_grammar(Grammar("json_schema", json.dumps({"allOf": [{"uniqueItems": True}]})))
    assert is_quick("json_schema", json.dumps(PERSON, ensure_ascii=False)) and is_quick("regex", "[0-9]+")
    assert not is_quick("json_schema", '{"p\\u0061tternProperties": {}}') and not is_quick("choice", "a" * 5000)


def test_a_grammar_without_a_text_is_refused(compiler):
    with pytest.raises(InputError, match="no text fits"):
        compiler.matcher(Grammar("regex", r"[^\s\S]"))


def properties(count: int) -> dict:
    return {"type": "object", "properties": {f"property_{i}": {"type": "string"} for i in range(count)}}


def calls(tools: int, count: int) -> dict:
    functions = [{"name": f"tool_{i}", "parameters": properties(count)} for i in range(tools)]
    return grammar_of_calls(functions)["json_schema"]


LARGE = {
    "2 tools of 600 properties": calls(2, 600),
    "one of 10 objects of 100": {"anyOf": [properties(100)] * 10},
}


@pytest.mark.parametrize("name", LARGE)
def test_large_schemas_are_followed(tokenizers, name):
    compiler = GrammarCompiler(tokenizers["gpt-2"], tokenizers["gpt-2"].vocab_size, [EOS])
    matcher = compiler.matcher(Grammar("json_schema", json.dumps(LARGE[name])))
    for token in tokenizers["gpt-2"].encode(json.dumps(example_of(LARGE[name])), special=False)[:40].tolist():
        assert mask_of(matcher)[token]
        matcher.accept(token)
    assert matcher.failed is None


def test_a_schema_that_is_too_large_is_refused_before_the_first_token(tokenizers):
    compiler = GrammarCompiler(tokenizers["gpt-2"], tokenizers["gpt-2"].vocab_size, [EOS], most_items=500)
    with pytest.raises(InputError, match=r"too large: Parser Error: Current row has 1207 items; max is 500;") as caught:
        compiler.matcher(Grammar("json_schema", json.dumps(calls(2, 300))))
    assert (caught.value.field, caught.value.code) == ("grammar", "invalid_grammar")
    compiler.matcher(Grammar("json_schema", json.dumps(calls(2, 100))))


def test_grammars_are_compiled_once(tokenizers, monkeypatch):
    compiler = GrammarCompiler(tokenizers["gpt-2"], tokenizers["gpt-2"].vocab_size, [EOS])
    compiler.matcher(Grammar("regex", "a+"))
    monkeypatch.setattr("prefold.text.grammar.check_grammar", None)
    compiler.matcher(Grammar("regex", "a+"))
    with pytest.raises(TypeError):
        compiler.matcher(Grammar("regex", "b+"))


def test_a_tokenizer_of_another_kind_is_refused():
    words = Tokenizer(Backend(models.WordLevel({"a": 0, "[UNK]": 1, "</s>": 2}, "[UNK]")))
    with pytest.raises(UnsupportedModelError, match="tokenizer"):
        GrammarCompiler(words, 3, [2])


def test_without_the_library(monkeypatch, tokenizers):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(MissingExtraError, match=r"prefold\[grammar\]"):
        GrammarCompiler(tokenizers["gpt-2"], 600)
    with pytest.raises(MissingExtraError):
        check_grammar(Grammar("regex", "never seen"))


BOMBS = {
    "an automaton of 2^40 states": Grammar("regex", "(a|b)*a(a|b){40}"),
    "repetitions in repetitions": Grammar("regex", "((((a{1,100}){1,100}){1,100}){1,100})"),
    "a long row of repetitions": Grammar("regex", "(.{0,1000}x){1000}"),
    "many that overlap": Grammar("regex", "(" + "|".join("a" * i + "b?" for i in range(350)) + ")"),
    "many wildcards": Grammar("regex", "(" + "|".join(f".*w{i}.*" for i in range(300)) + ")"),
    "many words": Grammar("choice", json.dumps([f"x{i:07}" for i in range(5000)])),
    "many values": Grammar("json_schema", json.dumps({"enum": [f"x{i:07}" for i in range(5000)]})),
    "references that double": Grammar(
        "json_schema",
        json.dumps(
            {"$defs": {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(25)}
             | {"d25": {"type": "string"}}, "$ref": "#/$defs/d0"}
        ),
    ),
    "an example of 2^40 parts": Grammar(
        "json_schema",
        json.dumps(
            {"$defs": {f"d{i}": {"properties": {x: {"$ref": f"#/$defs/d{i + 1}"} for x in "ab"}} for i in range(40)}
             | {"d40": {"type": "string"}}, "$ref": "#/$defs/d0"}
        ),
    ),
    "an ambiguous one": Grammar("lark", 'start: s\ns: s s s s | "a" | '),
    "a remainder": Grammar("json_schema", json.dumps({"type": "integer", "multipleOf": 10_007})),
}  # fmt: skip


@pytest.mark.parametrize("name", BOMBS)
def test_what_would_take_long_takes_its_limit(compiler, name):
    """It is refused, or compiled and followed; none is larger than a server lets in."""
    assert len(BOMBS[name].text) <= 64 << 10
    try:
        matcher = compiler.matcher(BOMBS[name])
    except InputError as error:
        assert error.code == "invalid_grammar"
    else:
        rng = random.Random(0)
        for _ in range(30):
            allowed = np.flatnonzero(mask_of(matcher)).tolist()
            if matcher.failed or matcher.is_done:
                break
            matcher.accept(rng.choice(allowed))
