"""The HTTP endpoints /v1/files and /v1/batches of the OpenAI API."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta, Struct
from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import ClientDisconnect
from starlette.responses import FileResponse, Response

from ..errors import InputError
from ..wire import ENDPOINTS
from ..wire.body import METADATA_REMEDY, Body, Metadata, converted, doc
from .batches import Batches
from .context import Entry, RequestContext
from .dialects import OPENAI
from .http import ClientGone, Refusal, json_response
from .state import new_id
from .store import Body as StoredBody
from .store import Store

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
FORM_BYTES = 1 << 16  # maximum size of a form without its file
PURPOSES = ("batch", "vision", "user_data")


class Page(Body):
    """The query parameters of GET /v1/batches, with OpenAI's defaults."""

    limit: Annotated[int, Meta(ge=1, le=100)] = 20
    order: Literal["asc", "desc"] = "desc"
    after: str | None = None
    purpose: ClassVar[str | None] = None

    remedies: ClassVar = {"order": "give asc or desc"}
    is_listed = is_strict = False  # not strict, because all query parameters arrive as text


class PageOfFiles(Page):
    """The query parameters of GET /v1/files."""

    limit: Annotated[int, Meta(ge=1, le=10_000)] = 10_000
    purpose: str | None = None


class Expiry(Struct):
    """When to delete a file: `seconds` after its creation."""

    anchor: Literal["created_at"]
    seconds: Annotated[int, Meta(ge=1, le=10**10)]


_EXPIRY_REMEDY = 'give {"anchor": "created_at", "seconds": 1 or more}'


class NewBatch(Body, kw_only=True):
    """Create a batch. The response is sent after the batch is on disk."""

    input_file_id: Annotated[Any, doc("A file that was uploaded with purpose batch.", "string")] = None
    endpoint: Annotated[Any, doc("The path of all lines.", "string", enum=list(ENDPOINTS))] = None
    completion_window: Annotated[str, Meta(pattern="^[1-9][0-9]{0,6}[smhd]$")] = "24h"
    metadata: Metadata | None = None
    output_expires_after: Expiry | None = None

    remedies: ClassVar = {
        "completion_window": 'give "24h", or another time in s, m, h, d', "metadata": METADATA_REMEDY,
        "output_expires_after": _EXPIRY_REMEDY,
    }  # fmt: skip
    is_listed = False


def _stores(context: RequestContext) -> tuple[str, Store, Batches]:
    """Return (tenant's name in the store, store, batches). Raise Refusal (404) if the server has no store."""
    store, batches = context.state.store, context.state.batches
    if store is None or batches is None:
        remedy = "start it with --data-dir FOLDER"
        raise Refusal(404, "this server stores no files", remedy=remedy, code="not_found")
    return context.tenant.name or "", store, batches


# --------------------------------------------------------------------------------------------------------- files


async def upload(context: RequestContext) -> Response:
    """Store a file. The response is sent after the file is on disk."""
    owner, store, _ = _stores(context)
    request = context.request
    if not request.headers.get("content-type", "").lower().startswith("multipart/form-data"):
        remedy = "send multipart/form-data with the fields file and purpose"
        raise Refusal(400, "the body is not a form", remedy=remedy, code="invalid_form")
    try:
        parts = _limited(context, store, owner)
        form = await MultiPartParser(request.headers, parts, max_files=1, max_fields=8).parse()
    except MultiPartException as error:
        raise Refusal(400, f"the form cannot be read: {error.message}", code="invalid_form") from None
    except (KeyError, ValueError, UnicodeDecodeError) as error:  # for example no boundary, or an unknown charset
        raise Refusal(400, f"the form cannot be read: {error!r:.100}", code="invalid_form") from None
    async with AsyncExitStack() as ending:
        ending.push_async_callback(form.close)
        file, purpose = form.get("file"), form.get("purpose")
        if not isinstance(file, UploadFile):
            raise InputError("the form has no file", field="file", remedy="add the field file", code="missing_field")
        if purpose not in PURPOSES:
            message, remedy = f"'purpose' is {purpose!r:.100}", 'give "batch", or for images "vision"'
            raise InputError(message, field="purpose", remedy=remedy, code="unsupported")
        names = ("expires_after[anchor]", "expires_after[seconds]")
        fields = {name[14:-1]: form[name] for name in names if name in form}
        remedies = {"expires_after": _EXPIRY_REMEDY}
        expiry = converted(fields, Expiry, "expires_after", remedies=remedies, strict=False) if fields else None
        seconds = None if expiry is None else expiry.seconds
        body = await asyncio.to_thread(_store_file, store, owner, file, str(purpose), seconds)
    return json_response(body)


def _store_file(store: Store, tenant: str, file: UploadFile, purpose: str, seconds: int | None) -> StoredBody:
    """Store an uploaded file. Return its OpenAI file object."""
    id, now = f"file-{new_id()}", int(time.time())
    with store.writing_content(id) as path, path.open("wb") as copy:
        file.file.seek(0)
        shutil.copyfileobj(file.file, copy, 1 << 20)
        size = copy.tell()
    # A form's charset may produce lone surrogates, which UTF-8 cannot encode.
    name = Path(file.filename or "file.jsonl").name[:255].encode("utf-8", "replace").decode()
    body: StoredBody = {
        "id": id,
        "object": "file",
        "bytes": size,
        "created_at": now,
        "filename": name,
        "purpose": purpose,
    }
    body |= {"expires_at": seconds and now + seconds, "status": "processed", "status_details": None}
    try:
        store.add("file", tenant, body, drop_at=body["expires_at"])
    except Refusal:
        store.drop_content(id)
        raise
    return body


async def _limited(context: RequestContext, store: Store, owner: str) -> AsyncIterator[bytes]:
    """Yield the chunks of the request's body as they arrive.

    Raise Refusal if the file is too large, if no data arrives for `body_seconds`, or if the owner's storage is full.
    Raise ClientGone if the client disconnects.
    """
    size, options = 0, context.state.options
    most = options.max_file_bytes
    room, receiving = await asyncio.to_thread(store.bytes_left, owner), store.receiving
    parts = context.request.stream()
    closing = {"connection": "close"}
    try:
        while True:
            try:
                async with asyncio.timeout(options.body_seconds):
                    part = await anext(parts)
            except StopAsyncIteration:
                return
            except TimeoutError:
                message = f"no data arrived for {options.body_seconds:g} seconds"
                raise Refusal(408, message, remedy="send the body faster", code="timeout", headers=closing) from None
            except ClientDisconnect:
                raise ClientGone from None
            size += len(part)
            receiving[owner] += len(part)
            if size > most + FORM_BYTES:
                message, remedy = f"the file is larger than {most} bytes", "split it, or raise --max-file-bytes"
                raise Refusal(413, message, remedy=remedy, code="body_too_large", headers=closing)
            if receiving[owner] > room + FORM_BYTES:
                full = store.full(receiving[owner] - room)
                full.headers |= closing
                raise full
            yield part
    finally:
        receiving[owner] -= size


async def list_files(context: RequestContext) -> Response:
    """Return one page of the tenant's files, newest first by default."""
    return await _page(context, "file", PageOfFiles.of(context.request.query_params))


async def retrieve_file(context: RequestContext) -> Response:
    """Return a file's OpenAI object: its name, size, purpose and dates."""
    return json_response(await _named_object(context, "file"))


async def content(context: RequestContext) -> Response:
    """Return a file's content."""
    body = await _named_object(context, "file")
    return FileResponse(_stores(context)[1].path(body["id"]), media_type="application/octet-stream")


async def delete_file(context: RequestContext) -> Response:
    """Delete a file. The status is 409 if a batch still reads the file."""
    owner, _, batches = _stores(context)
    body = await _named_object(context, "file")
    if not await asyncio.to_thread(batches.forget_file, owner, body["id"]):
        remedy = "cancel the batch, or wait until it has ended"
        raise Refusal(409, "a batch still reads this file", remedy=remedy, code="file_in_use")
    return json_response({"id": body["id"], "object": "file", "deleted": True})


# ------------------------------------------------------------------------------------------------------- batches


async def create_batch(context: RequestContext) -> Response:
    """Create a batch. The response is sent after the batch is on disk."""
    owner, store, batches = _stores(context)
    body = NewBatch.of(context.body)
    file, endpoint = body.input_file_id, body.endpoint
    if not isinstance(endpoint, str) or endpoint not in ENDPOINTS:
        message, remedy = f"'endpoint' is {endpoint!r:.100}", f"give one of {', '.join(ENDPOINTS)}"
        raise InputError(message, field="endpoint", remedy=remedy, code="unsupported")
    stored = isinstance(file, str) and await asyncio.to_thread(store.get, "file", owner, file)
    if not stored or stored["purpose"] != "batch":
        message, remedy = f"there is no file {file!r:.100} for a batch", 'upload it with purpose "batch"'
        raise Refusal(404, message, param="input_file_id", remedy=remedy, code="not_found")
    window, now = body.completion_window, int(time.time())
    batch: StoredBody = {"id": f"batch_{new_id()}", "object": "batch", "endpoint": endpoint, "errors": None}
    batch |= {"input_file_id": file, "completion_window": window, "status": "validating"}
    batch |= {"output_file_id": None, "error_file_id": None, "created_at": now, "in_progress_at": None}
    seconds = int(window[:-1]) * _SECONDS[window[-1]]
    batch |= {"expires_at": now + seconds, "metadata": body.metadata, "model": context.state.names[0]}
    times = ("finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
    batch |= {f"{name}_at": None for name in times}
    batch |= {"request_counts": {"total": 0, "completed": 0, "failed": 0}, "usage": None}
    expiry = body.output_expires_after
    batch |= {
        "_output_seconds": None if expiry is None else expiry.seconds,
        "_model": context.handler.llm.checkpoint.name,
    }
    await asyncio.to_thread(batches.create, owner, batch)
    return json_response(batches.with_counts(batch))


async def list_batches(context: RequestContext) -> Response:
    """Return one page of the tenant's batches, newest first by default."""
    return await _page(context, "batch", Page.of(context.request.query_params))


async def retrieve_batch(context: RequestContext) -> Response:
    """Return a batch with its status and counts."""
    return json_response(_stores(context)[2].with_counts(await _named_object(context, "batch")))


async def cancel_batch(context: RequestContext) -> Response:
    """End a batch early. Finished lines keep their answers; each other line gets an error."""
    batches = _stores(context)[2]
    body = await _named_object(context, "batch")
    return json_response(batches.with_counts(await asyncio.to_thread(batches.cancel, body["id"])))


# ---------------------------------------------------------------------------------------------------------- both


async def _named_object(context: RequestContext, kind: str) -> StoredBody:
    """Return the file or batch with the id in the URL. Raise Refusal (404) if the tenant has none with this id."""
    owner, store, _ = _stores(context)
    id = context.request.path_params["id"]
    body = await asyncio.to_thread(store.get, kind, owner, id)
    if body is None:
        raise Refusal(404, f"there is no {kind} {id!r:.100}", param="id", code="not_found")
    return body


async def _page(context: RequestContext, kind: str, query: Page) -> Response:
    """Return one page of the tenant's files or batches, as an OpenAI list."""
    owner, store, batches = _stores(context)
    newest, after = query.order == "desc", query.after
    ask = partial(store.page, after=after, limit=query.limit, newest=newest, purpose=query.purpose)
    objects, more = await asyncio.to_thread(ask, kind, owner)
    data = [batches.with_counts(body) for body in objects]
    ids = {"first_id": data[0]["id"], "last_id": data[-1]["id"]} if data else {"first_id": None, "last_id": None}
    return json_response({"object": "list", "data": data, **ids, "has_more": more})


ENTRIES = [
    Entry(OPENAI, "POST", "/v1/files", upload),
    Entry(OPENAI, "GET", "/v1/files", list_files, query=PageOfFiles),
    Entry(OPENAI, "GET", "/v1/files/{id}", retrieve_file),
    Entry(OPENAI, "DELETE", "/v1/files/{id}", delete_file),
    Entry(OPENAI, "GET", "/v1/files/{id}/content", content),
    Entry(OPENAI, "POST", "/v1/batches", create_batch, (NewBatch,), computes=False),
    Entry(OPENAI, "GET", "/v1/batches", list_batches, query=Page),
    Entry(OPENAI, "GET", "/v1/batches/{id}", retrieve_batch),
    Entry(OPENAI, "POST", "/v1/batches/{id}/cancel", cancel_batch),
]
