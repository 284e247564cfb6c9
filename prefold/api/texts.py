"""Holds the methods of LLM whose answers are text: generate, chat, stream, agenerate, astream."""

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
    """A CallKeywords holds the keywords of `generate` and `chat`, but `n` and `errors`, which decide what comes
    back."""

    adapter: str | Sequence[str | None] | None
    progress: bool


class Texts(TableTasks):
    """A Texts has the methods generate, chat and stream, and agenerate and astream for event loops.

    n        answers to each prompt; where it is given, even as 1, a prompt's answer is a list of Generated
    adapter  the LoRA adapter that answers; for several prompts also a list of one name, or None, a prompt
    errors   "raise": the first bad prompt raises its InputError, before anything is computed. "return": the good
             prompts are computed, and each bad one has its InputError in its place
    progress whether to show a bar on standard error
    options  the fields of GenerationOptions: max_tokens, temperature, top_p, stop, seed, logprobs, grammar,
             response_format, system, tools, salt, ... ; greedy and at most 256 tokens by default

    `generate` and `chat` also take a table, as the other methods do (NumericTasks), and add the columns `text`,
    `finish_reason` and `num_generated`. `prompt` is the column of the prompts, or a text with {column} in it; for
    `chat` it is what the user says, and `conversation` a column of lists of messages.
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
        """Returns what follows each prompt: a Generated a prompt, or with `n` a list of them.

        A prompt is a text, token ids, or a mapping of the fields of GenerateItem: {"prompt": ..., "adapter": ...}.
        Raises InputError naming the prompt that cannot be continued.
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
        """Returns the model's answer to a conversation, [{"role": ..., "content": ...}, ...], or to each of a list.

        The conversation is written in the checkpoint's chat template, or in the one named by chat_template. Raises
        InputError naming the conversation that cannot be answered.
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
            work if isinstance(work, InputError) else result[0]  # an InputError where it could not run
            for work, result in zip(works, results, strict=True)
        ]
        if not call.back:
            first_error(outputs, call.argument, single=call.single)
        # An item may ask for several samples by itself.
        answers: list[Answer] = [
            out if n is not None or isinstance(out, InputError) or len(out) > 1 else out[0] for out in outputs
        ]
        return answers[0] if call.single else answers

    def stream(
        self, prompt: Prompt, *, n: int | None = None, adapter: str | None = None, **options: Unpack[GenerationKeywords]
    ) -> Iterator[Piece]:
        """Returns the answer to one prompt, or conversation, piece by piece as it is made.

        There is at most one Piece a sample and step; the last of a sample carries its Generated. Leaving the loop
        early, or closing the iterator, cancels the request. Raises InputError where the prompt cannot be continued.
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
        """Returns what follows one prompt, or conversation; with `n` a list of that. For event loops.

        Calls that wait at the same time run together. A call that is cancelled cancels its request. Raises InputError
        where the prompt cannot be continued.
        """
        request = self._request(prompt, n, adapter, options)
        async for event in astream(self.engine, request, self.tokenizer, text=False):
            if isinstance(event, list):
                return event[0] if n is None and len(event) == 1 else event
        raise AssertionError("a request ended without an answer")

    async def astream(
        self, prompt: Prompt, *, n: int | None = None, adapter: str | None = None, **options: Unpack[GenerationKeywords]
    ) -> AsyncIterator[Piece]:
        """Returns the answer to one prompt, or conversation, piece by piece, as `stream` does. For event loops.

        Raises InputError where the prompt cannot be continued.
        """
        request = self._request(prompt, n, adapter, options)
        async for event in astream(self.engine, request, self.tokenizer):
            if isinstance(event, list):
                for i, sample in enumerate(event):
                    yield Piece(i, "", sample)
            else:
                yield Piece(event.sample, event.text)

    def _request(self, prompt: Prompt, n: int | None, adapter: str | None, options: Mapping[str, Any]) -> Request:
        """Returns the request of one prompt, conversation, or mapping of the fields of GenerateItem."""
        samples = {} if n is None else {"n": n}
        task = self.task("generate", adapter=adapter, **samples, **options)
        (work,) = first_error(task.prepare([as_list(prompt, "prompt")]), single=True)
        warn_of_images([work])
        return with_seed(work.requests[0], seed_of(task), 0)


def _one_answer(n: int | None, options: CallKeywords) -> None:
    """Raise InputError if a row of a table would get more than one text."""
    for name, value in {"n": n, "logprobs": options.get("logprobs")}.items():
        if value is not None:
            message, remedy = f"{name} is for lists: a row of a table gets one text", "leave it out, or give a list"
            raise InputError(message, field=name, remedy=remedy)


def samples_of(answer: list[Generated] | InputError) -> list[Generated]:
    """Returns the samples of a request. Raises the InputError of a request that could not run."""
    if isinstance(answer, InputError):
        raise answer
    return answer
