"""Accounts of a cache: how many rows each tenant has in it, and which tenant loses rows next."""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any

from ...spec.requests import Share

# Rows of a tenant that has not used any of its rows for this many seconds are evicted first.
IDLE_SECONDS = 600.0


class Account:
    """The rows that the cache keeps for one tenant.

    Attributes:
        rows: How many of its rows may be evicted.
        num_slots: How many slots its nodes and tails occupy: kept, pinned or in use.
        nodes: How many of its nodes are kept.
        leaves: A heap of its nodes that can be evicted now; the RadixCache fills it.
        used_at: When the tenant last used any of its rows.
    """

    __slots__ = (
        "grown", "has_grown", "leaves", "max_rows", "nodes", "num_slots", "rows", "tenant", "used_at", "weight",
    )  # fmt: skip

    def __init__(self, tenant: Hashable, share: Share, grown: list[Account]):
        self.tenant = tenant
        self.rows = self.num_slots = self.nodes = 0
        self.grown, self.has_grown = grown, False
        self.leaves: list[Any] = []
        self.used_at = 0.0
        self.set_share(share)

    def set_share(self, share: Share) -> None:
        self.weight, self.max_rows = share.weight, share.max_kept_rows

    def hold(self, slots: int) -> None:
        """Record that nodes of the tenant occupy `slots` more slots."""
        self.num_slots += slots
        if not self.has_grown:
            self.has_grown = True
            self.grown.append(self)

    @property
    def size(self) -> float:
        """The tenant's slots divided by its weight. The largest account loses rows first."""
        return max(self.num_slots, self.rows) / self.weight


class Accounts:
    """The accounts of a cache shared by weight: the account with the most slots per weight loses rows first."""

    def __init__(self) -> None:
        self._share_of: Callable[[Hashable], Share] = lambda tenant: Share()
        self._by_tenant: dict[Hashable, Account] = {}
        self._numbers = itertools.count()
        self.grown: list[Account] = []  # accounts with more slots than at the last call of `next`
        self.clear()

    def clear(self) -> None:
        for account in self._by_tenant.values():
            account.rows, account.num_slots, account.nodes, account.leaves = 0, 0, 0, []
        # The accounts with rows, least recently used first.
        self.with_rows: OrderedDict[Account, None] = OrderedDict()
        # A heap of (-size, number, account). An account is pushed whenever it has grown; an entry with an outdated size
        # is corrected when it reaches the head.
        self.by_size: list[tuple[float, int, Account]] = []

    def __iter__(self) -> Iterator[Account]:
        return iter(self._by_tenant.values())

    def of(self, tenant: Hashable) -> Account:
        """Return the account of a tenant; create it if it does not exist."""
        account = self._by_tenant.get(tenant)
        if account is None:
            account = self._by_tenant[tenant] = Account(tenant, self._share_of(tenant), self.grown)
        return account

    def __len__(self) -> int:
        return len(self._by_tenant)

    def keep_only(self, accounts: Iterable[Account]) -> None:
        """Forget all other accounts, which must have no rows."""
        self._by_tenant = {account.tenant: account for account in accounts}
        self.grown[:] = [account for account in self.grown if self._by_tenant.get(account.tenant) is account]

    def set_shares(self, share_of: Callable[[Hashable], Share]) -> None:
        """Set the shares of all existing and future accounts."""
        self._share_of = share_of
        for account in self._by_tenant.values():
            account.set_share(share_of(account.tenant))
        self.by_size.clear()
        self._enter_all()

    def use(self, account: Account, now: float) -> None:
        """Record that the tenant used its rows."""
        account.used_at = now
        if account in self.with_rows:
            self.with_rows.move_to_end(account)

    def add(self, account: Account, rows: int) -> None:
        """Record that an account has `rows` more rows, or fewer if `rows` is negative."""
        account.rows += rows
        if rows < 0 and not account.rows:
            self.with_rows.pop(account, None)
        elif rows > 0:
            is_new = account not in self.with_rows
            self.with_rows[account] = None
            if is_new and len(self.with_rows) == 2:
                self.by_size.clear()
                self._enter_all()
            elif len(self.with_rows) > 1:  # a single tenant needs no order
                self._enter(account)

    def next(self, now: float) -> Account | None:
        """Return the account that loses rows next; None if no account has rows."""
        if not self.with_rows:
            return None
        oldest = next(iter(self.with_rows))
        if len(self.with_rows) == 1 or now - oldest.used_at > IDLE_SECONDS:
            return oldest
        self._enter_grown()
        heap = self.by_size
        while True:
            entry_size, _, account = heap[0]
            size = -account.size
            if account.rows and entry_size == size:
                return account
            if account.rows and entry_size < size:
                heapq.heapreplace(heap, (size, next(self._numbers), account))
            else:
                heapq.heappop(heap)

    def _enter_grown(self) -> None:
        for account in self.grown:
            account.has_grown = False
            self._enter(account)
        self.grown.clear()

    def _enter(self, account: Account) -> None:
        if len(self.by_size) > 2 * len(self.with_rows) + 64:
            self.by_size.clear()
            self._enter_all()
        elif account.rows:
            heapq.heappush(self.by_size, (-account.size, next(self._numbers), account))

    def _enter_all(self) -> None:
        for account in self.with_rows:
            heapq.heappush(self.by_size, (-account.size, next(self._numbers), account))
