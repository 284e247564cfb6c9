"""The methods of LLM that read values from prompts: embed, rerank, classify, decide, calibrate, score."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, TypeVar, Unpack, cast, overload

import numpy as np

from ..errors import InputError, warn_caller
from ..spec.calibration import Calibration
from ..spec.fields import checked, near
from ..tasks import ClassifyItem, DecideItem, DecideTask, EmbedItem, RerankItem, ScoreItem, Work
from ..tasks.calibration import LEAST_ROWS, judge
from ..tasks.questions import Question
from ..tasks.results import Classification, Decision, Ranking, Score
from ..tasks.run import finish_items, not_finite
from ..text.fields import is_empty
from ..text.media import TextWithImages
from .arguments import Text, Vector, as_items, as_list, as_texts, check_errors, first_error, only_tables, pair_up
from .keywords import ClassifyKeywords, DecideKeywords, EmbedKeywords, RerankKeywords, ScoreKeywords
from .running import CallForm, read_call
from .tables import Scores, Table, TableCall, TableTasks, kind_of

T = TypeVar("T")
Labels = Sequence[str] | Mapping[str, str] | Mapping[str, Mapping[str, str]] | None
Questions = Mapping[str, Mapping[str, object]] | Sequence[Mapping[str, object]]
State = str | Mapping[str, object] | TextWithImages
Images = Sequence[object] | Mapping[str, object] | None
Errors = Literal["raise", "return"]
Raise = Literal["raise"]
Return = Literal["return"]


class NumericTasks(TableTasks):
    """The methods embed, rerank, classify, decide and score.

    These keywords mean the same in all of them:

    - errors: "raise" raises the InputError of the first bad item, before anything is computed. "return" computes the
      good items, and puts the InputError of each bad item in its place. A result that is not finite is found only after
      computing (code "not_finite").
    - progress: Show a progress bar on standard error.
    - adapter: LoRA adapter to run with, one of `LLM(adapters=)`. Except in rerank also a list with a name or None for
      each item.
    - truncate: Cut items that are too long for the model. Otherwise they are errors.

    Each method also accepts a table: a pandas or Polars DataFrame, a PyArrow Table, RecordBatch or RecordBatchReader,
    or a DuckDB relation. It returns a table of the same kind with the answers as additional columns. An input column
    with the name of an answer column is renamed to input_NAME. These keywords are for tables:

    - text, state, document, prompt, continuation: The column to read, or a template with {column} in it. By default a
      column with a usual name.
    - scores: For classify and decide: "all" adds a column for the probability of each label or option.
    - errors: "return" adds a column `error` with the reason why a row has no answer; null for all other rows.
    """

    @overload
    def embed(
        self, texts: Text | Sequence[Text], *, errors: Raise = "raise", **options: Unpack[EmbedKeywords]
    ) -> Vector: ...
    @overload
    def embed(  # type: ignore[overload-overlap]  # a str is a Sequence[str] too
        self, texts: str, *, errors: Return, **options: Unpack[EmbedKeywords]
    ) -> Vector | InputError: ...
    @overload
    def embed(
        self, texts: Sequence[Text], *, errors: Return, **options: Unpack[EmbedKeywords]
    ) -> list[Vector | InputError]: ...
    @overload
    def embed(
        self, texts: Table, *, text: str | None = None, errors: Errors = "raise", **options: Unpack[EmbedKeywords]
    ) -> Table: ...
    def embed(
        self,
        texts: Text | Sequence[Text] | Table,
        *,
        text: str | None = None,
        errors: Errors = "raise",
        **options: Unpack[EmbedKeywords],
    ) -> Vector | InputError | list[Vector | InputError] | Table:
        """Compute the embedding of each text.

        By default, pooling and scaling follow the checkpoint's files. If these have no such setting, the last token is
        read and vectors are scaled to length 1. Token ids are used unchanged: no prompt or special token is added.

        Args:
            texts: One text or a list of texts, each a string, token ids or a TextWithImages; or a table.
            text: For a table: the column to embed, or a template.
            errors: "raise", or "return" the InputErrors of bad texts.
            **options: pooling ("last", "mean", "first"), normalize, dimensions, prompt, prompt_name, instruction,
                max_length, truncate, adapter, progress.

        Returns:
            float32 [n, dim]; for one text [dim]; with errors="return" a list. A table gets the column `embedding`, with
            lists of float32.

        Raises:
            InputError: A text cannot be embedded. The message names it.

        Example:
            >>> vectors = llm.embed(["a cat", "a dog"])
        """
        if kind_of(texts):
            columns = {"prompt": ("text", text)}
            return self._on_table(cast(Table, texts), TableCall("embed", "texts", columns, errors, options))
        only_tables(text=text)
        items, single = as_texts(texts, "texts")
        call, named, task_options = read_call("texts", _items(EmbedItem, items), single, errors, options)
        answers = self._answers(self.task("embed", **task_options), named, call)
        embeddings: list[Any] = [out if isinstance(out, InputError) else out.embedding for out in answers]
        if single:
            return cast(Vector, embeddings[0])
        if call.back:
            return embeddings
        return (
            np.stack(embeddings)
            if embeddings
            else np.empty((0, options.get("dimensions") or self.config.hidden), np.float32)
        )

    @overload
    def rerank(
        self,
        query: Text,
        documents: Sequence[Text | Mapping[str, object]],
        *,
        top_n: int | None = None,
        errors: Errors = "raise",
        **options: Unpack[RerankKeywords],
    ) -> Ranking: ...
    @overload
    def rerank(
        self,
        query: Text,
        documents: Table,
        *,
        document: str | None = None,
        errors: Errors = "raise",
        **options: Unpack[RerankKeywords],
    ) -> Table: ...
    def rerank(
        self,
        query: Text,
        documents: Sequence[Text | Mapping[str, object]] | Table,
        *,
        document: str | None = None,
        top_n: int | None = None,
        errors: Errors = "raise",
        **options: Unpack[RerankKeywords],
    ) -> Ranking | Table:
        """Score how well each document answers the query.

        The score depends on the checkpoint:

        - A causal model gets Qwen3-Reranker's prompt. The score is the probability of "yes" against "no".
        - A causal CrossEncoder of sentence-transformers gets the prompt, and is read, as its files define.
        - With a classification head of one label, the score is the head's activation (default: sigmoid) of its logit.
        - A listwise reranker (jina-reranker-v3) reads all documents in one prompt.
        - An embedding model scores by the cosine of the vectors of `embed`, unless instruction, template or words are
          given. This is a checkpoint with sentence-transformers' pooling modules, a GGUF file with a pooling type, or a
          checkpoint without an LM head.

        Args:
            query: The query.
            documents: A list of documents, each a text, token ids or {"text": ...}; or a table.
            document: For a table: the column with the documents, or a template.
            top_n: Length of the order in the Ranking; None: all documents.
            errors: "raise", or "return" the InputErrors of bad documents.
            **options: instruction, template, words, raw_scores, max_length, truncate (cuts only documents), adapter,
                progress.

        Returns:
            A Ranking: the scores, and the order of the documents. With errors="return" a bad document has the score
            NaN, and its InputError is in the Ranking's `errors`. A table gets the column `score`; its rows keep their
            order.

        Raises:
            InputError: A document cannot be scored. The message names it.

        Example:
            >>> ranking = llm.rerank("why is the sky blue", ["Light scatters ...", "Bread rises ..."])
        """
        queries, one_query = as_items(query, "query")
        if not one_query:
            message, remedy = f"query is a list of {len(queries)} texts", "give one query; call rerank for each"
            raise InputError(message, field="query", remedy=remedy, code="wrong_type")
        if kind_of(documents):
            if top_n is not None:
                message, remedy = "top_n is for lists, but a table keeps all its rows", "sort the result by its score"
                raise InputError(message, field="top_n", remedy=remedy)
            columns, fixed = {"document": ("document", document)}, {"query": query}
            asked = TableCall("rerank", "documents", columns, errors, options, fixed=fixed)
            return self._on_table(cast(Table, documents), asked)
        only_tables(document=document)
        items, single = as_items(documents, "documents")
        if single or not items:
            value = "one text" if single else "empty"
            raise InputError(f"documents is {value}", field="documents", remedy="give a list of texts")
        if top_n is not None:
            checked(int, top_n, "top_n", least=1)  # before anything is computed
        progress = options.pop("progress", False)
        call = CallForm("documents", back=check_errors(errors), progress=progress)
        task: Any = self.task("rerank", **options)
        works = task.prepare([RerankItem(query, item) for item in items])
        if not call.back:
            first_error(works, call.argument)
        bad = {i: work for i, work in enumerate(works) if isinstance(work, InputError)}
        good = [i for i in range(len(items)) if i not in bad]
        ranking = Ranking(np.empty(0), [])
        if task.is_listwise and good:
            one_list = RerankItem(query, documents=[items[i] for i in good], top_n=top_n)
            (answer,) = finish_items(task, *self._results(task, [one_list], replace(call, back=True)))
            if isinstance(answer, InputError):
                bad, good = bad | dict.fromkeys(good, answer), []
            else:
                ranking = answer
        elif good:
            results = self._run_works(task, works, call)
            bad |= {i: error for i in good if (error := _error_of(works[i], results[i]))}
            good = [i for i in good if i not in bad]
            if good:
                together = task.gather([works[i] for i in good], top_n)
                ranking = task.finish(together.note, [result for i in good for result in results[i] or ()])
        bad |= {good[i]: not_finite() for i in np.flatnonzero(~np.isfinite(ranking.scores)).tolist()}
        if not call.back:
            first_error([bad.get(i) for i in range(len(items))], call.argument)
        scores = np.full(len(items), np.nan)
        scores[good] = ranking.scores
        scores[list(bad)] = np.nan
        return replace(ranking, scores=scores, order=[good[i] for i in ranking.order], errors=dict(sorted(bad.items())))

    @overload
    def classify(  # type: ignore[overload-overlap]  # a str is a Sequence[str] too
        self, texts: Text, labels: Labels = None, *, errors: Raise = "raise", **options: Unpack[ClassifyKeywords]
    ) -> Classification: ...
    @overload
    def classify(
        self,
        texts: Sequence[Text],
        labels: Labels = None,
        *,
        errors: Raise = "raise",
        **options: Unpack[ClassifyKeywords],
    ) -> list[Classification]: ...
    @overload
    def classify(
        self, texts: Sequence[Text], labels: Labels = None, *, errors: Return, **options: Unpack[ClassifyKeywords]
    ) -> list[Classification | InputError]: ...
    @overload
    def classify(
        self,
        texts: Table,
        labels: Labels = None,
        *,
        text: str | None = None,
        scores: Scores = "label",
        errors: Errors = "raise",
        **options: Unpack[ClassifyKeywords],
    ) -> Table: ...
    def classify(
        self,
        texts: Text | Sequence[Text] | Table,
        labels: Labels = None,
        *,
        text: str | None = None,
        scores: Scores | None = None,
        errors: Errors = "raise",
        **options: Unpack[ClassifyKeywords],
    ) -> Classification | Sequence[Classification | InputError] | InputError | Table:
        """Find the best label for each text, and the probability of every label.

        A checkpoint with a classification head uses the head. Any other model compares the likelihoods of the labels
        after a prompt that all texts share.

        Args:
            texts: One text or a list of texts, each a string, token ids or a TextWithImages; or a table.
            labels: The labels: a list, {label: how the prompt writes it}, or {label: {"description": its meaning}}.
                Descriptions appear once, in the shared prompt. None: the labels of the classification head.
            text: For a table: the column to classify, or a template.
            scores: For a table: "all" adds a column p_LABEL for each label.
            errors: "raise", or "return" the InputErrors of bad texts.
            **options: instructions, examples (pairs of text and label), template, separator, normalization ("tokens",
                "bytes"), calibrate (contextual calibration, Zhao et al. 2021), max_length, truncate, adapter, progress.

        Returns:
            A Classification for each text. A table gets the columns `label` and `p`, the label's probability.

        Raises:
            InputError: A text cannot be classified. The message names it.

        Example:
            >>> llm.classify("what a film", ["positive", "negative"]).label
        """
        labels = as_list(labels, "labels")
        if kind_of(texts):
            columns, own = {"prompt": ("text", text)}, {**options, "labels": labels}
            asked = TableCall("classify", "texts", columns, errors, own, scores=scores or "label")
            return self._on_table(cast(Table, texts), asked)
        only_tables(text=text, scores=scores)
        items, single = as_texts(texts, "texts")
        call, named, task_options = read_call("texts", _items(ClassifyItem, items), single, errors, options)
        task = self.task("classify", labels=labels, **task_options)
        answers: list[Classification | InputError] = self._answers(task, named, call)
        return _only(answers) if single else answers

    @overload
    def decide(  # type: ignore[overload-overlap]  # a str is a Sequence[object] too
        self,
        states: State,
        questions: Questions,
        *,
        images: Images = None,
        errors: Raise = "raise",
        **options: Unpack[DecideKeywords],
    ) -> Decision: ...
    @overload
    def decide(
        self,
        states: Sequence[object],
        questions: Questions,
        *,
        images: Sequence[Images] | None = None,
        errors: Raise = "raise",
        **options: Unpack[DecideKeywords],
    ) -> list[Decision]: ...
    @overload
    def decide(
        self,
        states: Sequence[object],
        questions: Questions,
        *,
        images: Sequence[Images] | None = None,
        errors: Return,
        **options: Unpack[DecideKeywords],
    ) -> list[Decision | InputError]: ...
    @overload
    def decide(
        self,
        states: Table,
        questions: Questions,
        *,
        state: str | None = None,
        scores: Scores = "label",
        errors: Errors = "raise",
        **options: Unpack[DecideKeywords],
    ) -> Table: ...
    def decide(
        self,
        states: State | Sequence[object] | Table,
        questions: Questions,
        *,
        images: Images | Sequence[Images] = None,
        state: str | None = None,
        scores: Scores | None = None,
        errors: Errors = "raise",
        **options: Unpack[DecideKeywords],
    ) -> Decision | Sequence[Decision | InputError] | InputError | Table:
        """Answer typed questions about each state, with a probability for every option. Nothing is generated.

        Args:
            states: One state, or a list of states. A state is a text, a JSON object or a TextWithImages. Or a table: a
                pandas or Polars DataFrame, a PyArrow Table, RecordBatch or RecordBatchReader, or a DuckDB relation.
            questions: {name: {"type": "noul", "choice" or "score", "instructions": ..., "criteria": ...}}, or a list of
                questions in OpenAI's form. A noul is a yes/no question. A choice has `criteria` {option: description
                or None}. A score has `criteria` [lowest level, ..., highest level].
            images: Images of the state, for a model with image inputs: paths, URLs or other values. A list of images is
                put before the state. With {name: image}, each image is put wherever its name occurs in the state or in
                a question. For a list of states: a list with the images of each state, or None.
            state: For a table: the column with the state, or a template (default: a column called state, text or
                input).
            scores: For a table: the probabilities with a column, "label" or "all".
            errors: "raise" raises the InputError of the first bad state, before anything is computed. "return" puts the
                InputError of each bad state in its place, and adds the column `error` to a table.
            **options: prompt_style, template, first, temperature, calibration, review_below, max_length, truncate,
                adapter, progress.

        Returns:
            A Decision for each state, which maps a question's name to its DecisionAnswer; for one state one Decision.
            A table gets a column NAME for the value of each question, and NAME_p for its probability (for a score,
            NAME_confidence). scores="all" adds NAME_p_OPTION, NAME_confidence and NAME_label_mass. A question with the
            name of one of the table's columns has the column answer_NAME.

        Raises:
            InputError: A question or a state is wrong. The message names it.

        Example:
            >>> llm.decide("I was charged twice.", {"refund": {"type": "noul", "instructions": "Is money owed?"}})
        """
        if kind_of(states):
            if images is not None:
                message = "images cannot be given with a table"
                raise InputError(message, field="images", remedy="give the states as a list", code="unsupported")
            columns, own = {"state": ("state", state)}, {**options, "questions": questions}
            asked = TableCall("decide", "states", columns, errors, own, scores=scores or "label")
            return self._on_table(cast(Table, states), asked)
        only_tables(state=state, scores=scores)
        items = as_list(states, "states")
        single = not isinstance(items, list)
        items = [items] if single else items
        given: object = [images] if single else [None] * len(items) if images is None else images
        if not isinstance(given, (list, tuple)) or len(given) != len(items):
            message = f"images is not a list with an entry for each of {len(items)} states"
            raise InputError(
                message, field="images", remedy="give a list of images, or None, for each state", code="wrong_type"
            )
        pairs = [DecideItem(one, images=own) for one, own in zip(items, given, strict=True)]
        call, named, task_options = read_call("states", pairs, single, errors, options)
        answers: list[Decision | InputError] = self._answers(
            self.task("decide", questions=questions, **task_options), named, call
        )
        return _only(answers) if single else answers

    def calibrate(
        self,
        states: Sequence[object],
        questions: Questions,
        gold: Mapping[str, Sequence[object]],
        *,
        precision: float = 0.95,
        **options: Unpack[DecideKeywords],
    ) -> Calibration:
        """Fit a temperature and a threshold for each question of `decide`, from states with true answers.

        Both are fitted on one half of the states; the half of a state depends only on its index. The `figures` of each
        question in the result show accuracy, log loss and calibration error of both halves, before and after fitting.

        Args:
            states: The states, as for `decide`.
            questions: The questions, as for `decide`.
            gold: {question: list with the true answer for each state}. For a choice the answer is an option,
                for a noul a bool, for a score the index (from 0) or the text of a level. None: unknown.
            precision: Share of right answers that the answers above the threshold must reach.
            **options: Options of `decide`. With `calibration`, the result contains its temperatures.

        Returns:
            A Calibration, for `decide(..., calibration=...)`. It omits questions with too few true answers.

        Raises:
            InputError: A question, a state or a true answer is wrong, or no question has enough true answers.

        Example:
            >>> calibration = llm.calibrate(states, questions, {"refund": [True, False, None, ...]})
            >>> calibration.save("calibration.json")
        """
        states = as_list(states, "states")
        precision = checked(float, precision, "precision", least=0, most=1, above=True, quoted=False)
        call, named, task_options = read_call("states", [DecideItem(one) for one in states], False, "raise", options)
        task = cast(DecideTask, self.task("decide", questions=questions, **task_options))
        places = _places_of(gold, task.questions, len(states))
        decisions: list[Decision] = self._answers(task, named, call)
        judgements = []
        for question in [question for question in task.questions if question.name in places]:
            known = [i for i, place in enumerate(places[question.name]) if place is not None]
            own = [[*decisions[i][question.name].probabilities.values()] for i in known]
            true = np.array([places[question.name][i] for i in known])
            judgements.append(judge(question, [i + 1 for i in known], np.array(own), true, precision))
        few = [one.name for one in judgements if one.fit is None]
        remedy = f"give more true answers: each half needs {LEAST_ROWS}"
        if len(few) == len(judgements):
            raise InputError("no question has enough true answers", field="gold", remedy=remedy, code="too_few")
        if few:
            warn_caller(f"{', '.join(few)} cannot be calibrated; {remedy}")
        return task.fitted(judgements, precision, self.checkpoint)

    @overload
    def score(  # type: ignore[overload-overlap]
        self,
        prompts: str,
        continuations: str | None = None,
        *,
        errors: Raise = "raise",
        **options: Unpack[ScoreKeywords],
    ) -> Score: ...
    @overload
    def score(  # type: ignore[overload-overlap]
        self, prompts: str, continuations: Sequence[Text], *, errors: Raise = "raise", **options: Unpack[ScoreKeywords]
    ) -> list[Score]: ...
    @overload
    def score(  # type: ignore[overload-overlap]
        self,
        prompts: Sequence[Text],
        continuations: Sequence[str] | None = None,
        *,
        errors: Raise = "raise",
        **options: Unpack[ScoreKeywords],
    ) -> list[Score]: ...
    @overload
    def score(
        self,
        prompts: Sequence[Text],
        continuations: Sequence[Sequence[Text]],
        *,
        errors: Raise = "raise",
        **options: Unpack[ScoreKeywords],
    ) -> list[list[Score]]: ...
    @overload
    def score(
        self,
        prompts: Text | Sequence[Text],
        continuations: Text | Sequence[Text] | Sequence[Sequence[Text]] | None = None,
        *,
        errors: Errors = "raise",
        **options: Unpack[ScoreKeywords],
    ) -> Score | InputError | Sequence[Score | InputError | Sequence[Score | InputError]]: ...
    @overload
    def score(
        self,
        prompts: Table,
        *,
        prompt: str | None = None,
        continuation: str | None = None,
        errors: Errors = "raise",
        **options: Unpack[ScoreKeywords],
    ) -> Table: ...
    def score(
        self,
        prompts: Text | Sequence[Text] | Table,
        continuations: Text | Sequence[Text] | Sequence[Sequence[Text]] | None = None,
        *,
        prompt: str | None = None,
        continuation: str | None = None,
        errors: Errors = "raise",
        **options: Unpack[ScoreKeywords],
    ) -> Score | InputError | Sequence[Score | InputError | Sequence[Score | InputError]] | Table:
        """Compute the log-probability of each continuation after its prompt, or of whole texts.

        Prompt and continuation are encoded together, and split after the prompt's own encoding. White space at the end
        of a prompt belongs to the continuation, as in lm-evaluation-harness. A whole text that is longer than the
        model's context is scored in pieces of that length.

        Args:
            prompts: One prompt or a list of prompts, or a table.
            continuations: For one prompt: a continuation or a list of continuations. For a list of prompts: a list with
                one continuation, or one list of continuations, for each prompt. None: score each prompt as a whole.
            prompt: For a table: the column with the prompts, or a template.
            continuation: For a table: the column with the continuations, or a template.
            errors: "raise", or "return" the InputErrors of bad pairs or texts.
            **options: prefix_token, max_length, truncate (cuts only the prompt), adapter, progress.

        Returns:
            A Score for each continuation or text, in lists as they were given. A table gets the columns `logprob` and
            `greedy`.

        Raises:
            InputError: A pair or text cannot be scored. The message names it.

        Example:
            >>> llm.score("The capital of France is", [" Paris", " Rome"])
        """
        if kind_of(prompts):
            if continuations is not None:
                message, remedy = "continuations is for lists", 'give continuation="COLUMN" with a table'
                raise InputError(message, field="continuations", remedy=remedy)
            columns = {"prompt": ("prompt", prompt), "continuation": ("continuation", continuation)}
            return self._on_table(cast(Table, prompts), TableCall("score", "prompts", columns, errors, options))
        only_tables(prompt=prompt, continuation=continuation)
        if continuations is None:
            items, single = as_texts(prompts, "prompts")
            call, named, task_options = read_call("prompts", _items(ScoreItem, items), single, errors, options)
            scores: list[Score | InputError] = self._answers(self.task("score", **task_options), named, call)
            return _only(scores) if single else scores
        pairs_of, single, many = pair_up(prompts, continuations)
        call, lists, task_options = read_call("continuations" if single else "pairs", pairs_of, single, errors, options)
        task = self.task("score", **task_options)
        flat = [pair for pairs in lists for pair in pairs]
        call = replace(call, single=single and not many)
        results: Iterator[Score | InputError] = iter(self._answers(task, flat, call))
        answers = [[next(results) for _ in pairs] if many else next(results) for pairs in lists]
        return _only(answers) if single else answers


def _places_of(gold: object, questions: Sequence[Question], count: int) -> dict[str, list[int | None]]:
    """Return {question: index of the true option for each state, or None if it is unknown}."""
    if not isinstance(gold, Mapping):
        remedy = "give {question: true answers}"
        raise InputError(f"gold is of type {type(gold).__name__}", field="gold", remedy=remedy, code="wrong_type")
    named, places = {question.name: question for question in questions}, {}
    for name, answers in gold.items():
        if name not in named:
            remedy = f"{near(name, named)}the questions are {', '.join(named)}"
            raise InputError(f"gold: there is no question {name!r}", field="gold", remedy=remedy, code="unknown_field")
        values = as_list(answers, f"gold[{name!r}]")
        if not isinstance(values, list) or len(values) != count:
            size = len(values) if isinstance(values, list) else 1
            message = f"gold[{name!r}] has {size} true answers for {count} states"
            raise InputError(
                message, field="gold", remedy="give one for each state; None: unknown", code="wrong_length"
            )
        own = named[name]
        places[name] = [
            None if is_empty(value) else own.place_of(value, f"gold[{name!r}][{i}]") for i, value in enumerate(values)
        ]
    return places


def _error_of(work: Work | InputError, results: Sequence[Any] | None) -> InputError | None:
    """Return the first error of a work and its results, or None."""
    return next((part for part in (work, *(results or ())) if isinstance(part, InputError)), None)


def _items(kind: Callable[..., Any], texts: Sequence[Any]) -> list[Any]:
    """Return an item of this kind for each text; keep InputErrors unchanged."""
    return [text if isinstance(text, InputError) else kind(text=text) for text in texts]


def _only(answers: Sequence[T]) -> T:
    (answer,) = answers
    return answer
