"""The methods of LLM whose answers are text: generate, chat, stream, and the same from an event loop."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Iterator, Mapping
from functools import cached_property
from typing import Any

from ..engine.service import Service
from ..errors import InputError
from ..types import Generated, GenerateRequest
from .arguments import as_prompts, chats_of, check_errors, first_error
from .results import Piece
from .running import Call, TaskRunner

__all__ = ["Texts"]


class Texts(TaskRunner):
    """generate, chat, stream, agenerate, astream."""

    def generate(
        self, prompts: Any, *, adapter: Any = None, errors: str = "raise", progress: bool = False, **options: Any
    ) -> Any:
        items, single = as_prompts(prompts, "prompts", adapter)
        call = Call("prompts", single, check_errors(errors), progress)
        return self._generate(items, call, adapter, options)

    def chat(
        self, messages: Any, *, adapter: Any = None, errors: str = "raise", progress: bool = False, **options: Any
    ) -> Any:
        items, single = chats_of(messages, adapter)
        call = Call("messages", single, check_errors(errors), progress)
        return self._generate(items, call, adapter, options)

    def _generate(self, items: list[Any], call: Call, adapter: Any, options: Mapping[str, Any]) -> Any:
        task = self._generate_task(adapter, options)
        works, results = self._results(task, items, call)
        found = [
            work if isinstance(work, InputError) else result[0]  # an InputError where it could not run
            for work, result in zip(works, results, strict=True)
        ]
        if not call.back:
            first_error(found, call.argument, single=call.single)
        many = options.get("n") is not None
        answers = [one if many or isinstance(one, InputError) or len(one) > 1 else one[0] for one in found]
        return answers[0] if call.single else answers

    def _generate_task(self, adapter: Any, options: Mapping[str, Any]) -> Any:
        one = None if isinstance(adapter, (list, tuple)) else adapter
        return self.task("generate", **options, **({} if one is None else {"adapter": one}))

    def stream(self, prompt: Any, **options: Any) -> Iterator[Piece]:
        return self._stream(self._request(prompt, options))

    def _stream(self, request: GenerateRequest) -> Iterator[Piece]:
        generator, pieces = self.engine.generator, deque[Any]()
        key = generator.add(
            request, self.tokenizer, pieces.append, lambda sample, text: pieces.append(Piece(sample, text))
        )
        try:
            while True:
                while pieces:
                    piece = pieces.popleft()
                    if isinstance(piece, Piece):
                        yield piece
                    else:
                        key = None
                        yield from (Piece(i, "", one) for i, one in enumerate(samples_of(piece)))
                        return
                generator.step()
        finally:
            if key is not None:
                generator.cancel(key)

    async def agenerate(self, prompt: Any, **options: Any) -> Generated | list[Generated]:
        request = self._request(prompt, options)
        async for event in self._service.stream(request, self.tokenizer, text=False):
            if isinstance(event, list):
                return event if options.get("n") is not None else event[0]
        raise AssertionError("a request ended without an answer")

    async def astream(self, prompt: Any, **options: Any) -> AsyncIterator[Piece]:
        request = self._request(prompt, options)
        async for event in self._service.stream(request, self.tokenizer):
            if isinstance(event, list):
                for i, one in enumerate(event):
                    yield Piece(i, "", one)
            else:
                yield Piece(*event)

    @cached_property
    def _service(self) -> Service:
        return Service(self.engine.generator)

    def _request(self, prompt: Any, options: Mapping[str, Any]) -> GenerateRequest:
        """The request of one prompt, conversation, or mapping of the fields of GenerateItem."""
        (work,) = first_error(self.task("generate", **options).prepare([prompt]), single=True)
        return work.requests[0]


def samples_of(answer: list[Generated] | InputError) -> list[Generated]:
    if isinstance(answer, InputError):
        raise answer
    return answer
