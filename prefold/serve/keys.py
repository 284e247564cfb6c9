"""Reads the file of keys, with their tenants. Each tenant has a prefix of salts, under which its prompts are shared."""

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
    """A Limits bounds what a tenant may use of the server, besides its share of the engine.

    max_waiting_requests  requests that wait to be computed; further ones are refused with 429
    max_waiting_tokens    tokens of their prompts
    max_stored_bytes      bytes of its files and batches; further ones are refused with 413. None: half of the disk
    """

    max_waiting_requests: int | None = None
    max_waiting_tokens: int | None = None
    max_stored_bytes: int | None = None


UNLIMITED = Limits()


@dataclass(frozen=True, slots=True)
class Tenant:
    """A Tenant is the person or program that uses a key.

    name      in metrics; None where there are no keys
    admin     whether it may see metrics, and look after the cache
    is_batch  whether requests with this key wait until no others do
    limits    of all of its keys together
    """

    name: str | None
    admin: bool = False
    is_batch: bool = False
    limits: Limits = UNLIMITED

    @property
    def owner(self) -> Owner:
        """Returns the owner of requests with this key."""
        return Owner(self.name, self.is_batch)


_LIMITS = tuple(field.name for field in fields(Limits))
_Least1 = Annotated[int, Meta(ge=1)]


class _Key(Body, kw_only=True):
    """A _Key is a key in the file of keys."""

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
        """Returns the key's SHA-256."""
        return bytes.fromhex(self.sha256) if self.key is None else hashlib.sha256(self.key.strip().encode()).digest()


ANYBODY = Tenant(None, admin=True)


class Keys:
    """A Keys holds the keys of a TOML file, one table a key:

        [[key]]
        key = "sk-..."       # or sha256 = "...", its SHA-256 in hexadecimal
        tenant = "search"
        admin = false
        class = "interactive"   # or "batch"
        weight = 1.0            # and the other fields of Limits

    Keys are stored as their SHA-256, and compared in constant time; a look-up among 10,000 keys is as fast as among
    two. A tenant may have several keys; its limits stand at one key, or are the same at every key.
    """

    def __init__(self, path: str | None):
        self._path = path
        self._secret = secrets.token_bytes(32)
        # By the HMAC of a key's SHA-256 with the secret, so that the time of a look-up tells nothing about keys.
        self.by_digest: dict[bytes, tuple[bytes, Tenant]] = {}
        self._names: dict[str, str | None] = {}
        self._limits: dict[str | None, Limits] = {}
        self.reload()

    @property
    def tenants(self) -> list[Tenant]:
        """Returns the tenants with keys, each once."""
        return list({tenant.name: tenant for _, tenant in self.by_digest.values()}.values())

    @property
    def num_tenants(self) -> int:
        """Returns the number of tenants with keys; 0 without a file of keys."""
        return len(self._limits)

    @property
    def names(self) -> Mapping[str, str | None]:
        """Returns {prefix of salts: name of its tenant}."""
        return self._names

    def reload(self) -> None:
        """Reads the file again. Raises JobError if it is wrong; the keys then stay as they were."""
        if self._path is not None:
            keys = read_keys(Path(self._path))
            self.by_digest = {self._place(digest): (digest, tenant) for digest, tenant in keys}
            self._names = {self.salt_prefix(tenant): tenant.name for tenant in self.tenants}
            self._limits = {tenant.name: tenant.limits for tenant in self.tenants}

    def tenant_of(self, namespace: Hashable) -> Hashable:
        """Returns the name of the tenant of an engine's namespace, or None."""
        salt = namespace.salt if isinstance(namespace, Namespace) else ""
        return self._names.get(salt.partition("/")[0])

    def limits_of(self, name: Hashable) -> Limits:
        """Returns the limits of a tenant."""
        return self._limits.get(name, UNLIMITED)  # type: ignore[call-overload]

    def most_stored(self, owner: str) -> int | None:
        """Returns how many bytes a tenant may store; None if it has no limit of its own. owner: its name in the
        store"""
        return self.limits_of(owner or None).max_stored_bytes

    def tenant(self, header: Mapping[str, str]) -> Tenant | None:
        """Returns the tenant of a request's headers (Authorization: Bearer KEY, or x-api-key: KEY), or None."""
        if self._path is None:
            return ANYBODY
        scheme, _, key = header.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            key = header.get("x-api-key", "")
        # Starlette decodes headers as Latin-1; encoding restores the bytes that were sent.
        digest = hashlib.sha256(key.strip().encode("latin-1", "replace")).digest()
        stored_digest, tenant = self.by_digest.get(self._place(digest), (bytes(len(digest)), None))
        return tenant if hmac.compare_digest(stored_digest, digest) else None

    def _place(self, digest: bytes) -> bytes:
        return hmac.digest(self._secret, digest, "sha256")

    def salt_prefix(self, tenant: Tenant) -> str:
        """Returns the prefix of the salts of a tenant's requests, which keeps tenants from sharing rows."""
        if tenant.name is None:
            return ""
        return hmac.new(self._secret, tenant.name.encode(), "sha256").hexdigest()


def read_keys(path: Path) -> list[tuple[bytes, Tenant]]:
    """Returns (SHA-256 of a key, its tenant) of each key in a file. Raises JobError."""
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
