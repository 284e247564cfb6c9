"""The state that determines a sample's next token, and the Drawing message for the worker."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from ..spec.requests import Sampling
from ..spec.task import SamplerOptions, filters_of, penalties_of
from ..text.grammar import Matcher
from ..trie import MEDIA_BASE
from .schedule.steps import Drawing, RaggedLists

_WORD = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15  # 2^64 over the golden ratio: the step of SplitMix64


def _mix(x: int) -> int:
    """Return x after the finalizer of SplitMix64 (Steele et al. 2014): each bit of x changes about half of the bits."""
    x &= _WORD
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & _WORD
    x = (x ^ x >> 27) * 0x94D049BB133111EB & _WORD
    return x ^ x >> 31


def make_stream(seed: int, sample: int) -> int:
    """Return the 64-bit number from which the keys of a sample's positions are derived."""
    return _mix(_mix(seed + _GOLDEN) + sample)


def make_key(stream: int, position: int) -> int:
    """Return the 64-bit key for the draw at a position of a sample: number `position` of SplitMix64."""
    return _mix(stream + (position + 1) * _GOLDEN)


def hash_ids(ids: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Return 32 random bits for each token id, uint32 [n].

    `ids` [n] are whole numbers below 2**32; `keys` are uint64 [n], or [1] for all. The hash is Wellons' `triple32`,
    with half of the key mixed in before each of its first two products.
    """
    keys = keys.astype(np.uint64, copy=False)
    x = ids.astype(np.uint32) ^ keys.astype(np.uint32)
    x ^= x >> np.uint32(17)
    x *= np.uint32(0xED5AD4BB)
    x ^= x >> np.uint32(11)
    x ^= (keys >> np.uint64(32)).astype(np.uint32)
    x *= np.uint32(0xAC4C1B51)
    x ^= x >> np.uint32(15)
    x *= np.uint32(0x31848BAB)
    x ^= x >> np.uint32(14)
    return x


def gumbel(hashes: np.ndarray) -> np.ndarray:
    """Return Gumbel noise from hashes uint32 [n]: float64 [n] between -3.2 and 22.9, the range of 32 bits."""
    return -np.log(-np.log(1.0 - (hashes + 0.5) * 2.0**-32))


# Below this temperature, float32 cannot represent the quotients of logits well, so sampling is greedy.
GREEDY_BELOW = 1e-5
NO_PENALTIES = penalties_of(SamplerOptions())


class SamplerState:
    """All inputs of the choice of a sample's next token: options, key, position, and tokens so far.

    Attributes:
        position: The place in the output of the next token: 0 for the first.
        matcher: Follows the sample's grammar; None without one.
        end_ids: The ids that end the sample; banned before min_tokens.
    """

    def __init__(
        self,
        sampling: Sampling,
        *,
        seed: int,
        sample: int = 0,
        prompt: Sequence[int] | np.ndarray = (),
        end_ids: Iterable[int] = (),
        matcher: Matcher | None = None,
    ):
        """Create the state before the first token.

        Args:
            prompt: Token ids. Only a repetition penalty reads them, and it skips image rows.
            matcher: This state advances it from now on.
        """
        self.sampling = sampling
        self.matcher = matcher
        self.position = 0
        self.end_ids = np.array(sorted(set(end_ids)), np.int64)
        self.greedy = sampling.temperature < GREEDY_BELOW
        self.bias_ids = np.array([token for token, _ in sampling.logit_bias], np.int64)
        self.bias = np.array([value for _, value in sampling.logit_bias], np.float32)
        filters = filters_of(sampling)
        self.filters = (0.0, *filters[1:]) if self.greedy else filters
        self.penalties = penalties_of(sampling)
        self.penalised = self.penalties != NO_PENALTIES
        self._bare = self.greedy and not self.penalised and not sampling.logit_bias
        self._bare = self._bare and matcher is None and sampling.logprobs is None
        self._stream = make_stream(seed, sample)
        prompt_tokens = prompt if sampling.repetition_penalty != 1.0 else ()
        self._ids = np.unique(np.asarray(prompt_tokens, np.int64))
        self._ids = self._ids[self._ids < MEDIA_BASE]
        self._counts = np.zeros(self._ids.size, np.float32)
        self._place = {token: i for i, token in enumerate(self._ids.tolist())} if self.penalised else {}

    def plain(self, ahead: int = 0) -> bool:
        """Return True if the next token is the most likely one, without log-probabilities.

        `ahead` tokens before it are still in flight.
        """
        return self._bare and (self.position + ahead >= self.sampling.min_tokens or not self.end_ids.size)

    @property
    def independent(self) -> bool:
        """True if a token can be drawn without the tokens before it, and without log-probabilities."""
        return not self.penalised and self.matcher is None and self.sampling.logprobs is None

    def banned_ids(self, ahead: int = 0) -> np.ndarray:
        """Return the ids, int64, that are banned as the next token because the sample would end before min_tokens.

        `ahead` tokens before the next one are still in flight.
        """
        return self.end_ids if self.position + ahead < self.sampling.min_tokens else self.end_ids[:0]

    def advance(self, token: int) -> bool:
        """Append `token` to the output. Return True if the sample ends because the grammar allows no further token."""
        self.position += 1
        if self.penalised:
            self._count(token)
        if self.matcher is None:
            return False
        self.matcher.accept(token)
        return self.matcher.is_done

    def key(self, ahead: int = 0) -> int:
        """Return the 64-bit key of the noise for the token at `position` + `ahead`."""
        return make_key(self._stream, self.position + ahead)

    @property
    def output_counts(self) -> tuple[np.ndarray, np.ndarray]:
        """The ids with penalties, int64, and how often each occurs in the output, float32."""
        return self._ids[: len(self._place)], self._counts[: len(self._place)]

    def _count(self, token: int) -> None:
        place = self._place.setdefault(token, len(self._place))
        if place == self._ids.size:
            more = np.zeros(max(64, place), np.int64)
            self._ids, self._counts = np.append(self._ids, more), np.append(self._counts, more.astype(np.float32))
        self._ids[place] = token
        self._counts[place] += 1.0


def drawing_of(states: Sequence[SamplerState | None], ahead: Sequence[int]) -> Drawing | None:
    """Return the Drawing of a step's tokens; None if each is the most likely token.

    Args:
        states: The state of the sample at each read; None if any token will do.
        ahead: For each read, how many tokens of its sample are still in flight.
    """
    reads = [(i, state, ahead[i]) for i, state in enumerate(states) if state is not None and not state.plain(ahead[i])]
    if not reads:
        return None
    samplers = [state for _, state, _ in reads]
    end_ids = [(ids, np.zeros(len(ids), np.float32)) for ids in (state.banned_ids(n) for _, state, n in reads)]
    has_penalties = any(state.penalised for state in samplers)
    grammar_reads = [i for i, state in enumerate(samplers) if state.matcher is not None]
    logprobs = [-1 if state.sampling.logprobs is None else state.sampling.logprobs for state in samplers]
    return Drawing(
        reads=np.array([i for i, _, _ in reads], np.int64),
        filters=np.array([state.filters for state in samplers], np.float64),
        keys=np.array([state.key(n) for _, state, n in reads], np.uint64),
        logprobs=np.array(logprobs, np.int64),
        bias=RaggedLists.of([(state.bias_ids, state.bias) for state in samplers]),
        banned_ids=RaggedLists.of(end_ids),
        penalties=np.array([state.penalties for state in samplers], np.float64) if has_penalties else None,
        output_counts=RaggedLists.of([state.output_counts for state in samplers]) if has_penalties else None,
        grammar_reads=np.array(grammar_reads, np.int64),
        grammar_masks=np.stack([samplers[i].matcher.mask() for i in grammar_reads]) if grammar_reads else None,  # type: ignore[union-attr]
    )
