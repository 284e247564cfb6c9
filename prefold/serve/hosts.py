"""Whom a server without keys answers: programs that reach it, but no page of another site in a browser that does.

A page of any site may send requests to this machine, and where the name of its own server is made to stand for this
address (DNS rebinding), it may read the answers too. What browsers say of such a page tells it apart: the name that the
request is sent to (Host), and the site that the page is from (Origin).
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable
from urllib.parse import urlsplit

from .http import Refusal
from .options import LOOPBACK, ServeOptions


class Hosts:
    """Hosts are the names by which a server may be asked, and whose pages may ask it.

    A server that other machines reach without keys was opened to them on purpose, and they ask it by names that it does
    not know: of a container, of a proxy, of a domain. It may be asked by any name, unless some are allowed.
    """

    def __init__(self, options: ServeOptions):
        own = (*LOOPBACK, options.host, socket.gethostname(), *options.allowed_hosts)
        self._names = {plain(name) for name in own}
        self._is_any_name_right = not (options.is_local or options.allowed_hosts)

    def check(self, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """Raises Refusal (403) for a request to another name, or of a page of another site. headers: (name, value) of
        each, the names in small letters."""
        host = origin = None
        for name, value in headers:
            if name == b"host" and host is None:
                host = value.decode("latin-1").lower()
            elif name == b"origin":
                origin = value.decode("latin-1").lower()
        # A name can be made to stand for this address, an address cannot.
        if host and not self._is_any_name_right and not (name_of(host) in self._names or is_address(name_of(host))):
            remedy = "ask by its address, or start it with --allowed-host and this name"
            raise Refusal(403, f"this server is not {host!r:.100}", remedy=remedy, code="unknown_host")
        if origin is not None:
            site = origin.partition("://")[2]
            name_of_site = name_of(site)  # "" of a file, or where any page hides its own: then it cannot be allowed
            if not name_of_site or (site != host and name_of_site not in self._names):
                message = f"pages of {origin!r:.100} may not ask this server"
                named = "start it with --allowed-host and the name of their host"
                remedy = named if name_of_site else "open the page from a host, as http://HOST, not as a file"
                raise Refusal(403, message, remedy=remedy, code="foreign_origin")


def plain(name: str) -> str:
    """Returns a name as it is compared: in small letters, without the dot that may end a whole one."""
    return name.lower().removesuffix(".")


def name_of(host: str) -> str:
    """Returns the name or address in a host with a port or without, as `plain` does; "" where it cannot be read."""
    try:
        return plain(urlsplit(f"//{host}").hostname or "")
    except ValueError:
        return ""


def is_address(name: str) -> bool:
    """Returns whether this is an address in numbers."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
