"""Bodies of requests, within limits: for each, for those of a tenant, and for all that are being received."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import msgspec
from starlette.requests import ClientDisconnect, Request

from .http import ClientGone, Refusal
from .keys import Tenant
from .options import ServeOptions

_CLOSING = {"connection": "close"}
_decode = msgspec.json.Decoder().decode


class Bodies:
    """Reads bodies, and counts the bytes of those that have not come wholly: they are held in memory."""

    def __init__(self, options: ServeOptions):
        self._options = options
        self._sizes: Counter[str | None] = Counter()  # bytes by tenant
        self.num_bytes = 0

    async def json(self, request: Request, tenant: Tenant) -> tuple[dict[str, Any], int]:
        """Returns the object in a request's body, and the body's bytes. Raises Refusal, ClientGone."""
        body = await self.read(request, tenant)
        try:
            value = _decode(body)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
            message = f"the body is not valid JSON: {error}"
            raise Refusal(400, message, remedy="send a JSON object", code="invalid_json") from None
        if not isinstance(value, dict):
            message = f"the body is not a JSON object but {type(value).__name__}"
            raise Refusal(400, message, remedy="send an object", code="invalid_json")
        return value, len(body)

    async def read(self, request: Request, tenant: Tenant) -> bytes:
        """Returns the body of a request. Raises Refusal for one that is too large (413) or too slow (408), or where too
        much is being received (429); ClientGone."""
        options = self._options
        too_large = Refusal(
            413,
            f"the body is larger than {options.max_body_bytes} bytes",
            remedy="send less at once",
            code="body_too_large",
            headers=_CLOSING,
        )
        length = request.headers.get("content-length", "")
        if length.isdigit() and int(length) > options.max_body_bytes:
            raise too_large
        parts, size = [], 0
        try:
            async with asyncio.timeout(options.body_seconds):
                async for part in request.stream():
                    size += len(part)
                    if size > options.max_body_bytes:
                        raise too_large
                    self._take(tenant, len(part))
                    parts.append(part)
        except TimeoutError:
            message = f"the body did not come within {options.body_seconds:g} seconds"
            raise Refusal(408, message, remedy="send it faster", code="timeout", headers=_CLOSING) from None
        except ClientDisconnect:
            raise ClientGone from None
        finally:
            self._give_back(tenant, sum(map(len, parts)))
        return b"".join(parts)

    def _take(self, tenant: Tenant, count: int) -> None:
        if (
            self.num_bytes + count > self._options.max_receiving_bytes
            or self._sizes[tenant.name] + count > self._options.most_of_one_tenant
        ):
            message, remedy = "the bodies of too many requests are being received", "send the request again"
            headers = {"retry-after": "1"} | _CLOSING
            raise Refusal(429, message, remedy=remedy, code="rate_limit_exceeded", headers=headers)
        self.num_bytes += count
        self._sizes[tenant.name] += count

    def _give_back(self, tenant: Tenant, count: int) -> None:
        self.num_bytes -= count
        self._sizes[tenant.name] -= count
        if not self._sizes[tenant.name]:
            del self._sizes[tenant.name]
