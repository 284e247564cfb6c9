"""Process one batch: count its lines, answer them, and split the answers into an output file and an error file.

The answers go into one file first, with a job's journal. If the server is killed in any state, the next start resumes
the batch in that state.

    status        what happens                            stored at the end
    validating    lines are read and counted              _input, request_counts; then in_progress or failed
    in_progress   lines are answered; `cancelling` if     _ending and _why if lines are left, which then become
                  the client cancels the batch            errors; then finalizing
    finalizing    lines are split into output and errors  files, usage; then completed, cancelled, expired or failed

Fields of a stored batch that clients do not see:

    _model           the checkpoint's name when the batch was created; the batch fails if another model is served later
    _output_seconds  lifetime of the output files in seconds; None: no limit
    _input           identity of the input file when it was validated; the journal belongs to that file
    _ending          final status of the batch; stored before remaining lines become errors, so that all get one error
    _why             why the batch failed, for its `errors`
"""

from __future__ import annotations

import hashlib
import os
import shutil
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import InputError, JobError
from ..jobs import FileOutput, Job, OpenAIBatch, OutputOptions, Source, TableOptions, run_beside, write_errors
from ..jobs.batch import split_lines
from ..jobs.formats import LineSource
from ..jobs.source import file_identity, is_gzip
from ..spec.requests import Owner
from ..wire.body import TaskOrder
from .handler import RequestHandler
from .keys import Keys, Tenant
from .limits import check_samples, check_texts
from .store import Body, Store

# Smaller than the windows of a job without a server, because live requests wait while a window is read.
WINDOW_TOKENS = 1 << 17
ATTEMPTS = 3  # number of server errors after which a batch fails
MOST_ERRORS = 20  # maximum number of lines in the `errors` of a refused batch
# {status of a batch that ended early: (code, message) of the remaining lines}
_REST = {
    "cancelled": ("batch_cancelled", "the batch was cancelled before this request was computed"),
    "expired": ("batch_expired", "the batch's completion_window ended before this request was computed"),
    "failed": ("batch_failed", "the batch failed before this request was computed"),
}


@dataclass(eq=False)
class OpenBatch:
    """A batch that has not ended."""

    id: str
    tenant: str
    status: str
    expires_at: float  # Unix time in seconds
    file: str  # id of the input file
    is_taken: bool = False  # a thread works on the batch, or the batch is not stored yet
    is_full: bool = False  # the answers exceed what the tenant may still store
    retry_at: float = 0.0  # do not run before this time.monotonic()
    failures: int = 0  # number of server errors so far
    output: FileOutput | None = None  # the output of the running job

    @classmethod
    def of(cls, tenant: str, body: Body) -> OpenBatch:
        """Return the OpenBatch of a batch object in the store."""
        return cls(body["id"], tenant, body["status"], body["expires_at"], body["input_file_id"])

    @property
    def is_free(self) -> bool:
        """Return True if a thread may start to work on the batch now."""
        return not self.is_taken and time.monotonic() >= self.retry_at

    @property
    def ending(self) -> str | None:
        """Return the final status if the batch must end now, before all lines are answered; None to continue."""
        if self.status == "cancelling":
            return "cancelled"
        if self.is_full:
            return "failed"
        return "expired" if time.time() >= self.expires_at else None


class BatchWork:
    """The work on a batch: validation and completion. Each thread works on one batch at a time.

    Args:
        is_stopping: returns True if the server is about to end
        gives_way: called with (batch, lines answered in this turn, total lines); returns True if the turn is over

    Attributes:
        commit_seconds: maximum delay in seconds before an answer is durable; None: the default of `OutputOptions`
    """

    def __init__(
        self,
        store: Store,
        handler: RequestHandler,
        keys: Keys,
        is_stopping: Callable[[], bool],
        gives_way: Callable[[OpenBatch, int, int], bool],
    ):
        self._store, self._handler, self._keys = store, handler, keys
        self._is_stopping, self._gives_way = is_stopping, gives_way
        self.commit_seconds: float | None = None

    def _source(self, body: Body) -> Source:
        """Return the source of a batch's lines. Raise JobError if the file is invalid or gone."""
        id = body["input_file_id"]
        file = self._store.get("file", None, id)
        name = id if file is None else file["filename"]
        return open_input(self._store.path(id), name, self._handler.options.max_body_bytes)

    def _adapter(self, body: Body) -> OpenAIBatch:
        adapters = self._handler.engine.facts.adapters
        adapter = _Lines(
            self._handler.names[0],
            seed=body["id"],
            adapters=adapters,
            names=self._handler.known_names,
            endpoint=body["endpoint"],
            fingerprint=self._handler.fingerprint,
        )
        adapter.handler = self._handler
        return adapter

    def validate(self, batch: OpenBatch) -> Body | None:
        """Count a batch's lines, and refuse the batch if no line can be answered.

        Return the changed batch. Its status is "cancelling" if the client cancelled it during validation. Return None
        if the server is about to end.
        """
        body = self._stored(batch)
        adapter, total, good = self._adapter(body), 0, 0
        errors: list[Body] = []
        identity = None
        try:
            source = self._source(body)
            identity = source.identity
            for record in source.records():
                total += 1
                error = adapter.read(record).error
                good += error is None
                if error is not None and len(errors) < MOST_ERRORS:
                    line = {"code": error.code, "line": record.number, "message": str(error), "param": error.field}
                    errors.append(line)
                if self._is_stopping():
                    return None
        except JobError as wrong:
            if isinstance(wrong.__cause__, OSError):  # the disk failed; the file may be valid
                raise
            good = 0
            errors.append({"code": "invalid_file", "line": None, "message": str(wrong), "param": "input_file_id"})
        if not total and not errors:
            message = "the input file is empty; write one request per line"
            errors.append({"code": "empty_file", "line": None, "message": message, "param": "input_file_id"})
        now = int(time.time())
        changes: Body = {"request_counts": {"total": total, "completed": 0, "failed": 0}, "_input": identity}
        if good:
            changes |= {"status": "in_progress", "in_progress_at": now}
        else:
            changes |= {"status": "failed", "failed_at": now, "errors": {"object": "list", "data": errors}}
        return self._store.change("batch", batch.id, changes, only=("validating",)) or self._stored(batch)

    def finish(self, batch: OpenBatch) -> Body | None:
        """Answer the remaining lines of a batch, end it, and return the changed batch.

        Return None if the server is about to end, or the batch's turn is over.
        """
        body = self._stored(batch)
        folder = self._store.batches / batch.id
        folder.mkdir(exist_ok=True)
        lines = folder / "lines.jsonl"
        ending, usage = self._write_lines(batch, body, lines)
        if ending is None:
            return None
        changes: Body = {"_ending": ending}
        if ending != "cancelled" and body["status"] != "finalizing":
            changes |= {"status": "finalizing", "finalizing_at": int(time.time())}
        changed = self._store.change("batch", batch.id, changes)
        assert changed is not None
        batch.status = changed["status"]
        final = self._end(batch, changed, lines, usage)
        shutil.rmtree(folder, ignore_errors=True)
        return final

    def _write_lines(self, batch: OpenBatch, body: Body, path: Path) -> tuple[str | None, Counter[str] | None]:
        """Write the missing lines of a batch.

        Return (final status, usage). The status is None if the batch continues later. The usage is None unless this
        call wrote all lines and no line is an error.
        """
        source, reason = None, body.get("_why", "")
        try:
            source = self._source(body)
        except JobError as error:  # the file is gone, or the batch ends before it was validated
            reason = str(error)
        identity = {"batch": batch.id, "input": body.get("_input") if source is None else source.identity}
        output = batch.output = FileOutput(OutputOptions(path, commit_seconds=self.commit_seconds), identity)
        adapter = self._adapter(body)
        ending: str | None = body.get("_ending") or ("failed" if batch.failures >= ATTEMPTS else batch.ending)
        if body["_model"] != self._handler.llm.checkpoint.name:
            ending, reason = ending or "failed", "the model changed"  # one model answers all lines of a batch
        elif source is None:
            ending = ending or "failed"
        try:
            if not output.ended:
                if ending is None:
                    assert source is not None
                    ending = self._run(batch, body, source, adapter, output)
                    if ending is None:
                        return None, None
                    if batch.is_full:
                        reason = "the storage quota of its tenant is full: delete files"
                if ending != "completed":
                    self._store.change("batch", batch.id, {"_ending": ending, "_why": reason})
                    if source is not None:
                        code, message = _REST[ending]
                        rest = InputError(message, remedy="send the request in another batch", code=code)
                        write_errors(source, self._adapter(body), output, rest)
                output.finish()
            return ending or "completed", None if output.resumed or output.errors else adapter.usage
        finally:
            counts = {"completed": output.count - output.errors, "failed": output.errors}
            total = max(output.count, body["request_counts"]["total"])
            output.close()
            self._store.change("batch", batch.id, {"request_counts": {"total": total, **counts}})

    def _run(
        self, batch: OpenBatch, body: Body, source: Source, adapter: OpenAIBatch, output: FileOutput
    ) -> str | None:
        """Run the job of a batch. Return the final status, or None if the batch continues later."""
        owner, llm = Owner(batch.tenant or None, is_batch=True), self._handler.llm
        tasks = _Tasks(self._handler, self._keys.salt_prefix(Tenant(batch.tenant or None)), owner)
        seed = int.from_bytes(hashlib.blake2b(batch.id.encode(), digest_size=6).digest())
        job = Job(source, adapter, tasks, lambda: llm, output, window=WINDOW_TOKENS, seed=seed, kept=llm.kept)
        total, room = body["request_counts"]["total"], self._store.bytes_left(batch.tenant)

        def stopping() -> bool:
            batch.is_full = output.num_bytes > room
            is_over = self._gives_way(batch, output.count - output.resumed, total)
            return is_over or self._is_stopping() or batch.ending is not None

        return "completed" if run_beside(job, owner, _internal_error, stopping) else batch.ending

    def _end(self, batch: OpenBatch, body: Body, lines: Path, usage: Counter[str] | None) -> Body:
        """Create a batch's files from its lines, end it, and return the changed batch.

        Args:
            usage: the usage of all answers; None if the job resumed or a line is an error: count it from the lines
        """
        ending, now = body["_ending"], int(time.time())
        ids = {kind: "file-" + _digest(f"{batch.id}:{kind}") for kind in ("output", "error")}
        store = self._store
        with store.writing_content(ids["output"]) as good, store.writing_content(ids["error"]) as bad:
            good.unlink(missing_ok=True)  # after a kill this may be a hard link to the lines' file
            if usage is None:
                counts, usage = split_lines(lines, good, bad)
            else:
                counts = Counter(output=body["request_counts"]["completed"])
                try:
                    os.link(lines, good)
                except OSError:  # the file system has no hard links
                    shutil.copyfile(lines, good)
                bad.touch()
        changes: Body = {"status": ending, f"{ending}_at": now, "usage": _usage_body(usage)}
        expires = body["_output_seconds"] and now + body["_output_seconds"]
        objects = []
        for kind in ids:
            if counts[kind]:
                changes[f"{kind}_file_id"] = ids[kind]
                file = {"id": ids[kind], "object": "file", "bytes": store.path(ids[kind]).stat().st_size}
                file |= {"created_at": now, "expires_at": expires, "filename": f"{batch.id}_{kind}.jsonl"}
                file |= {"purpose": "batch_output", "status": "processed", "status_details": None}
                objects.append(("file", batch.tenant, file, expires))
            else:
                store.drop_content(ids[kind])
        if ending == "failed":
            reason = body.get("_why") or "the server failed"
            error = {"code": "batch_failed", "line": None, "message": f"{reason}; create it again", "param": None}
            changes["errors"] = {"object": "list", "data": [error]}
        store.add_all([*objects, ("batch", batch.tenant, body | changes, None)])
        return body | changes

    def _stored(self, batch: OpenBatch) -> Body:
        body = self._store.get("batch", None, batch.id)
        assert body is not None
        return body


def open_input(path: Path, name: str, most_bytes: int) -> Source:
    """Return the source of the lines of an uploaded file.

    Raise JobError for an invalid file, and OSError if the disk fails.

    Args:
        name: the client's name for the file, for errors
        most_bytes: maximum size of a line; a longer line becomes a record with an error
    """
    try:
        if is_gzip(path):
            raise JobError(f"{name} is compressed; upload plain JSONL: gunzip {name}")
        identity = file_identity(path)
        with path.open("rb") as file:
            head = file.readline(most_bytes)
    except FileNotFoundError:
        raise JobError(f"the input file {name} is gone; upload it again") from None
    source = LineSource.make(name, "jsonl", identity, head, lambda: path.open("rb"), TableOptions())
    assert isinstance(source, LineSource)
    source.most_bytes = most_bytes
    source.paths = (path,)
    return source


class _Lines(OpenAIBatch):
    """The adapter of a batch's lines. Each line has the server's limits of a request."""

    handler: RequestHandler

    def items(self, kind: str, body: Body) -> tuple[list[Any], Body]:
        check_texts(body, self.handler.options.max_texts)
        items, meta = super().items(kind, body)
        check_samples(items, self.handler.options.max_texts)
        return items, meta

    def error_line(self, number: int, meta: Body | None, error: InputError) -> Body:
        message, remedy = self.handler.public(error.message), self.handler.public(error.remedy)
        return super().error_line(number, meta, InputError(message, field=error.field, remedy=remedy, code=error.code))


class _Tasks(dict[str, Any]):
    """{name: task} for a batch's lines, created on first use. Prompts share rows only within the tenant."""

    def __init__(self, handler: RequestHandler, salt_prefix: str, owner: Owner):
        super().__init__()
        self._handler, self._salt_prefix, self._owner = handler, salt_prefix, owner

    def __missing__(self, name: str) -> Any:
        order = TaskOrder(name, (), owner=self._owner, salt_prefix=self._salt_prefix)
        self[name] = task = self._handler.task(order)
        return task


def _usage_body(usage: Counter[str]) -> Body:
    """Return the usage of a batch: the tokens of its answers.

    Args:
        usage: the token counts that `add_usage` summed
    """
    approximate = {"approximate_tokens": usage["approximate"]} if usage["approximate"] else {}
    return {
        "input_tokens": usage["input"],
        "input_tokens_details": {"cached_tokens": usage["cached"]} | approximate,
        "output_tokens": usage["output"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage["input"] + usage["output"],
    }


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()


def _internal_error(error: Exception) -> InputError:
    return InputError(f"the step failed: {error}", remedy="send it again", code="internal_error")
