"""The file of API keys and its tenants. Each tenant has a salt prefix, so tenants share no rows."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta, field

from ..errors import InputError, JobError
from ..spec.files import read_toml
from ..spec.requests import Namespace, Owner, Share
from ..wire.body import Body


@dataclass(frozen=True, slots=True)
class Limits(Share):
    """The limits of a tenant, in addition to its share of the engine."""

    max_waiting_requests: int | None = None  # requests that wait for a free sequence; more are refused with 429
    max_waiting_tokens: int | None = None  # tokens of the prompts that wait
    max_stored_bytes: int | None = None  # bytes of files and batches; more are refused with 413; None: half of the disk


UNLIMITED = Limits()


@dataclass(frozen=True, slots=True)
class Tenant:
    """The person or program behind one or more keys."""

    name: str | None  # the tenant's name in metrics; None without a file of keys
    admin: bool = False  # the tenant may read metrics and manage the cache
    is_batch: bool = False  # the tenant's requests wait until no other requests are left
    limits: Limits = UNLIMITED  # limits of all keys of the tenant together

    @property
    def owner(self) -> Owner:
        return Owner(self.name, self.is_batch)


_LIMITS = tuple(field.name for field in fields(Limits))
_Least1 = Annotated[int, Meta(ge=1)]


class _Key(Body, kw_only=True):
    """A table [[key]] of the file of keys."""

    key: Annotated[str, Meta(pattern=r"\S")] | None = None
    sha256: Annotated[str, Meta(pattern="^[0-9a-fA-F]{64}$")] | None = None
    tenant: str
    admin: bool = False
    kind: Literal["interactive", "batch"] = field(name="class", default="interactive")
    weight: Annotated[float, Meta(gt=0, le=1e300)] | None = None
    max_running: _Least1 | None = None
    max_kept_rows: Annotated[int, Meta(ge=0)] | None = None
    max_waiting_requests: _Least1 | None = None
    max_waiting_tokens: _Least1 | None = None
    max_stored_bytes: _Least1 | None = None

    remedies: ClassVar = {
        "class": "give interactive or batch",
        "sha256": "give the SHA-256 of a key, in 64 hexadecimal digits",
    }

    @property
    def digest(self) -> bytes:
        """Return the key's SHA-256."""
        return bytes.fromhex(self.sha256) if self.key is None else hashlib.sha256(self.key.strip().encode()).digest()


ANONYMOUS = Tenant(None, admin=True)


class Keys:
    """The keys of a TOML file, one table per key:

        [[key]]
        key = "sk-..."       # or sha256 = "...", its SHA-256 in hexadecimal
        tenant = "search"
        admin = false
        class = "interactive"   # or "batch"
        weight = 1.0            # and the other fields of Limits

    Keys are stored as their SHA-256 and compared in constant time. A lookup among 10,000 keys is as fast as among two.
    A tenant may have several keys; its limits are stated at one key, or are the same at every key.
    """

    def __init__(self, path: str | None):
        self._path = path
        self._secret = secrets.token_bytes(32)
        # Indexed by the HMAC of a key's SHA-256 with the secret, so the time of a lookup reveals nothing about keys.
        self.by_digest: dict[bytes, tuple[bytes, Tenant]] = {}
        self._names: dict[str, str | None] = {}
        self._limits: dict[str | None, Limits] = {}
        self.reload()

    @property
    def tenants(self) -> list[Tenant]:
        """Return the tenants with keys, each once."""
        return list({tenant.name: tenant for _, tenant in self.by_digest.values()}.values())

    @property
    def num_tenants(self) -> int:
        """Return the number of tenants with keys; 0 without a file of keys."""
        return len(self._limits)

    @property
    def names(self) -> Mapping[str, str | None]:
        """Return {salt prefix: name of its tenant}."""
        return self._names

    def reload(self) -> None:
        """Read the file again. Raise JobError if it is invalid; the keys then stay as they were."""
        if self._path is not None:
            keys = read_keys(Path(self._path))
            self.by_digest = {self._place(digest): (digest, tenant) for digest, tenant in keys}
            self._names = {self.salt_prefix(tenant): tenant.name for tenant in self.tenants}
            self._limits = {tenant.name: tenant.limits for tenant in self.tenants}

    def tenant_of(self, namespace: Hashable) -> Hashable:
        """Return the name of the tenant of an engine's namespace, or None."""
        salt = namespace.salt if isinstance(namespace, Namespace) else ""
        return self._names.get(salt.partition("/")[0])

    def limits_of(self, name: Hashable) -> Limits:
        return self._limits.get(name, UNLIMITED)  # type: ignore[call-overload]

    def most_stored(self, owner: str) -> int | None:
        """Return the most bytes that a tenant may store; None if the file of keys sets no limit for it.

        Args:
            owner: the tenant's name in the store
        """
        return self.limits_of(owner or None).max_stored_bytes

    def tenant(self, header: Mapping[str, str]) -> Tenant | None:
        """Return the tenant of the key in a request's headers, or None.

        The header is "Authorization: Bearer KEY" or "x-api-key: KEY".
        """
        if self._path is None:
            return ANONYMOUS
        scheme, _, key = header.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            key = header.get("x-api-key", "")
        # Starlette decodes headers as Latin-1. Encoding restores the bytes that the client sent.
        digest = hashlib.sha256(key.strip().encode("latin-1", "replace")).digest()
        stored_digest, tenant = self.by_digest.get(self._place(digest), (bytes(len(digest)), None))
        return tenant if hmac.compare_digest(stored_digest, digest) else None

    def _place(self, digest: bytes) -> bytes:
        return hmac.digest(self._secret, digest, "sha256")

    def salt_prefix(self, tenant: Tenant) -> str:
        """Return the prefix of the salts of a tenant's requests. It prevents tenants from sharing rows."""
        if tenant.name is None:
            return ""
        return hmac.new(self._secret, tenant.name.encode(), "sha256").hexdigest()


def read_keys(path: Path) -> list[tuple[bytes, Tenant]]:
    """Return (SHA-256 of a key, its tenant) for each key in a file. Raise JobError if the file is invalid."""
    tables = read_toml(path)
    entries = tables.get("key")
    if set(tables) != {"key"} or not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise JobError(f"the file of keys {path} has no keys; write a table [[key]] with key and tenant for each")
    keys, limits = [], dict[str, dict[str, Any]]()
    for number, entry in enumerate(entries, 1):
        place = f"key {number} of {path}"
        try:
            keys.append(key := _Key.of(entry))
        except InputError as wrong:
            raise JobError(f"{place}: {wrong}") from None
        if (key.key is None) == (key.sha256 is None):
            raise JobError(f"{place} needs either key or sha256")
        limits_of_key = {name: value for name in _LIMITS if (value := getattr(key, name)) is not None}
        before = limits.setdefault(key.tenant, limits_of_key)
        if limits_of_key and before and before != limits_of_key:
            message = f"{place} has other limits than an earlier key of the same tenant"
            raise JobError(f"{message}; give them at one of the keys")
        before.update(limits_of_key)
    return [
        (key.digest, Tenant(key.tenant, key.admin, key.kind == "batch", Limits(**limits[key.tenant]))) for key in keys
    ]
