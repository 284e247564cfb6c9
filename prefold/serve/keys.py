"""Who may ask: keys, the tenants they stand for, and the namespace in which each tenant's prompts are shared."""

from __future__ import annotations

import hashlib
import hmac
import secrets
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import JobError

__all__ = ["ANYBODY", "Keys", "Tenant"]


@dataclass(frozen=True, slots=True)
class Tenant:
    """A Tenant is who a key stands for.

    name   in metrics; None where there are no keys
    admin  whether it may see metrics, and look after the cache
    """

    name: str | None
    admin: bool = False


ANYBODY = Tenant(None, admin=True)


class Keys:
    """The keys of a file in TOML, one table a key:

        [[key]]
        key = "sk-..."       # or sha256 = "...", its SHA-256 in hexadecimal
        tenant = "search"
        admin = false

    Keys are kept as their SHA-256, and compared in constant time. Several keys may stand for one tenant.
    """

    def __init__(self, path: str | None):
        self._path = path
        self._secret = secrets.token_bytes(32)
        self._tenants: list[tuple[bytes, Tenant]] = []
        self.reload()

    @property
    def tenants(self) -> list[Tenant]:
        """Returns those whom keys stand for, each once."""
        return list({tenant.name: tenant for _, tenant in self._tenants}.values())

    def reload(self) -> None:
        """Reads the file again. Raises JobError where it is wrong, and then the keys stay as they were."""
        if self._path is not None:
            self._tenants = read_keys(Path(self._path))

    def tenant(self, header: Mapping[str, str]) -> Tenant | None:
        """Returns the tenant of a request's headers (Authorization: Bearer KEY, or x-api-key: KEY); None for nobody."""
        if self._path is None:
            return ANYBODY
        scheme, _, key = header.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            key = header.get("x-api-key", "")
        digest, found = hashlib.sha256(key.strip().encode()).digest(), None
        for known, tenant in self._tenants:
            if hmac.compare_digest(known, digest):
                found = tenant
        return found

    def namespace(self, tenant: Tenant) -> str:
        """Returns what stands before the salts of a tenant's requests, so that no prefix is shared with another."""
        if tenant.name is None:
            return ""
        return hmac.new(self._secret, tenant.name.encode(), "sha256").hexdigest()


def read_keys(path: Path) -> list[tuple[bytes, Tenant]]:
    """Returns (SHA-256 of a key, its tenant) of each key in a file. Raises JobError."""
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise JobError(f"the file of keys {path} cannot be read: {error}") from None
    entries = tables.get("key")
    if set(tables) != {"key"} or not isinstance(entries, list) or not entries:
        raise JobError(f"the file of keys {path} has no keys; write a table [[key]] with key and tenant for each")
    return [_entry(path, number, entry) for number, entry in enumerate(entries, 1)]


def _entry(path: Path, number: int, entry: Mapping[str, Any]) -> tuple[bytes, Tenant]:
    where = f"key {number} of {path}"
    unknown = set(entry) - {"key", "sha256", "tenant", "admin"}
    if unknown:
        raise JobError(f"{where} has {', '.join(sorted(unknown))}; a key has key or sha256, tenant, admin")
    tenant, admin = entry.get("tenant"), entry.get("admin", False)
    if not isinstance(tenant, str) or not tenant or not isinstance(admin, bool):
        raise JobError(f"{where} needs tenant, a text; admin is true or false")
    if ("key" in entry) == ("sha256" in entry):
        raise JobError(f"{where} needs either key or sha256")
    if "key" in entry:
        if not isinstance(entry["key"], str) or not entry["key"].strip():
            raise JobError(f"{where}: key is not a text")
        digest = hashlib.sha256(entry["key"].strip().encode()).digest()
    else:
        try:
            digest = bytes.fromhex(entry["sha256"])
        except (TypeError, ValueError):
            digest = b""
        if len(digest) != 32:
            raise JobError(f"{where}: sha256 is not the SHA-256 of a key, in 64 hexadecimal digits")
    return digest, Tenant(tenant, admin)
