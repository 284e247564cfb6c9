"""The methods of LLM whose answers are numbers: embed, rerank, classify, score."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..errors import InputError
from ..tasks.run import finish_items
from .arguments import as_items, as_texts, check_errors, first_error, pair_up
from .results import Classification, Ranking, Score
from .running import Call, TaskRunner

__all__ = ["Numbers"]


class Numbers(TaskRunner):
    """embed, rerank, classify, score."""

    def embed(self, texts: Any, *, errors: str = "raise", progress: bool = False, **options: Any) -> Any:
        items, single = as_texts(texts, "texts")
        back = check_errors(errors)
        records = [item if isinstance(item, InputError) else {"text": item} for item in items]
        lines = self._lines(self.task("embed", **options), records, Call("texts", single, back, progress))
        vectors = [line if isinstance(line, InputError) else line["embedding"] for line in lines]
        if single:
            return vectors[0]
        if back:
            return vectors
        return np.stack(vectors) if vectors else np.empty((0, self.config.hidden), np.float32)

    def rerank(
        self,
        query: Any,
        documents: Any,
        *,
        top_n: int | None = None,
        errors: str = "raise",
        progress: bool = False,
        **options: Any,
    ) -> Ranking:
        items, single = as_items(documents, "documents")
        if single or not items:
            found = "one text" if single else "empty"
            raise InputError(f"documents is {found}", field="documents", remedy="give a list of texts")
        task: Any = self.task("rerank", **options)
        call = Call("documents", back=check_errors(errors), progress=progress)
        works = task.prepare([{"query": query, "document": item} for item in items])
        bad = {i: work for i, work in enumerate(works) if isinstance(work, InputError)}
        if bad and not call.back:
            first_error(works, call.argument)
        scores = np.full(len(items), np.nan)
        good = [i for i in range(len(items)) if i not in bad]
        if not good:
            return Ranking(scores, [], bad)
        work = task.gather([works[i] for i in good], top_n)
        (line,) = finish_items(task, [work], self._run_works(task, [work], call))
        scores[good] = line["scores"]
        return Ranking(scores, [good[i] for i in line["order"]], bad)

    def classify(
        self,
        texts: Any,
        labels: Sequence[str] | Mapping[str, str] | None = None,
        *,
        errors: str = "raise",
        progress: bool = False,
        **options: Any,
    ) -> Any:
        items, single = as_texts(texts, "texts")
        back = check_errors(errors)
        records = [item if isinstance(item, InputError) else {"text": item} for item in items]
        task = self.task("classify", labels=labels, **options)
        lines = self._lines(task, records, Call("texts", single, back, progress))
        found = [
            line if isinstance(line, InputError) else Classification(line["label"], line["probabilities"])
            for line in lines
        ]
        return found[0] if single else found

    def score(
        self,
        prompts: Any,
        continuations: Any = None,
        *,
        errors: str = "raise",
        progress: bool = False,
        **options: Any,
    ) -> Any:
        back = check_errors(errors)
        task = self.task("score", **options)
        if continuations is None:
            items, single = as_texts(prompts, "prompts")
            records = [item if isinstance(item, InputError) else {"text": item} for item in items]
            found = self._scores(task, records, Call("prompts", single, back, progress))
            return found[0] if single else found
        lists, single, many = pair_up(prompts, continuations)
        flat = [pair for pairs in lists for pair in pairs]
        alone = single and not many
        found = iter(self._scores(task, flat, Call("continuations" if single else "pairs", alone, back, progress)))
        answers = [[next(found) for _ in pairs] if many else next(found) for pairs in lists]
        return answers[0] if single else answers

    def _scores(self, task: Any, records: Sequence[Any], call: Call) -> list[Score | InputError]:
        return [
            line
            if isinstance(line, InputError)
            else Score(line["logprob"], np.asarray(line["logprobs"], np.float32), line["greedy"])
            for line in self._lines(task, records, call)
        ]
