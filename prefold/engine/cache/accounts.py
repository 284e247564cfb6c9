"""The accounts of a cache: how many rows it holds for each tenant, and which tenant gives rows when room is needed."""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any

from ...spec.requests import Share

# The rows of a tenant that has not used any of them for so many seconds are evicted first.
IDLE_SECONDS = 600.0


class Account:
    """An Account counts the rows that the cache keeps for one tenant.

    rows       how many of its rows may be evicted
    num_slots  how many slots its nodes and tails hold, whether kept, pinned or in use
    nodes      how many of its nodes are kept
    leaves     a heap of its nodes that can be evicted now; the RadixCache fills it
    used_at    the time at which the tenant last used any of its rows
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
        """Books that nodes of the tenant hold so many more slots."""
        self.num_slots += slots
        if not self.has_grown:
            self.has_grown = True
            self.grown.append(self)

    @property
    def size(self) -> float:
        """Returns the slots that the tenant holds, over its weight; the largest account gives rows first."""
        return max(self.num_slots, self.rows) / self.weight


class Accounts:
    """An Accounts holds the accounts of a cache. The cache is shared by weights: the account with the most slots
    over its weight gives rows first."""

    def __init__(self) -> None:
        self._share_of: Callable[[Hashable], Share] = lambda tenant: Share()
        self._by_tenant: dict[Hashable, Account] = {}
        self._numbers = itertools.count()
        self.grown: list[Account] = []  # accounts that hold more slots than at the last call of `next`
        self.clear()

    def clear(self) -> None:
        for account in self._by_tenant.values():
            account.rows, account.num_slots, account.nodes, account.leaves = 0, 0, 0, []
        # The accounts with rows, in the order in which they were used last.
        self.with_rows: OrderedDict[Account, None] = OrderedDict()
        # A heap of (-size, number, account): an account is entered whenever it has become larger, and an entry with an
        # old size is corrected when it comes to the head.
        self.by_size: list[tuple[float, int, Account]] = []

    def __iter__(self) -> Iterator[Account]:
        return iter(self._by_tenant.values())

    def of(self, tenant: Hashable) -> Account:
        """Returns the account of a tenant, a new one where there is none."""
        account = self._by_tenant.get(tenant)
        if account is None:
            account = self._by_tenant[tenant] = Account(tenant, self._share_of(tenant), self.grown)
        return account

    def __len__(self) -> int:
        return len(self._by_tenant)

    def keep_only(self, accounts: Iterable[Account]) -> None:
        """Forgets all other accounts, which must have no rows."""
        self._by_tenant = {account.tenant: account for account in accounts}
        self.grown[:] = [account for account in self.grown if self._by_tenant.get(account.tenant) is account]

    def set_shares(self, share_of: Callable[[Hashable], Share]) -> None:
        """Sets the shares of all tenants, now and of accounts that come later."""
        self._share_of = share_of
        for account in self._by_tenant.values():
            account.set_share(share_of(account.tenant))
        self.by_size.clear()
        self._enter_all()

    def use(self, account: Account, now: float) -> None:
        """Books that the tenant used its rows."""
        account.used_at = now
        if account in self.with_rows:
            self.with_rows.move_to_end(account)

    def add(self, account: Account, rows: int) -> None:
        """Books that an account has `rows` more rows, or fewer if `rows` is negative."""
        account.rows += rows
        if rows < 0 and not account.rows:
            self.with_rows.pop(account, None)
        elif rows > 0:
            is_new = account not in self.with_rows
            self.with_rows[account] = None
            if is_new and len(self.with_rows) == 2:
                self.by_size.clear()
                self._enter_all()
            elif len(self.with_rows) > 1:  # a tenant alone needs no order
                self._enter(account)

    def next(self, now: float) -> Account | None:
        """Returns the account that gives rows next; None if no account has rows."""
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
