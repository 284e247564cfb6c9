"""The state on which the choice of a sample's next token depends, and the Drawing that tells a worker of it."""

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
    """Returns x after the finaliser of SplitMix64 (Steele et al. 2014): every bit of x changes about half of the 64."""
    x &= _WORD
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & _WORD
    x = (x ^ x >> 27) * 0x94D049BB133111EB & _WORD
    return x ^ x >> 31


def make_stream(seed: int, sample: int) -> int:
    """Returns the 64-bit number from which the keys of one sample's positions are made."""
    return _mix(_mix(seed + _GOLDEN) + sample)


def make_key(stream: int, position: int) -> int:
    """Returns the 64-bit key of the draw at a position of a sample: the `position`-th number of SplitMix64."""
    return _mix(stream + (position + 1) * _GOLDEN)


def hash_ids(ids: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Returns a number of 32 random bits for each token id, uint32 [n].

    ids [n], any whole numbers below 2**32; keys uint64 [n], or [1] for all. Wellons' `triple32`, with half of the key
    put in before each of its first two products.
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
    """Returns the noise of hashes uint32 [n], float64 [n]: between -3.2 and 22.9, for 32 bits bound how rare it can
    be."""
    return -np.log(-np.log(1.0 - (hashes + 0.5) * 2.0**-32))


# A temperature this small divides logits into numbers that float32 cannot tell apart.
GREEDY_BELOW = 1e-5
NO_PENALTIES = penalties_of(SamplerOptions())


class SamplerState:
    """A SamplerState holds all that the choice of a sample's next token depends on: options, key, position, tokens so
    far.

    position   the place in the output of the token that is chosen next: 0 for the first
    matcher    follows the sample's grammar; None without one
    end_ids    the ids that end the sample; they are banned before min_tokens
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
        """Makes the state before the first token.

        prompt   token ids; only a repetition penalty reads them, and it skips the rows of images
        matcher  is advanced by the state from now on
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
        """Returns whether the next token is just the most likely one, without log-probabilities.

        ahead  how many tokens before it are still in flight
        """
        return self._bare and (self.position + ahead >= self.sampling.min_tokens or not self.end_ids.size)

    @property
    def independent(self) -> bool:
        """Returns whether a token can be chosen without the tokens before it, and without log-probabilities."""
        return not self.penalised and self.matcher is None and self.sampling.logprobs is None

    def banned_ids(self, ahead: int = 0) -> np.ndarray:
        """Returns the ids, int64, that may not come next because the sample would end before min_tokens.

        ahead  how many tokens before the next one are still in flight
        """
        return self.end_ids if self.position + ahead < self.sampling.min_tokens else self.end_ids[:0]

    def advance(self, token: int) -> bool:
        """Takes `token` as the next one of the output, and returns whether the sample ends with it, because the grammar
        allows no token after it."""
        self.position += 1
        if self.penalised:
            self._count(token)
        if self.matcher is None:
            return False
        self.matcher.accept(token)
        return self.matcher.is_done

    def key(self, ahead: int = 0) -> int:
        """Returns the 64-bit key of the noise that the token at `position` + `ahead` is drawn with."""
        return make_key(self._stream, self.position + ahead)

    @property
    def output_counts(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns the ids that penalties concern, int64, and how often each is in the output, float32."""
        return self._ids[: len(self._place)], self._counts[: len(self._place)]

    def _count(self, token: int) -> None:
        place = self._place.setdefault(token, len(self._place))
        if place == self._ids.size:
            more = np.zeros(max(64, place), np.int64)
            self._ids, self._counts = np.append(self._ids, more), np.append(self._counts, more.astype(np.float32))
        self._ids[place] = token
        self._counts[place] += 1.0


def drawing_of(states: Sequence[SamplerState | None], ahead: Sequence[int]) -> Drawing | None:
    """Returns the Drawing of a step's tokens; None if each is just the most likely one.

    states  the state of the sample at each read; None: any token will do
    ahead   how many tokens of the sample at each read are still in flight
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
