"""The methods of LLM that generate text: generate, chat, stream, agenerate, astream."""

from __future__ import annotations

from collections.abc import AsyncIterator, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any, Literal, TypeAlias, Unpack, cast, overload

from ..engine.calls import stream
from ..engine.samples import TextPiece
from ..errors import InputError
from ..spec.requests import Generated, Request
from ..tasks.results import Piece
from ..tasks.run import seed_of, with_seed
from .arguments import Message, Prompt, Text, as_items, as_list, chats_of, first_error, only_tables
from .keywords import GenerationKeywords
from .running import read_call, warn_of_images
from .streams import astream
from .tables import Table, TableCall, TableTasks, kind_of

Item: TypeAlias = "Text | Mapping[str, object]"  # a prompt, or the fields of GenerateItem
Answer = Generated | InputError | list[Generated]
Errors = Literal["raise", "return"]
Raise = Literal["raise"]
Return = Literal["return"]


class CallKeywords(GenerationKeywords, total=False):
    """The keywords of `generate` and `chat`, except `n` and `errors`, which determine the type of the answer."""

    adapter: str | Sequence[str | None] | None
    progress: bool


class Texts(TableTasks):
    """The methods generate, chat and stream, and agenerate and astream for event loops.

    These keywords mean the same in all of them:

    - n: Number of answers for each prompt. If `n` is given, even as 1, a prompt's answer is a list of Generated.
    - adapter: LoRA adapter that answers. In `generate` and `chat` also a list with a name or None for each prompt.
    - Sampling options: max_tokens, temperature, top_p, stop, seed, logprobs, grammar, response_format and others. By
      default generation is greedy, with at most 256 tokens.
    - Prompt options: system, tools, chat_template, truncate, salt and others.

    `generate` and `chat` also accept a table, as the other methods do, and add the columns `text`, `finish_reason` and
    `num_generated`.
    """

    @overload
    def generate(  # type: ignore[overload-overlap]  # a str is a Sequence[str] too
        self, prompts: Item, *, n: None = None, errors: Raise = "raise", **options: Unpack[CallKeywords]
    ) -> Generated: ...
    @overload
    def generate(
        self, prompts: Sequence[Item], *, n: None = None, errors: Raise = "raise", **options: Unpack[CallKeywords]
    ) -> list[Generated]: ...
    @overload
    def generate(  # type: ignore[overload-overlap]
        self, prompts: Item, *, n: int, errors: Raise = "raise", **options: Unpack[CallKeywords]
    ) -> list[Generated]: ...
    @overload
    def generate(
        self, prompts: Sequence[Item], *, n: int, errors: Raise = "raise", **options: Unpack[CallKeywords]
    ) -> list[list[Generated]]: ...
    @overload
    def generate(
        self, prompts: Sequence[Item], *, n: None = None, errors: Return, **options: Unpack[CallKeywords]
    ) -> list[Generated | InputError]: ...
    @overload
    def generate(
        self, prompts: Table, *, prompt: str | None = None, errors: Errors = "raise", **options: Unpack[CallKeywords]
    ) -> Table: ...
    def generate(
        self,
        prompts: Item | Sequence[Item] | Table,
        *,
        prompt: str | None = None,
        n: int | None = None,
        errors: Errors = "raise",
        **options: Unpack[CallKeywords],
    ) -> Answer | Sequence[Answer] | Table:
        """Continue each prompt.

        Args:
            prompts: One prompt or a list of prompts, or a table. A prompt is a text, token ids, or a mapping with
                fields of GenerateItem, such as {"prompt": ..., "adapter": ...}.
            prompt: For a table: the column with the prompts, or a template.
            n: Number of answers for each prompt.
            errors: "raise", or "return" the InputErrors of bad prompts.
            **options: Sampling options such as max_tokens, temperature and stop; adapter, progress.

        Returns:
            A Generated for each prompt; with `n`, a list of Generated for each prompt.

        Raises:
            InputError: A prompt cannot be continued. The message names it.

        Example:
            >>> llm.generate("The capital of France is", max_tokens=3).text
        """
        if kind_of(prompts):
            _one_answer(n, options)
            columns = {"prompt": ("prompt", prompt)}
            return self._on_table(cast(Table, prompts), TableCall("generate", "prompts", columns, errors, options))
        only_tables(prompt=prompt)
        items, single = as_items(prompts, "prompts", mapping=True)
        return self._generate(items, "prompts", single, errors, n, options)

    @overload
    def chat(
        self, messages: Sequence[Message], *, n: None = None, errors: Raise = "raise", **options: Unpack[CallKeywords]
    ) -> Generated: ...
    @overload
    def chat(
        self,
        messages: Sequence[Sequence[Message]],
        *,
        n: None = None,
        errors: Raise = "raise",
        **options: Unpack[CallKeywords],
    ) -> list[Generated]: ...
    @overload
    def chat(
        self, messages: Sequence[Message], *, n: int, errors: Raise = "raise", **options: Unpack[CallKeywords]
    ) -> list[Generated]: ...
    @overload
    def chat(
        self, messages: Sequence[Sequence[Message]], *, n: int, errors: Raise = "raise", **options: Unpack[CallKeywords]
    ) -> list[list[Generated]]: ...
    @overload
    def chat(
        self, messages: Sequence[Sequence[Message]], *, n: None = None, errors: Return, **options: Unpack[CallKeywords]
    ) -> list[Generated | InputError]: ...
    @overload
    def chat(
        self,
        messages: Table,
        *,
        prompt: str | None = None,
        conversation: str | None = None,
        errors: Errors = "raise",
        **options: Unpack[CallKeywords],
    ) -> Table: ...
    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]] | Table,
        *,
        prompt: str | None = None,
        conversation: str | None = None,
        n: int | None = None,
        errors: Errors = "raise",
        **options: Unpack[CallKeywords],
    ) -> Answer | Sequence[Answer] | Table:
        """Answer each conversation, formatted by the checkpoint's chat template or by `chat_template`.

        Args:
            messages: One conversation [{"role": ..., "content": ...}, ...] or a list of conversations, or a table.
            prompt: For a table: the column with the user's messages, or a template.
            conversation: For a table: the column with lists of messages.
            n: Number of answers for each conversation.
            errors: "raise", or "return" the InputErrors of bad conversations.
            **options: Sampling options such as max_tokens, temperature and stop; system, tools, chat_template,
                chat_template_kwargs, adapter, progress.

        Returns:
            A Generated for each conversation; with `n`, a list of Generated for each conversation.

        Raises:
            InputError: A conversation cannot be answered. The message names it.

        Example:
            >>> llm.chat([{"role": "user", "content": "Why is the sky blue?"}]).text
        """
        if kind_of(messages):
            _one_answer(n, options)
            columns = {"prompt": ("prompt", prompt), "messages": ("conversation", conversation)}
            asked = TableCall("generate", "messages", columns, errors, options, chat=True)
            return self._on_table(cast(Table, messages), asked)
        only_tables(prompt=prompt, conversation=conversation)
        items, single = chats_of(messages)
        return self._generate(items, "messages", single, errors, n, options)

    def _generate(
        self, items: list[Any], argument: str, single: bool, errors: Errors, n: int | None, options: CallKeywords
    ) -> Answer | Sequence[Answer]:
        call, items, rest = read_call(argument, items, single, errors, options)
        task = self.task("generate", **rest if n is None else rest | {"n": n})
        works, results = self._results(task, items, call)
        outputs: list[InputError | list[Generated]] = [
            work if isinstance(work, InputError) else result[0]  # an InputError if the request could not run
            for work, result in zip(works, results, strict=True)
        ]
        if not call.back:
            first_error(outputs, call.argument, single=call.single)
        # An item may have its own `n`.
        answers: list[Answer] = [
            out if n is not None or isinstance(out, InputError) or len(out) > 1 else out[0] for out in outputs
        ]
        return answers[0] if call.single else answers

    def stream(
        self, prompt: Prompt, *, n: int | None = None, adapter: str | None = None, **options: Unpack[GenerationKeywords]
    ) -> Iterator[Piece]:
        """Generate the answer to one prompt or conversation, and yield it piece by piece.

        Leaving the loop early, or closing the iterator, cancels the request.

        Args:
            prompt: A text, token ids, or a conversation.
            n: Number of answers.
            adapter: LoRA adapter that answers.
            **options: As for `generate` and `chat`.

        Returns:
            An iterator of Piece. A step yields at most one Piece per sample. The last Piece of a sample contains its
            Generated.

        Raises:
            InputError: The prompt cannot be continued.

        Example:
            >>> for piece in llm.stream("Once upon a time"):
            ...     print(piece.text, end="")
        """
        return self._stream(self._request(prompt, n, adapter, options))

    def _stream(self, request: Request) -> Iterator[Piece]:
        with closing(cast(Generator[Any, None, None], stream(self.engine, [request], self.tokenizer))) as events:
            for _, event in events:
                if isinstance(event, TextPiece):
                    yield Piece(event.sample, event.text)
                else:
                    yield from (Piece(i, "", sample) for i, sample in enumerate(samples_of(event)))

    @overload
    async def agenerate(
        self, prompt: Prompt, *, n: None = None, adapter: str | None = None, **options: Unpack[GenerationKeywords]
    ) -> Generated: ...
    @overload
    async def agenerate(
        self, prompt: Prompt, *, n: int, adapter: str | None = None, **options: Unpack[GenerationKeywords]
    ) -> list[Generated]: ...
    async def agenerate(
        self, prompt: Prompt, *, n: int | None = None, adapter: str | None = None, **options: Unpack[GenerationKeywords]
    ) -> Generated | list[Generated]:
        """Generate the answer to one prompt or conversation, in an event loop.

        Calls that wait at the same time run together. Cancelling a call cancels its request.

        Args:
            prompt: A text, token ids, or a conversation.
            n: Number of answers.
            adapter: LoRA adapter that answers.
            **options: As for `generate` and `chat`.

        Returns:
            A Generated; with `n`, a list of Generated.

        Raises:
            InputError: The prompt cannot be continued.

        Example:
            >>> answer = await llm.agenerate("The capital of France is", max_tokens=3)
        """
        request = self._request(prompt, n, adapter, options)
        async for event in astream(self.engine, request, self.tokenizer, text=False):
            if isinstance(event, list):
                return event[0] if n is None and len(event) == 1 else event
        raise AssertionError("a request ended without an answer")

    async def astream(
        self, prompt: Prompt, *, n: int | None = None, adapter: str | None = None, **options: Unpack[GenerationKeywords]
    ) -> AsyncIterator[Piece]:
        """Generate the answer to one prompt or conversation piece by piece, in an event loop; see `stream`.

        Args:
            prompt: A text, token ids, or a conversation.
            n: Number of answers.
            adapter: LoRA adapter that answers.
            **options: As for `generate` and `chat`.

        Returns:
            An asynchronous iterator of Piece.

        Raises:
            InputError: The prompt cannot be continued.

        Example:
            >>> async for piece in llm.astream("Once upon a time"):
            ...     print(piece.text, end="")
        """
        request = self._request(prompt, n, adapter, options)
        async for event in astream(self.engine, request, self.tokenizer):
            if isinstance(event, list):
                for i, sample in enumerate(event):
                    yield Piece(i, "", sample)
            else:
                yield Piece(event.sample, event.text)

    def _request(self, prompt: Prompt, n: int | None, adapter: str | None, options: Mapping[str, Any]) -> Request:
        """Return the request of one prompt, conversation, or mapping with fields of GenerateItem."""
        samples = {} if n is None else {"n": n}
        task = self.task("generate", adapter=adapter, **samples, **options)
        (work,) = first_error(task.prepare([as_list(prompt, "prompt")]), single=True)
        warn_of_images([work])
        return with_seed(work.requests[0], seed_of(task), 0)


def _one_answer(n: int | None, options: CallKeywords) -> None:
    """Raise InputError for options that a table cannot have, because its rows get one text each."""
    for name, value in {"n": n, "logprobs": options.get("logprobs")}.items():
        if value is not None:
            message, remedy = f"{name} is for lists: a row of a table gets one text", "leave it out, or give a list"
            raise InputError(message, field=name, remedy=remedy)


def samples_of(answer: list[Generated] | InputError) -> list[Generated]:
    """Return the samples of a request, or raise its InputError."""
    if isinstance(answer, InputError):
        raise answer
    return answer
