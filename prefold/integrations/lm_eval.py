"""Add the model "prefold" to EleutherAI's lm-evaluation-harness.

    python -m prefold.integrations.lm_eval --model prefold --model_args pretrained=smollm2-135m --tasks ...

This is the command `lm_eval` with one more model. The harness has a fixed list of models and no hook for others, so the
module that adds a model must be imported first. In Python the import is enough:

    import prefold.integrations.lm_eval
    lm_eval.simple_evaluate(model="prefold", model_args={"pretrained": "smollm2-135m"}, tasks=["..."])

`--device` names a device as for the harness's own model. A missing GPU is replaced by the CPU.

Encoding, truncation and scoring follow the harness's own model "hf", so the scores are equal.
"""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import InputError, MissingExtraError, PrefoldError
from ..llm import LLM
from ..model.machine import choose_device
from ..spec.fields import check_options
from ..spec.model import ModelSpec
from ..spec.task import FILTERS, PENALTIES
from ..tasks import ScoreItem
from ..tasks.score import leading_ids

try:
    import lm_eval.models  # noqa: F401  (fills the list of models, which the harness does only while it is empty)
    from lm_eval.api.model import LM
    from lm_eval.api.registry import model_registry
    from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text
except ImportError as error:
    raise MissingExtraError("lm_eval", "lm-eval", "the model of lm-evaluation-harness") from error

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance

__all__ = ["PrefoldLM", "main"]

# {option of a task's generation_kwargs: its name in prefold}. _SAMPLED apply only to requests that sample.
_SAMPLED = {name: name for name in FILTERS}
_ALWAYS = {name: name for name in (*PENALTIES, "seed")} | {"min_new_tokens": "min_tokens"}


class PrefoldLM(LM):
    """A model of lm-evaluation-harness that prefold computes.

    `batch_size`, `max_batch_size` and `trust_remote_code` are ignored: prefold forms its own batches, and never runs a
    checkpoint's code.

    Args:
        pretrained: as for `LLM`: hub id, folder, .gguf file or built-in name; or an LLM
        max_length: tokens of context; None: the checkpoint's
        max_gen_toks: tokens to generate for tasks without a limit
        prefix_token_id: the token for an empty context; None: BOS, else EOS
        enable_thinking: passed to the chat template, unless None
        think_end_token: text that ends a model's reasoning; the answer follows it
        device: "auto", "cpu", "cuda", ...; a missing GPU is replaced by the CPU, because the harness names a GPU by
            default
        options: further options of `LLM`: dtype, threads, revision, sharing, ...

    Raises:
        InputError: without `pretrained`, or for an option that `LLM` does not have

    Example:
        lm_eval.simple_evaluate(model=PrefoldLM("smollm2-135m"), tasks=["arc_easy"])
    """

    def __init__(
        self,
        pretrained: str | LLM | None = None,
        *,
        max_length: int | None = None,
        max_gen_toks: int = 256,
        prefix_token_id: int | None = None,
        enable_thinking: bool | None = None,
        think_end_token: str | None = None,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        trust_remote_code: bool = False,
        device: str | None = None,
        **options: Any,
    ):
        super().__init__()
        _check_options(pretrained, options)
        self.llm = pretrained
        if not isinstance(pretrained, LLM):
            self.llm = LLM(str(pretrained), device=device_or_cpu(device), **options)
        if self.llm.tokenizer is None:
            name = self.llm.checkpoint.name
            raise InputError(f"{name} has no tokenizer", field="pretrained", remedy="give a model that has one")
        self._tokenizer = self.llm.tokenizer
        self._device = self.llm.device
        self.max_length = max_length or self.llm.config.max_positions
        self.max_gen_toks = max_gen_toks
        self.think_end_token = think_end_token
        self.eot_token_id = self._tokenizer.eos_id
        candidates = (prefix_token_id, self._tokenizer.bos_id, self._tokenizer.eos_id)
        self.prefix_token_id = next((number for number in candidates if number is not None), None)
        self._score = self.llm.task(
            "score", prefix_token=self.prefix_token_id, max_length=self.max_length, truncate=True
        )
        self._template_options = {} if enable_thinking is None else {"enable_thinking": enable_thinking}

    @property
    def tokenizer_name(self) -> str:
        """Return the name under which the harness caches requests."""
        return str(self.llm.checkpoint.name).replace("/", "__")

    def loglikelihood(self, requests: Sequence[Instance]) -> list[tuple[float, bool]]:
        """Return (log-probability, every token is the likeliest) of each continuation after its context."""
        items = [ScoreItem(prompt=context, continuation=text) for context, text in (r.args for r in requests)]
        return [(line["logprob"], line["greedy"]) for line in self.llm.run(self._score, items)]

    def loglikelihood_rolling(self, requests: Sequence[Instance]) -> list[float]:
        """Return the log-probability of each text. A leading BOS is scored like any other token."""
        texts = self._encode([request.args[0] for request in requests])
        lines = iter(self.llm.run(self._score, [ScoreItem(text=ids) for ids in texts if ids.size]))
        return [next(lines)["logprob"] if ids.size else 0.0 for ids in texts]

    def generate_until(self, requests: Sequence[Instance]) -> list[str]:
        """Return the text after each context, up to its first stop string."""
        groups: dict[str, list[int]] = {}
        for number, request in enumerate(requests):
            groups.setdefault(json.dumps(request.args[1], sort_keys=True), []).append(number)
        texts = [""] * len(requests)
        for numbers in groups.values():
            answers = self._generate([requests[i].args[0] for i in numbers], requests[numbers[0]].args[1])
            for number, text in zip(numbers, answers, strict=True):
                texts[number] = text
        return texts

    def _generate(self, contexts: Sequence[str], gen_kwargs: dict[str, Any]) -> list[str]:
        options: dict[str, Any] = dict(normalize_gen_kwargs(gen_kwargs, self.max_gen_toks))
        max_tokens = options.pop("max_gen_toks")
        room = self.max_length - max_tokens
        if room < 1:
            raise InputError(
                f"max_gen_toks is {max_tokens}; the model's context is {self.max_length} tokens",
                field="max_gen_toks",
                remedy="give a smaller max_gen_toks",
            )
        eos = None if self.eot_token_id is None else self._tokenizer.decode([self.eot_token_id])
        until = [text for text in handle_stop_sequences(options.pop("until"), eos=eos) if text]
        # A special token decodes to an empty text, so it has to stop generation as an id.
        ids = (self._tokenizer.token_id(text) for text in until)
        outputs = self.llm.generate(
            [(ids if ids.size else self._prefix())[-room:] for ids in self._encode(contexts)],
            max_tokens=max_tokens,
            stop=until,
            stop_ids=[number for number in ids if number is not None],
            **_sampling(options),
        )
        return [postprocess_generated_text(output.text, until, self.think_end_token) for output in outputs]

    def _prefix(self) -> np.ndarray:
        if self.prefix_token_id is None:
            message = "the tokenizer has neither a BOS nor an EOS token to stand for an empty context"
            raise InputError(message, field="context", remedy="give prefix_token_id")
        return np.array([self.prefix_token_id], np.int32)

    def _encode(self, texts: Iterable[str]) -> list[np.ndarray]:
        """Return the token ids of texts, int32, with the tokenizer's leading special tokens, even for empty texts."""
        texts = list(texts)
        ids = self._tokenizer.encode_batch(texts, special=False)
        before = [leading_ids(self._tokenizer, text) if text else self._tokenizer.prefix_ids for text in texts]
        return [np.concatenate(pair) for pair in zip(before, ids, strict=True)]

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Return the text of a conversation, without its system messages if the template refuses them."""
        options = {"add_generation_prompt": add_generation_prompt, "continue_final_message": not add_generation_prompt}
        options |= self._template_options
        try:
            return self._tokenizer.render_chat(chat_history, **options)
        except InputError:
            conversation = [message for message in chat_history if message["role"] != "system"]
            if len(conversation) == len(chat_history):
                raise
            return self._tokenizer.render_chat(conversation, **options)

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """Return the chat template, for the harness's record of a run."""
        templates = self._tokenizer.chat_templates.templates
        if not chat_template or not templates:
            return None
        template = templates.get(chat_template) if isinstance(chat_template, str) else None
        return template or templates.get("default") or next(iter(templates.values()))

    def get_model_info(self) -> dict[str, Any]:
        """Return facts about the model, for the harness's record of a run."""
        from .. import __version__

        return {
            "model_num_parameters": self.llm.config.num_parameters,
            "model_dtype": str(self.llm.dtype).removeprefix("torch."),
            "prefold_version": __version__,
        }


def device_or_cpu(name: str | None) -> str:
    """Return the device to load on. A missing GPU is replaced by "cpu", with a line on standard error."""
    if name is None:
        return "auto"
    if (reason := _missing(str(name))) is None:
        return str(name)
    print(f"prefold: there is no device {name} here{reason}; using cpu", file=sys.stderr)
    return "cpu"


def _missing(name: str) -> str | None:
    """Return why a GPU is missing, as a suffix for a message, or None if the device is not a missing GPU."""
    kind = name.partition(":")[0]
    if kind != "cuda":
        return "" if kind in ("mps", "npu", "xpu") else None
    try:
        choose_device(name)
    except InputError as error:
        return f" ({error})"
    return None


def _check_options(pretrained: object, options: Mapping[str, object]) -> None:
    """Raise InputError if the model is not named, or if an option is not one of LLM's."""
    if pretrained is None:
        remedy = "add --model_args pretrained=NAME (a hub id, a folder, a .gguf file, or a built-in name)"
        raise InputError("the model is not named", field="pretrained", remedy=remedy, code="missing_option")
    own_names = [name for name in inspect.signature(PrefoldLM).parameters if name not in ("options", "device")]
    check_options("the model", options, sorted([*ModelSpec.__dataclass_fields__, *own_names]))


def _sampling(options: dict[str, Any]) -> dict[str, Any]:
    """Return options of `LLM.generate` for a task's generation_kwargs without lengths and stops.

    Raise InputError for unknown ones.
    """
    sampled = options.pop("do_sample")
    if options.get("num_beams") == 1:
        del options["num_beams"]
    names = _SAMPLED | _ALWAYS
    for name in options:
        if name not in names:
            raise InputError(
                f"generation_kwargs has the unknown option {name!r}",
                field=name,
                remedy=f"leave it out; known are {', '.join(names)}",
            )
    return {ours: options[name] for name, ours in (names if sampled else _ALWAYS).items() if name in options}


def main() -> None:
    """Run the harness's command line. A prefold error prints one line and exits with status 1."""
    from lm_eval.__main__ import cli_evaluate

    try:
        cli_evaluate()
    except PrefoldError as error:
        sys.exit(f"prefold: {error}")


# Registered by path, because `python -m` runs this file under the module name `__main__`.
model_registry.register("prefold", target="prefold.integrations.lm_eval:PrefoldLM")

if __name__ == "__main__":
    main()
