"""Polars expressions that ask a model: the namespace `prefold`.

    import polars as pl
    import prefold.integrations.polars
    from prefold import LLM

    llm = LLM("smollm2-135m")
    questions = {"refund": {"type": "noul", "instructions": "Is a refund requested?"}}
    df.with_columns(pl.col("body").prefold.decide(llm, questions).struct.unnest())
    df.lazy().with_columns(vector=pl.col("body").prefold.embed(llm)).sink_parquet("out.parquet")

Arguments, options and column names are as for the methods of LLM on a table. An expression with several columns is a
struct. A null in the input gives a null in the output. Polars decides how many rows are computed together: a DataFrame
as a whole, a stream in parts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Unpack

from ..api.keywords import ClassifyKeywords, DecideKeywords, EmbedKeywords, RerankKeywords, ScoreKeywords
from ..api.numbers import Errors, Labels, Questions
from ..api.tables import Scores
from ..api.texts import CallKeywords
from ..errors import MissingExtraError
from ..llm import LLM

try:
    import polars as pl
except ImportError:
    raise MissingExtraError("polars", "polars", "expressions of Polars") from None

__all__ = ["PrefoldExpressions"]

_INPUT = "input"  # the name of the column in errors


@pl.api.register_expr_namespace("prefold")
class PrefoldExpressions:
    """The methods of LLM as expressions: `pl.col("body").prefold.embed(llm)`.

    `llm` may be shared by any number of expressions. With `errors="raise"` a bad row fails the query. Other options are
    as for the method of LLM.
    """

    def __init__(self, expr: pl.Expr):
        self._expr = expr

    def embed(self, llm: LLM, *, errors: Errors = "raise", **options: Unpack[EmbedKeywords]) -> pl.Expr:
        """Return the embedding of each text, an array of float32."""
        return self._mapped(lambda frame: llm.embed(frame, text=_INPUT, errors=errors, **options))

    def rerank(self, llm: LLM, query: str, *, errors: Errors = "raise", **options: Unpack[RerankKeywords]) -> pl.Expr:
        """Return the score of each text for the query. A higher score means a better answer."""
        return self._mapped(lambda frame: llm.rerank(query, frame, document=_INPUT, errors=errors, **options))

    def classify(
        self,
        llm: LLM,
        labels: Labels = None,
        *,
        scores: Scores = "label",
        errors: Errors = "raise",
        **options: Unpack[ClassifyKeywords],
    ) -> pl.Expr:
        """Return a struct with `label` and `p` (its probability) for each text."""
        return self._mapped(
            lambda frame: llm.classify(frame, labels, text=_INPUT, scores=scores, errors=errors, **options)
        )

    def decide(
        self,
        llm: LLM,
        questions: Questions,
        *,
        scores: Scores = "label",
        errors: Errors = "raise",
        **options: Unpack[DecideKeywords],
    ) -> pl.Expr:
        """Return a struct with the answers to all questions about each state. A state is a text or a struct."""
        return self._mapped(
            lambda frame: llm.decide(frame, questions, state=_INPUT, scores=scores, errors=errors, **options)
        )

    def score(self, llm: LLM, *, errors: Errors = "raise", **options: Unpack[ScoreKeywords]) -> pl.Expr:
        """Return a struct with the `logprob` of each text as a whole and `greedy` (each token is the likeliest)."""
        return self._mapped(lambda frame: llm.score(frame, prompt=_INPUT, errors=errors, **options))

    def generate(self, llm: LLM, *, errors: Errors = "raise", **options: Unpack[CallKeywords]) -> pl.Expr:
        """Return a struct with the continuation of each prompt: `text`, `finish_reason` and `num_generated`."""
        return self._mapped(lambda frame: llm.generate(frame, prompt=_INPUT, errors=errors, **options))

    def chat(self, llm: LLM, *, errors: Errors = "raise", **options: Unpack[CallKeywords]) -> pl.Expr:
        """Return a struct with the answer to each user message: `text`, `finish_reason` and `num_generated`."""
        return self._mapped(lambda frame: llm.chat(frame, prompt=_INPUT, errors=errors, **options))

    def _mapped(self, call: Callable[[pl.DataFrame], pl.DataFrame]) -> pl.Expr:
        def compute(values: pl.Series) -> pl.Series:
            is_there = values.is_not_null()
            found = call(values.filter(is_there).to_frame(_INPUT)).drop(_INPUT)
            column = found.to_series() if found.width == 1 else found.to_struct()
            # The index of each row among the rows with a value; null for a row without one.
            places = pl.select(pl.when(is_there).then(is_there.cum_sum() - 1)).to_series()
            return column.gather(places.cast(pl.UInt32)).alias(values.name)

        # A call without rows checks the options and finds the type of the result.
        kind = compute(pl.Series(_INPUT, [], pl.String)).dtype
        return self._expr.map_batches(compute, return_dtype=kind, is_elementwise=True)
