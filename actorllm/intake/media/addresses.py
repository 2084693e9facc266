"""Where the content of an item is: in a `data:` address, in a file or at a host that the engine allows.

Files and hosts are off unless the engine's owner allows them (allowed_local_media_path, allowed_media_domains). A file is read only
if it lies below the folder when links are followed. A host is asked over http and https, and only where each of its addresses is
public. The connection goes to an address that was checked. Redirects are followed to allowed hosts alone. Bytes
and time are bounded. Called by `images` and `audio`.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import http.client
import ipaddress
import os
import socket
import ssl
import stat
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import SplitResult, unquote, urljoin, urlsplit

from actorllm.clock import now
from actorllm.errors import InvalidPromptError

MAX_BYTES = 32 << 20
"""Of one item as a file."""
MAX_REDIRECTS = 3
FETCH_TIMEOUT_S = 10.0
"""Of one item, redirects included."""
CHUNK = 1 << 16
REDIRECTS = (301, 302, 303, 307, 308)


@dataclass(frozen=True, slots=True)
class Allowed:
    """What may be read beside `data:` addresses."""

    folder: str | None = None
    """Files below it, its links followed; None: no file."""
    domains: tuple[str, ...] = ()
    """Hosts, by their exact names in lower case."""


def content_of(address: str, allowed: Allowed, place: str) -> bytes:
    """The bytes of an item. Raises InvalidPromptError, which names the place.

    Arguments:
        address: a `data:`, `file:`, `http:` or `https:` address.
        allowed: which of them are read.
        place: of the item in the prompt, for errors.
    """
    kind = address[:8].lower()
    if kind.startswith("data:"):
        return _embedded(address, place)
    if kind.startswith("file:") and allowed.folder is not None:
        return _file(address, allowed.folder, place)
    if kind.startswith(("http:", "https:")) and allowed.domains:
        return _fetched(address, allowed.domains, place)
    raise InvalidPromptError(
        f"{place}: {address!r:.80} is an address that is not read; give a data: address, or let the engine's owner allow "
        f"files (allowed_local_media_path) or hosts (allowed_media_domains)"
    )


def _embedded(address: str, place: str) -> bytes:
    head, comma, content = address.partition(",")
    if not comma or not head.lower().endswith(";base64"):
        raise InvalidPromptError(f"{place}: {address!r:.80} must be 'data:image/png;base64,' and the content")
    return decoded(content, place)


def decoded(content: str, place: str) -> bytes:
    """What a text in base64 stands for. Raises InvalidPromptError."""
    if len(content) > MAX_BYTES // 3 * 4:
        raise InvalidPromptError(f"{place}: it has {TOO_LARGE}")
    try:
        return base64.b64decode(content, validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidPromptError(f"{place}: the content is not base64 ({error})") from error


TOO_LARGE = f"more than {MAX_BYTES} bytes; send a smaller one"


# Files


def _file(address: str, folder: str, place: str) -> bytes:
    parts = _split(address, place)
    if parts.netloc not in ("", "localhost"):
        raise InvalidPromptError(f"{place}: {address!r:.80} names a host; a file: address has none")
    outside = f"{place}: {address!r:.80} is no file below allowed_local_media_path"
    try:
        # Resolved first: what lies outside is told apart from what is missing by nothing.
        path = Path(unquote(parts.path)).resolve(strict=True)
        if not path.is_relative_to(folder):
            raise InvalidPromptError(outside)
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError, RuntimeError):
        raise InvalidPromptError(outside) from None
    try:
        # A folder on the way may have become a link since.
        is_within = Path(f"/proc/self/fd/{file}").resolve().is_relative_to(folder)
        if not is_within or not stat.S_ISREG(os.fstat(file).st_mode):
            raise InvalidPromptError(outside)
        with os.fdopen(file, "rb", closefd=False) as opened:
            content = opened.read(MAX_BYTES + 1)
    except OSError:
        raise InvalidPromptError(outside) from None
    finally:
        os.close(file)
    if len(content) > MAX_BYTES:
        raise InvalidPromptError(f"{place}: it has {TOO_LARGE}")
    return content


# Hosts


def _fetched(address: str, domains: tuple[str, ...], place: str) -> bytes:
    until = now() + FETCH_TIMEOUT_S
    for _ in range(MAX_REDIRECTS + 1):
        parts = _split(address, place)
        host = (parts.hostname or "").rstrip(".")
        if parts.scheme not in ("http", "https") or host not in domains:
            raise InvalidPromptError(
                f"{place}: {host!r:.80} is not one of allowed_media_domains; send the content itself"
            )
        if parts.username is not None or parts.password is not None:
            raise InvalidPromptError(f"{place}: an address with a user name is not read; leave that out")
        try:
            answer = _ask(parts, host, until, place)
        except (OSError, http.client.HTTPException, UnicodeError) as error:
            raise InvalidPromptError(f"{place}: {host} could not be asked: {error!s:.100}") from error
        if isinstance(answer, bytes):
            return answer
        address = urljoin(address, answer)
    raise InvalidPromptError(f"{place}: there are more than {MAX_REDIRECTS} redirects; send the content itself")


def _split(address: str, place: str) -> SplitResult:
    if not address.isascii() or any(ord(letter) <= 32 for letter in address):
        raise InvalidPromptError(
            f"{place}: {address!r:.80} must be encoded: it holds characters that addresses have not"
        )
    try:
        parts = urlsplit(address)
        parts.port  # noqa: B018 - which is checked when it is asked for
    except ValueError as error:
        raise InvalidPromptError(f"{place}: {address!r:.80} is no address: {error}") from error
    return parts


def _ask(parts: SplitResult, host: str, until: float, place: str) -> bytes | str:
    """The content at an address, or where that says it is."""
    is_tls = parts.scheme == "https"
    port = parts.port or (443 if is_tls else 80)
    with contextlib.ExitStack() as stack:
        at = _public_address(host, port, place)
        line = stack.enter_context(socket.create_connection((at, port), timeout=_left(until)))
        if is_tls:
            line = stack.enter_context(ssl.create_default_context().wrap_socket(line, server_hostname=host))
        connection = stack.enter_context(contextlib.closing(http.client.HTTPConnection(host, port)))
        connection.sock = line
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        connection.request("GET", target, headers={"Accept": "*/*", "User-Agent": "actorllm"})
        line.settimeout(_left(until))
        answer = stack.enter_context(connection.getresponse())
        if answer.status in REDIRECTS and (where := answer.getheader("Location")):
            return where
        if answer.status != 200:
            raise InvalidPromptError(f"{place}: {host} answered with status {answer.status}")
        content = bytearray()
        while part := answer.read1(CHUNK):
            content += part
            if len(content) > MAX_BYTES:
                raise InvalidPromptError(f"{place}: it has {TOO_LARGE}")
            line.settimeout(_left(until))
        if answer.length:
            raise InvalidPromptError(f"{place}: {host} sent {answer.length} bytes less than it said")
        return bytes(content)


def _public_address(host: str, port: int, place: str) -> str:
    """One of the host's, if all of them are public."""
    found = [str(entry[4][0]) for entry in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
    for address in found:
        if not is_public(address):
            raise InvalidPromptError(f"{place}: {host} is in a private network, which is not asked")
    return found[0]


def is_public(address: str) -> bool:
    """Whether an IP address is one of the public network."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        inner = ip.ipv4_mapped or ip.sixtofour or (ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF) if ip in NAT64 else None)
        if inner is not None:
            return is_public(str(inner))
    return ip.is_global and not ip.is_multicast


NAT64 = ipaddress.IPv6Network("64:ff9b::/96")


def _left(until: float) -> float:
    left = until - now()
    if left <= 0:
        raise TimeoutError(f"it took longer than {FETCH_TIMEOUT_S:.0f} s")
    return left
