"""What the faces do alike with a body: whose model it asks for, what it asks of a task, and the response to that."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from ..api.body import Asked, renamed
from ..errors import InputError
from .desk import Desk, TaskOrder
from .http import json_response, unless_gone
from .keys import Tenant
from .limits import check_samples, check_texts
from .short import are_soon_written
from .site import Site, new_id

T = TypeVar("T")
Handle = Callable[[Site, Request, Tenant], Awaitable[Response]]
Read = Callable[[dict[str, Any], Desk], Asked]


class Asking:
    """One request on its way: who asks, and what its body holds."""

    def __init__(self, site: Site, desk: Desk, request: Request, tenant: Tenant, body: dict[str, Any], num_bytes: int):
        self.site, self.desk, self.request, self.tenant = site, desk, request, tenant
        self.body, self.num_bytes = body, num_bytes
        self.model, self.adapter = site.model_of(body.get("model"))

    @classmethod
    async def of(cls, site: Site, request: Request, tenant: Tenant, *, computes: bool = True) -> Asking:
        """Returns what a request asks, once its body is there. Raises Refusal, ClientGone.

        computes  whether it will wait for the engine: where too many do, it is refused before its body is read
        """
        desk = site.desk_for(request)
        if computes:
            desk.room.check(tenant.owner)
        return cls(site, desk, request, tenant, *await site.bodies.json(request, tenant))

    def order(self, task: str, items: Any, options: Any = (), *, share: bool = True) -> TaskOrder:
        """Returns what is asked of a task, for this tenant and this model."""
        check_texts(self.body, self.site.options.max_texts)
        check_samples(items, self.site.options.max_texts)
        if self.adapter is not None:
            items = [item | {"adapter": self.adapter} for item in items]
        namespace = self.site.keys.namespace(self.tenant)
        if task != "generate" and not share:  # numbers share nothing with others in a namespace of their own
            namespace += new_id()
        return TaskOrder(task, items, dict(options), namespace, share, self.tenant.owner)

    async def without_engine(self, function: Callable[[], T]) -> T:
        """Returns what `function` returns, which needs no engine but may take long. Raises InputError, Refusal,
        ClientGone."""
        check_texts(self.body, self.site.options.max_texts)
        return await unless_gone(self.request, self.desk.without_engine(self.tenant.owner, self.num_bytes, function))

    async def written(self, results: Sequence[Mapping[str, Any]], function: Callable[[], T]) -> T:
        """Returns what `function` returns, which writes a response of results. Raises ClientGone."""
        if are_soon_written(results):  # before a client that leaves could be noticed
            return function()
        found: T = await unless_gone(self.request, self.desk.in_pool(self.tenant.owner, function))
        return found


async def answer_asked(asking: Asking, asked: Asked, *, share: bool = True) -> Response:
    """Returns the response to what a body asks of a task. share: whether prompts may be shared with others'."""
    try:
        order = asking.order(asked.task, asked.items, asked.options, share=share)
        results = await unless_gone(asking.request, asking.desk.answer(order, asking.num_bytes))
    except InputError as wrong:
        raise wrong.renamed(renamed(wrong.field, asked.fields)) from None
    return await asking.written(results, lambda: json_response(asked.make(results)))


def handle_of(read: Read) -> Handle:
    """Returns what answers the requests whose bodies `read` reads."""

    async def handle(site: Site, request: Request, tenant: Tenant) -> Response:
        asking = await Asking.of(site, request, tenant)
        return await answer_asked(asking, read(asking.body, asking.desk))

    return handle
