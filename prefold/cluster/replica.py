"""What the router knows of one replica beside its rows: how fast it is, and how much work it was sent."""

from __future__ import annotations

from dataclasses import dataclass, field

_FEW = 16  # outputs that have ended, before their mean is believed
_FORGET = 0.98  # of what was measured, at each measurement: the last 50 count


@dataclass(slots=True)
class Speed:
    """How long a replica takes for a row: seconds = prefill * (rows of prompts) + decode * (rows of outputs).

    Both are fitted to what is measured, by least squares in which older steps count ever less; before anything was
    measured they are what was given.
    """

    prefill: float = 1e-4
    decode: float = 1e-3
    _sums: list[float] = field(default_factory=lambda: [0.0] * 5)

    @property
    def is_measured(self) -> bool:
        """Returns whether anything was measured."""
        return self._sums[3] + self._sums[4] > 0

    def measure(self, prefill_rows: int, decode_rows: int, seconds: float) -> None:
        """Take in that a step, or several, computed these rows in so many seconds."""
        p, d = float(prefill_rows), float(decode_rows)
        new = (p * p, p * d, d * d, p * seconds, d * seconds)
        self._sums = [_FORGET * old + one for old, one in zip(self._sums, new, strict=True)]
        pp, pd, dd, ps, ds = self._sums
        determinant = pp * dd - pd * pd
        if determinant > 1e-6 * pp * dd:
            prefill, decode = (ps * dd - ds * pd) / determinant, (ds * pp - ps * pd) / determinant
            if prefill > 0 and decode > 0:
                self.prefill, self.decode = prefill, decode
                return
        # The two cannot be told apart: both are scaled, so that together they explain what was measured.
        expected = self.prefill * self.prefill * pp + 2 * self.prefill * self.decode * pd + self.decode**2 * dd
        if expected > 0:
            scale = (self.prefill * ps + self.decode * ds) / expected
            self.prefill, self.decode = self.prefill * scale, self.decode * scale


@dataclass(slots=True)
class Outputs:
    """How long outputs are: their share of their limits, of those that have ended. It is the same for all replicas."""

    ended: int = 0
    shares: float = 0.0  # the sum

    def end(self, rows: int, limit: int) -> None:
        """An output of so many tokens has ended, which might have had `limit`."""
        self.ended += 1
        self.shares += min(1.0, rows / limit)

    def expected(self, limit: int) -> int:
        """Returns how many tokens outputs are expected to have, which together may have `limit`."""
        share = (self.shares + _FEW) / (self.ended + _FEW)  # as if a few had ended at their limits
        return max(1, round(share * limit)) if limit else 0


@dataclass(slots=True)
class ReplicaLoad:
    """The work that a replica was sent and has not done.

    requests      that have not ended
    prefill_rows  rows of their prompts that it did not hold when they were sent
    limits        rows of outputs that they may have
    total         requests that it was ever sent
    """

    speed: Speed = field(default_factory=Speed)
    outputs: Outputs = field(default_factory=Outputs)
    requests: int = 0
    prefill_rows: int = 0
    limits: int = 0
    total: int = 0
    # Rows that were reported as done beyond those of the requests that have ended: they are part of the rows above.
    _prefill_done: int = 0
    _decode_done: int = 0

    @property
    def decode_rows(self) -> int:
        """Returns the rows of outputs that are expected of them now."""
        return self.outputs.expected(self.limits)

    def send(self, prefill_rows: int, limit: int) -> None:
        """It is sent a request."""
        self.requests += 1
        self.total += 1
        self.prefill_rows += prefill_rows
        self.limits += limit

    def work(self, prefill_rows: int, decode_rows: int, seconds: float) -> None:
        """It reports of a step, or of several."""
        self.speed.measure(prefill_rows, decode_rows, seconds)
        self._prefill_done += prefill_rows
        self._decode_done += decode_rows

    def end(self, sent: tuple[int, int], actual: tuple[int, int]) -> None:
        """A request has ended; (prefill rows, limit of its output) as it was sent, (prefill rows, decode
        rows) as they came."""
        self.requests -= 1
        self.prefill_rows -= sent[0]
        self.limits -= sent[1]
        # Where steps are not reported there is nothing to take away.
        self._prefill_done = max(0, self._prefill_done - actual[0])
        self._decode_done = max(0, self._decode_done - actual[1])
        if not self.requests:
            self._prefill_done = self._decode_done = 0

    @property
    def left(self) -> tuple[int, int]:
        """Returns (prefill rows, decode rows) that are still to be done."""
        return max(0, self.prefill_rows - self._prefill_done), max(0, self.decode_rows - self._decode_done)

    def seconds_to_start(self, capacity: float) -> float:
        """Returns how long what comes next waits: for the prompts before it, and for room among `capacity` rows, which
        comes as requests end."""
        booked = self.prefill_rows + self.decode_rows
        over = max(0.0, booked - capacity)
        return self.left[0] * self.speed.prefill + (self.seconds * over / booked if over else 0.0)

    @property
    def seconds(self) -> float:
        """Returns how long it will take for what is still to be done."""
        return self.seconds_at(self.speed)

    def seconds_at(self, speed: Speed) -> float:
        """Returns how long that would take at another speed."""
        prefill, decode = self.left
        return prefill * speed.prefill + decode * speed.decode
