"""DuckDB SQL functions that ask a model.

    import duckdb
    from prefold import LLM
    from prefold.integrations.duckdb import register

    con = duckdb.connect()
    register(con, LLM("smollm2-135m"))
    con.sql("SELECT * FROM mails WHERE prefold_yes(body, 'Is a refund requested?') > 0.8")

| function | result |
|---|---|
| prefold_yes(state, question) | DOUBLE: the probability of "yes" |
| prefold_decide(state, question) | STRUCT(value, p, confidence, probabilities MAP(VARCHAR, DOUBLE), error) |
| prefold_classify(text, labels VARCHAR[]) | STRUCT(label, p, probabilities MAP(VARCHAR, DOUBLE), error) |
| prefold_embed(text) | FLOAT[n]: the embedding, n is its length |
| prefold_rerank(query, document) | DOUBLE: the document's score for the query |
| prefold_score(prompt, continuation) | DOUBLE: the log-probability of the continuation |
| prefold_generate(prompt) | VARCHAR |

A question is a yes/no question as text, or any question as JSON: {"type": "choice", "criteria": {...}}. DuckDB calls a
function with up to 2,048 rows at a time. These rows run together and share their common prefixes. A NULL argument gives
NULL.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from ..errors import InputError, MissingExtraError
from ..llm import LLM
from ..spec.task import options_of
from ..tasks.results import DecisionAnswer

if TYPE_CHECKING:
    import pyarrow as pa
    from duckdb import DuckDBPyConnection

__all__ = ["register"]

Row = tuple[Any, ...]  # the arguments of a function for one row
Compute = Callable[[Sequence[Row]], Sequence[object]]  # returns a value or an InputError for each row
Asked = DecisionAnswer | InputError
K = TypeVar("K", bound=Hashable)
T = TypeVar("T")
_MAP = "MAP(VARCHAR, DOUBLE)"
TASKS = ("decide", "classify", "embed", "rerank", "score", "generate")


def register(
    con: DuckDBPyConnection,
    llm: LLM,
    *,
    prefix: str = "prefold_",
    errors: Literal["raise", "return"] = "raise",
    chat: bool | None = None,
    **options: Mapping[str, object],
) -> None:
    """Add SQL functions that ask a model to a connection and its cursors.

    Args:
        con: A DuckDB connection.
        llm: The model. Any number of connections and threads may share it.
        prefix: Prefix of the functions' names.
        errors: "raise": a bad row fails the query. "return": the row gets NULL and a Python warning; functions that
            return a struct put the error into its field `error` instead.
        chat: prefold_generate puts a prompt into the model's chat template (default: if the model has one).
        **options: Options by task: decide={"first": "question"}, generate={"max_tokens": 60}.

    Raises:
        InputError: An option is unknown, or the connection already has a function with one of these names.
        MissingExtraError: pyarrow is not installed.

    Example:
        >>> register(con, llm, generate={"max_tokens": 20})
        >>> con.sql("SELECT prefold_generate('Name a river.')")
    """
    if errors not in ("raise", "return"):
        raise InputError(f"errors is {errors!r}", field="errors", remedy='use "raise" or "return"')
    for task in options.keys() - {*TASKS}:
        remedy = f"give the options of a task as a mapping: {', '.join(TASKS)}"
        raise InputError(f"there is no option {task!r}", field=task, remedy=remedy, code="unknown_option")
    of = {task: {**options.get(task, {})} for task in TASKS}
    for task, settings in of.items():
        options_of(task, settings)  # raises InputError for a bad option
    if chat is None:
        chat = llm.tokenizer is not None and bool(llm.tokenizer.chat_templates)
    asked = _Functions(llm, of, chat)
    size = of["embed"].get("dimensions") or llm.config.hidden
    draws = bool(of["generate"].get("temperature"))  # random results: DuckDB must not merge equal calls
    text = "VARCHAR"
    _add(con, f"{prefix}yes", [text, text], "DOUBLE", asked.yes, errors)
    decided = f"STRUCT(value VARCHAR, p DOUBLE, confidence DOUBLE, probabilities {_MAP}, error VARCHAR)"
    _add(con, f"{prefix}decide", [text, text], decided, asked.decide, errors)
    classified = f"STRUCT(label VARCHAR, p DOUBLE, probabilities {_MAP}, error VARCHAR)"
    _add(con, f"{prefix}classify", [text, "VARCHAR[]"], classified, asked.classify, errors)
    _add(con, f"{prefix}embed", [text], f"FLOAT[{size}]", asked.embed, errors)
    _add(con, f"{prefix}rerank", [text, text], "DOUBLE", asked.rerank, errors)
    _add(con, f"{prefix}score", [text, text], "DOUBLE", asked.score, errors)
    _add(con, f"{prefix}generate", [text], text, asked.generate, errors, draws=draws)


def _add(
    con: DuckDBPyConnection,
    name: str,
    parameters: Sequence[str],
    returns: str,
    compute: Compute,
    errors: str,
    *,
    draws: bool = False,
) -> None:
    """Add a function to a connection.

    Args:
        draws: Whether equal arguments may have different results, so that DuckDB must call the function for each row.
    """
    try:
        import pyarrow as pa
    except ImportError:
        raise MissingExtraError("pyarrow", "duckdb", "a function of DuckDB") from None
    kind = _arrow_type(returns)
    has_error = "error VARCHAR" in returns

    def function(columns: Sequence[pa.ChunkedArray]) -> pa.Array:
        rows = list(zip(*(column.to_pylist() for column in columns), strict=True))
        places = [i for i, row in enumerate(rows) if None not in row]
        values: list[object] = [None] * len(rows)
        failed = []
        for i, value in zip(places, compute([rows[i] for i in places]) if places else (), strict=True):
            if not isinstance(value, InputError):
                values[i] = value
                continue
            if errors == "raise":
                raise InputError(f"{name}({str(rows[i][0])[:60]!r}): {value}", code=value.code) from value
            if has_error:
                values[i] = {"error": f"{value.code}: {value}"}
            else:
                failed.append(value)
        if failed:
            rest = f" and {len(failed) - 1} more" if len(failed) > 1 else ""
            warnings.warn(f"{name} gives NULL for a row{rest}: {failed[0]}", stacklevel=1)
        return pa.array(values, kind)

    try:
        # DuckDB counts parameters and evaluates annotations. So it gets a lambda with the right number and none.
        plain: Any = (lambda a: function([a])) if len(parameters) == 1 else (lambda a, b: function([a, b]))
        settings: Any = {"type": "arrow", "null_handling": "special", "side_effects": draws}
        con.create_function(name, plain, [*parameters], returns, **settings)
    except Exception as error:
        if "already" not in str(error):
            raise
        remedy = f"give another prefix=, or call con.remove_function({name!r}) first"
        raise InputError(f"the connection has a function {name} already", field="prefix", remedy=remedy) from error


def _arrow_type(returns: str) -> pa.DataType:
    """Return the Arrow type of a function's result."""
    import pyarrow as pa

    if returns.startswith("FLOAT["):
        return pa.list_(pa.float32(), int(returns[len("FLOAT[") : -1]))
    simple = {"VARCHAR": pa.string(), "DOUBLE": pa.float64(), _MAP: pa.map_(pa.string(), pa.float64())}
    if returns in simple:
        return simple[returns]
    parts = returns.removeprefix("STRUCT(").removesuffix(")").replace(_MAP, "MAP").split(", ")
    named = [part.split(" ") for part in parts]
    return pa.struct([(name, simple[_MAP if kind == "MAP" else kind]) for name, kind in named])


class _Functions:
    """The computations of the SQL functions. Each method returns a value or an InputError for each row."""

    def __init__(self, llm: LLM, options: Mapping[str, Mapping[str, object]], chat: bool):
        self._llm, self._options, self._chat = llm, options, chat

    def yes(self, rows: Sequence[Row]) -> Sequence[object]:
        def of(answer: Asked) -> object:
            if isinstance(answer, InputError):
                return answer
            if answer.type != "noul":
                remedy = "ask a yes/no question, or use prefold_decide"
                return InputError(f"the question has the type {answer.type}", field="question", remedy=remedy)
            return answer.probabilities["true"]

        return [of(answer) for answer in self._decisions(rows)]

    def decide(self, rows: Sequence[Row]) -> Sequence[object]:
        return [answer if isinstance(answer, InputError) else _decided(answer) for answer in self._decisions(rows)]

    def _decisions(self, rows: Sequence[Row]) -> list[Asked]:
        """Return a DecisionAnswer or an InputError for each row."""

        def ask(question: str, states: list[str]) -> list[Asked]:
            decisions = self._llm.decide(
                states, {"question": _question(question)}, errors="return", **self._of("decide")
            )
            return [
                one if isinstance(one, InputError) else one.errors.get("question") or one["question"]
                for one in decisions
            ]

        return _grouped(rows, lambda row: row[1], lambda row: row[0], ask)

    def classify(self, rows: Sequence[Row]) -> Sequence[object]:
        def ask(labels: tuple[str, ...], texts: list[str]) -> list[object]:
            found = self._llm.classify(texts, list(labels), errors="return", **self._of("classify"))
            return [
                one if isinstance(one, InputError) else {**one.columns(), "probabilities": [*one.probabilities.items()]}
                for one in found
            ]

        return _grouped(rows, lambda row: tuple(row[1]), lambda row: row[0], ask)

    def embed(self, rows: Sequence[Row]) -> Sequence[object]:
        return self._llm.embed([text for (text,) in rows], errors="return", **self._of("embed"))

    def rerank(self, rows: Sequence[Row]) -> Sequence[object]:
        def ask(query: str, documents: list[str]) -> list[object]:
            ranking = self._llm.rerank(query, documents, errors="return", **self._of("rerank"))
            return [ranking.errors.get(i, score) for i, score in enumerate(ranking.scores.tolist())]

        return _grouped(rows, lambda row: row[0], lambda row: row[1], ask)

    def score(self, rows: Sequence[Row]) -> Sequence[object]:
        prompts, continuations = ([row[i] for row in rows] for i in (0, 1))
        found: Any = self._llm.score(prompts, continuations, errors="return", **self._of("score"))
        return [one if isinstance(one, InputError) else one.logprob for one in found]

    def generate(self, rows: Sequence[Row]) -> Sequence[object]:
        options = self._of("generate")
        if self._chat:
            chats = [[{"role": "user", "content": text}] for (text,) in rows]
            found: Any = self._llm.chat(chats, errors="return", **options)
        else:
            found = self._llm.generate([text for (text,) in rows], errors="return", **options)
        return [one if isinstance(one, InputError) else one.text for one in found]

    def _of(self, task: str) -> Any:
        return self._options[task]


def _grouped(
    rows: Sequence[Row],
    key: Callable[[Row], K],
    value: Callable[[Row], str],
    ask: Callable[[K, list[str]], Sequence[T | InputError]],
) -> list[T | InputError]:
    """Call `ask(key, values)` once per key of the rows, and return the results in the order of the rows.

    If `ask` raises an InputError, it is the result of all rows with the key.
    """
    places: dict[K, list[int]] = {}
    for i, row in enumerate(rows):
        places.setdefault(key(row), []).append(i)
    out: dict[int, T | InputError] = {}
    for of_key, numbers in places.items():
        try:
            found: Sequence[T | InputError] = ask(of_key, [value(rows[i]) for i in numbers])
        except InputError as error:
            found = [error] * len(numbers)
        out.update(zip(numbers, found, strict=True))
    return [out[i] for i in range(len(rows))]


def _question(text: str) -> Mapping[str, object]:
    """Return the question of a text: a JSON object, or the instructions of a yes/no question."""
    if text.lstrip()[:1] != "{":
        return {"type": "noul", "instructions": text}
    try:
        question = json.loads(text)
    except ValueError as error:
        remedy = "write a JSON object, or a yes/no question as text"
        raise InputError(f"the question is not valid JSON: {error}", field="question", remedy=remedy) from None
    return dict(question)


def _decided(answer: DecisionAnswer) -> dict[str, object]:
    """Return a DecisionAnswer as a struct."""
    said = [str(option).lower() if isinstance(option, bool) else option for option in answer.probabilities]
    value = str(answer.value).lower() if isinstance(answer.value, bool) else str(answer.value)
    best = max(answer.probabilities.values())
    pairs = list(zip(said, answer.probabilities.values(), strict=True))
    return {"value": value, "p": best, "confidence": answer.confidence, "probabilities": pairs}
