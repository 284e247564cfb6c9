"""Check that a transformers model treats rows independently, so that trie rows can replace whole prompts.

The check compares transformers' attention over whole prompts with prefold's attention over the rows of their trie, in
several steps.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface

from ...engine.schedule.windows import WindowPlanner
from ...errors import PrefoldError, UnsupportedModelError
from ...model.config import Plane
from ...spec.requests import Readout, Request
from ...trie import Spool
from ...worker.torch.rows import Path, forward_stream, prepare, row_attention_of
from .config import PlaneHeads, TransformersConfig
from .model import NAME, PASSES, TransformersLM

# The name of the attention that records how modules call it.
NOTING = "prefold_noting"
# (length of a prompt, number of its first tokens that it shares with the prompt before)
PROMPTS = ((21, 0), (17, 9), (12, 12), (19, 3), (1, 0))
STEP = 11  # rows
# The relative difference that results may have, in float32 and in smaller dtypes: the first number, or TIMES the
# difference between transformers' own attentions (eager and sdpa) if that is larger, but at most the second number.
DIFFERENCE, ROUNDED_DIFFERENCE, TIMES = (1e-4, 1e-2), (0.1, 0.3), 3
# Arguments of attention that are handled here, and tensors that do not change its result.
KNOWN = {"sliding_window", "softcap", "s_aux", "position_ids", "position_embeddings"}
# Settings that break the rules only in prompts longer than the check's.
HIDDEN = {"attn_temperature_tuning": "its attention is weighed by a count of rows, not by position_ids"}
# The mask is checked at positions below this number.
MOST_SEEN = 1 << 17


@dataclass(frozen=True, slots=True)
class ExpectedOutputs:
    """The model's outputs for the check's prompts, by transformers' own attention."""

    states: Tensor  # hidden states of each prompt's last token, [prompts, hidden]
    logits: Tensor | None  # logits of each prompt's last token, [prompts, vocabulary]; None without an LM head

    def difference(self, other: ExpectedOutputs) -> float:
        """Return the larger of the relative differences of hidden states and of logits."""
        pairs = [(self.states, other.states), *([] if self.logits is None else [(self.logits, other.logits)])]
        return max(map(_difference, *zip(*pairs, strict=True)))


def _difference(got: Tensor, expected: Tensor) -> float:
    """Return the relative difference `|got - expected| / |expected|` between outputs [prompts, size].

    It is the largest of all prompts in float32 and float64. In smaller dtypes it is the median, because rounding may
    route a token to another expert.
    """
    parts = (got - expected).float().norm(dim=-1) / expected.float().norm(dim=-1).clamp(min=1e-6)
    return (parts.max() if _is_exact(got.dtype) else parts.median()).item()


def _is_exact(dtype: torch.dtype) -> bool:
    return dtype in (torch.float32, torch.float64)


@dataclass(slots=True)
class AttentionCalls:
    """How modules called attention in one pass, one plane per call."""

    # `most` is the number of positions at which masks are checked. `wrong` is the reason to refuse the model, or "".

    most: int
    planes: list[Plane] = field(default_factory=list)
    heads: list[PlaneHeads] = field(default_factory=list)
    wrong: str = ""


def prompts_for(vocab_size: int) -> list[np.ndarray]:
    """Return the check's prompts, int32 each. Most share their first tokens with the prompt before."""
    rng = np.random.default_rng(0)
    prompts: list[np.ndarray] = []
    for length, shared in PROMPTS:
        begin = prompts[-1][:shared] if prompts else np.empty(0, np.int32)
        more = rng.integers(0, vocab_size, length - len(begin)).astype(np.int32)
        prompts.append(np.concatenate((begin, more)))
    return prompts


def expected_of(model: TransformersLM) -> tuple[ExpectedOutputs, float]:
    """Return (the model's outputs for the check's prompts, the largest relative difference that rows may have).

    Raise UnsupportedModelError if the modules cannot be called with rows.
    """
    whole, config = model.whole, model.config
    if "position_ids" not in inspect.signature(type(model.decoder).forward).parameters:
        raise refused(config, "its modules take no position_ids, so rows cannot have their own positions")
    for key, reason in HIDDEN.items():
        if getattr(whole.config, key, None):
            raise refused(config, f"{reason} ({key})")
    if not getattr(whole, "_supports_attention_backend", False):
        raise refused(config, "its attention does not go through transformers' attention interface")
    with refusing(config, "its modules fail"):
        expected = _whole_prompts(model)
    most, bound = DIFFERENCE if _is_exact(model.dtype) else ROUNDED_DIFFERENCE
    if getattr(whole, "_supports_sdpa", False):
        with contextlib.suppress(Exception):  # some models refuse sdpa only when it runs
            use(whole, "sdpa")
            most = min(bound, max(most, TIMES * _whole_prompts(model).difference(expected)))
    return expected, most


def _whole_prompts(model: TransformersLM) -> ExpectedOutputs:
    states, logits = [], []
    for prompt in prompts_for(model.config.vocab_size):
        inputs = _arguments(prompt, model.device)
        states.append(model.decoder(**inputs)[0][0, -1])
        if model.config.lm_head:
            logits.append(model.whole(**inputs).logits[0, -1])
    return ExpectedOutputs(torch.stack(states), torch.stack(logits) if logits else None)


def note(model: TransformersLM) -> TransformersConfig:
    """Return the config with planes and head sizes, as found in one recorded pass.

    The modules call prefold's attention afterwards.
    """
    config, whole, rows = model.config, model.whole, model.rows
    use(whole, NOTING)
    rows.calls = calls = AttentionCalls(min(config.max_positions, MOST_SEEN))
    with refusing(config, "its modules fail with another attention"):
        model.decoder(**_arguments(prompts_for(config.vocab_size)[0], whole.device))
    rows.calls = None
    use(whole, NAME)
    if calls.wrong or not calls.heads:
        raise refused(config, calls.wrong or "no call of its attention goes through transformers' attention interface")
    heads = calls.heads
    if len({head.cap for head in heads}) > 1:
        raise refused(config, "its attention caps products in some layers only")
    kv_heads, dim = max(head.kv_heads for head in heads), max(max(head.head_dim, head.value_dim) for head in heads)
    groups = [head.groups(kv_heads)[1] for head in heads]
    scale = heads[0].scale
    return replace(
        config,
        heads=kv_heads * max(groups),
        kv_heads=kv_heads,
        head_dim=dim,
        query_scalar=None if scale == dim**-0.5 else scale**-2,
        attention_cap=heads[0].cap,
        planes=tuple(calls.planes),
        attention=tuple(heads),
    )


def use(whole: Any, name: str) -> None:
    """Make all modules of a model use the attention `name`."""
    for module in whole.modules():
        config: Any = getattr(module, "config", None)
        if hasattr(config, "_attn_implementation"):
            config._attn_implementation = name


def check(model: TransformersLM, expected: ExpectedOutputs, most: float) -> None:
    """Raise UnsupportedModelError if trie rows differ from the whole prompts by more than `most` (relative)."""
    config = model.config
    prompts = prompts_for(config.vocab_size)
    states = torch.empty_like(expected.states)
    attention, path = row_attention_of(config, model.dtype, model.device), Path()
    with Spool() as spool, refusing(config, "its modules fail with rows of several prompts"):
        for number, prompt in enumerate(prompts):
            spool.add(Request(prompt, None), str(number).encode())
        window = next(iter(spool.windows(max_tokens=1 << 20)))
        scheduler = WindowPlanner(window, Readout("last"), sharing="full", max_batch_rows=STEP)
        while (step := scheduler.plan()) is not None:
            batch = prepare(step.message, config, attention)
            path = path.truncate(step.message.path)
            hidden, kv = forward_stream(model, batch, path, {})
            if model.rows.plane != len(config.planes):
                raise refused(config, "passes differ in how often they call attention")
            for request, read in zip(step.requests.tolist(), step.request_reads.tolist(), strict=True):
                states[int(window.tags[request])] = hidden[read]
            path = Path(kv)
            scheduler.commit(step)
        pairs = [("hidden states", states, expected.states)]
        if expected.logits is not None:
            ids, logits = [0, config.vocab_size - 1, config.vocab_size // 2], model.logits(states)
            pairs.append(("logits", logits.to(expected.logits.dtype), expected.logits))
            pairs.append(("logits of some tokens", model.logits(states, ids), logits[:, ids]))
    for name, got, expected_values in pairs:
        difference = _difference(got, expected_values) if got.shape == expected_values.shape else torch.inf
        if not difference <= most:
            raise refused(
                config,
                f"rows that prompts share have other {name} than whole prompts (relative difference {difference:.1g}, "
                f"allowed {most:.1g}), so something besides attention over keys passes information between tokens",
            )


def refused(config: TransformersConfig, reason: str) -> UnsupportedModelError:
    """Return the error for a model that cannot run this way."""
    return UnsupportedModelError(f"{config.architecture} cannot run through transformers' modules: {reason}")


@contextlib.contextmanager
def refusing(config: TransformersConfig, what: str) -> Iterator[None]:
    """Turn exceptions of transformers' modules into the reason why the model is refused."""
    try:
        yield
    except (PrefoldError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise refused(config, f"{what}: {type(error).__name__}: {' '.join(str(error).split())[:300]}") from error


def _arguments(prompt: np.ndarray, device: torch.device) -> dict[str, Any]:
    tokens = torch.from_numpy(prompt.astype(np.int64)).to(device)[None]
    return {"input_ids": tokens, "position_ids": torch.arange(tokens.shape[1], device=device)[None], "use_cache": False}


def _mask(
    batch_size: int, q_length: int, kv_length: int, mask_function: Any, device: Any = None, **options: Any
) -> Tensor:
    """Return a mask of zeros that carries its mask function, for `_attention` to read."""
    mask = torch.zeros(batch_size, 1, q_length, kv_length, dtype=torch.bool, device=device)
    mask.prefold_shows = mask_function
    return mask


def _attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None, scaling: Any = None,
    dropout: float = 0.0, **options: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Record how attention is called, and return zeros [1, rows, heads, value_dim]."""
    calls: AttentionCalls = PASSES[module].calls
    window: int | None = None
    changes = sorted(
        name for name, option in options.items() if name not in KNOWN and isinstance(option, Tensor | float)
    )
    shows = getattr(attention_mask, "prefold_shows", None)
    if shows is None and isinstance(attention_mask, Tensor):
        shows = getattr(attention_mask._base, "prefold_shows", None)
    if key.shape[2] != query.shape[2] or value.shape[2] != query.shape[2] or query.shape[0] != 1:
        calls.wrong = "its attention is over other rows than the prompt's"
    elif shows is None and attention_mask is not None:
        calls.wrong = "it makes its own attention masks"
    elif changes:
        calls.wrong = f"its attention is called with {', '.join(changes)}, which prefold does not know"
    elif shows is not None:
        window = _window(shows, calls)
    rows, (heads, kv_heads) = query.shape[2], (query.shape[1], key.shape[1])
    scale = query.shape[3] ** -0.5 if scaling is None else float(scaling)
    sinks = options.get("s_aux") is not None
    calls.planes.append(Plane(window))
    calls.heads.append(
        PlaneHeads(heads, kv_heads, query.shape[3], value.shape[3], scale, options.get("softcap") or None, sinks)
    )
    return value.new_zeros(1, rows, heads, value.shape[3]), None


def _window(shows: Callable[..., Any], calls: AttentionCalls) -> int | None:
    """Return the sliding window of a mask; None if every earlier key is visible. Record any other mask as wrong."""
    most = calls.most
    keys = torch.arange(most)

    def seen_by(query: int) -> Tensor:
        return torch.as_tensor(shows(torch.tensor(0), torch.tensor(0), torch.tensor(query), keys)).expand(most)

    if seen_by(0)[1:].any():
        calls.wrong = "its attention is in both directions"
        return None
    last = seen_by(most - 1)
    window = most - int(last.int().argmax()) if last.any() else 1
    lengths = {0, 1, window - 1, window, window + 1, 2 * window + 1, most // 2, most - 1}
    for query in (number for number in lengths if number < most):
        distance = query - keys
        if not torch.equal(seen_by(query), (distance >= 0) & (distance < window)):
            calls.wrong = "its mask is neither causal nor a sliding window"
            return None
    return None if window == most else window


AttentionInterface.register(NOTING, _attention)
AttentionMaskInterface.register(NOTING, _mask)
