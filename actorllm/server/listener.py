"""`Listener`: where a server listens, and how. `Bound`: its sockets, which are its own before the engine starts.

What is wrong with an address, a port, a path or a certificate is said before anything is loaded, as a ConfigError. From `bind`
on no other server can have the place; connections are refused until `Bound.listen`, as long as they cannot be answered.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import math
import os
import socket
import ssl
import stat
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from actorllm.errors import ConfigError, nearest_name
from actorllm.server.connections import max_connections

BACKLOG = 2048
MAX_PORT = 65535
SOCKET_MODE = 0o600
"""Of a unix socket: the user of the server may connect."""
LOG_LEVELS = ("critical", "error", "warning", "info", "debug", "trace")
CERT_REQS = {0: "none", 1: "optional", 2: "required"}

MAX_PATH_BYTES = 107 if sys.platform == "linux" else 103
"""Of a unix socket."""

FREE_PORT_TRIES = 20
LOCK_TRIES = 200
LOCK_PAUSE_S = 0.005

HINTS = {
    errno.EADDRINUSE: "another program has it; end that one, or choose another",
    errno.EADDRNOTAVAIL: "this machine has no such address; 127.0.0.1 is this machine alone, 0.0.0.0 every interface",
    errno.EACCES: "this user may not; ports below 1024 and folders of others need more rights",
    errno.ENOENT: "its folder does not exist",
}


@dataclass(frozen=True, slots=True)
class Listener:
    """Where a server listens and how; uvicorn's options. Raises ConfigError for what cannot be."""

    host: str = "127.0.0.1"
    port: int = 8000
    unix_socket: str | None = None
    unix_socket_mode: int = SOCKET_MODE
    ssl_keyfile: str | None = None
    ssl_certfile: str | None = None
    ssl_ca_certs: str | None = None
    ssl_cert_reqs: int = 0
    log_level: str = "info"
    access_log: bool = True
    drain_timeout_s: float = 30.0
    max_connections: int | None = None
    """Of each API process; None: as many as its descriptors allow (`connections.max_connections`)."""

    def __post_init__(self) -> None:
        if not 0 <= self.port <= MAX_PORT:
            raise ConfigError(f"port={self.port!r} must be between 0 (any that is free) and {MAX_PORT}")
        if self.unix_socket == "":
            raise ConfigError("unix_socket='' must be a path")
        if not 0 <= self.unix_socket_mode <= 0o777:
            raise ConfigError(f"unix_socket_mode={self.unix_socket_mode:#o} must be between 0 and 0o777")
        if self.log_level not in LOG_LEVELS:
            near = nearest_name(self.log_level, LOG_LEVELS)
            raise ConfigError(f"log_level={self.log_level!r:.80} must be one of {', '.join(LOG_LEVELS)}{near}")
        if not 0 <= self.drain_timeout_s < math.inf:
            raise ConfigError(f"drain_timeout={self.drain_timeout_s!r} must be a number of seconds, 0 or more")
        max_connections(self.max_connections)

    def tls(self) -> dict[str, Any]:
        """uvicorn's options for TLS, which were tried. Raises ConfigError when it cannot be set up with these."""
        if self.ssl_cert_reqs not in CERT_REQS:
            known = ", ".join(f"{number} ({name})" for number, name in CERT_REQS.items())
            raise ConfigError(f"ssl_cert_reqs={self.ssl_cert_reqs!r} must be one of {known}")
        # Half of a configuration is refused: the server would listen without TLS.
        if self.ssl_certfile is None:
            if self.ssl_keyfile is not None or self.ssl_ca_certs is not None or self.ssl_cert_reqs:
                raise ConfigError("TLS needs ssl_certfile, too")
            return {}
        if self.ssl_cert_reqs == ssl.CERT_REQUIRED and self.ssl_ca_certs is None:
            raise ConfigError("ssl_cert_reqs=2 needs ssl_ca_certs: without them no certificate of a client is valid")
        files = {name: getattr(self, name) for name in ("ssl_certfile", "ssl_keyfile", "ssl_ca_certs")}
        # Errors of files are told by name first, because OpenSSL's do not say which file is meant.
        for name, file in files.items():
            if file is not None:
                try:
                    open(file, "rb").close()
                except OSError as error:
                    raise ConfigError(f"{name}={file!r}: TLS cannot be set up with it: {_reason(error)}") from None
        # The same that uvicorn will do, before an engine is loaded.
        tried = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            tried.load_cert_chain(self.ssl_certfile, self.ssl_keyfile, password=self._refuse_password)
        except OSError as error:
            pair = f"ssl_certfile={self.ssl_certfile!r}, ssl_keyfile={self.ssl_keyfile!r}"
            why = "there must be a certificate and its key in them, in the PEM format"
            if isinstance(error, ssl.SSLError) and error.reason == "KEY_VALUES_MISMATCH":
                why = "the key is not that of the certificate"
            raise ConfigError(f"{pair}: TLS cannot be set up with these: {why}") from error
        if self.ssl_ca_certs is not None:
            try:
                tried.load_verify_locations(self.ssl_ca_certs)
            except OSError as error:
                why = "there must be certificates in it, in the PEM format"
                raise ConfigError(f"ssl_ca_certs={self.ssl_ca_certs!r}: TLS cannot be set up with it: {why}") from error
        return {**files, "ssl_cert_reqs": self.ssl_cert_reqs}

    def _refuse_password(self) -> str:
        """OpenSSL would ask at the terminal."""
        raise ConfigError(f"ssl_keyfile={self.ssl_keyfile!r} is encrypted: give a key without a password")

    def bind(self) -> Bound:
        """The place, for this server alone. Raises ConfigError."""
        try:
            if self.unix_socket is not None:
                return _bind_unix(self.unix_socket, self.unix_socket_mode)
            return Bound(_bind_tcp(self._plain_host, self.port))
        except (OSError, ValueError) as error:
            hint = f" ({self._hint(error)})" if self._hint(error) else ""
            raise ConfigError(f"cannot listen on {self.place()}: {_reason(error)}{hint}") from None

    def _hint(self, error: Exception) -> str | None:
        """What to do about it."""
        if self.unix_socket is not None and len(os.fsencode(self.unix_socket)) > MAX_PATH_BYTES:
            return f"it has {len(os.fsencode(self.unix_socket))} bytes, and the most is {MAX_PATH_BYTES}"
        if not isinstance(error, OSError) or isinstance(error, socket.gaierror):
            return None
        if error.errno == errno.EADDRINUSE and self.unix_socket is not None and not _is_socket(self.unix_socket):
            return "what is there is no socket; choose another path"
        return HINTS.get(error.errno or 0)

    @property
    def _plain_host(self) -> str:
        """As resolvers have it: an IPv6 address has brackets in URLs only."""
        return self.host[1:-1] if self.host.startswith("[") and self.host.endswith("]") else self.host

    def place(self, bound: Bound | None = None) -> str:
        """Where it is, in words; bound: with the port that was found."""
        if self.unix_socket is not None:
            return f"unix socket {self.unix_socket}"
        port = self.port if bound is None else bound.sockets[0].getsockname()[1]
        host = f"[{self._plain_host}]" if ":" in self.host else self.host
        return f"{'http' if self.ssl_certfile is None else 'https'}://{host}:{port}"


class Bound:
    """Sockets that refuse connections until `listen`, and let no other program have their place."""

    def __init__(self, sockets: list[socket.socket], path: str | None = None) -> None:
        """path: of a unix socket, which ends with it."""
        self.sockets = sockets
        self._path = path
        self._inode = None if path is None else _inode(path)

    def listen(self) -> None:
        """Take connections from now on. Raises ConfigError."""
        try:
            for each in self.sockets:
                if self._path is None:  # connections of a server that has ended do not matter
                    each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                each.listen(BACKLOG)
        except OSError as error:
            raise ConfigError(f"cannot listen on {each.getsockname()}: {_reason(error)}") from None

    def unlink(self) -> None:
        """The path ends, unless it has become another one's. Called while the socket is open, so that no server takes it over."""
        if self._path is not None:
            with contextlib.suppress(OSError):
                if _inode(self._path) == self._inode:
                    os.unlink(self._path)
            self._path = None

    def close(self) -> None:
        """Idempotent."""
        self.unlink()
        for each in self.sockets:
            each.close()


def _bind_tcp(host: str, port: int) -> list[socket.socket]:
    """One socket for every address of a host, on one port. Raises OSError."""
    flags = socket.AI_PASSIVE
    found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=flags)
    places = list(dict.fromkeys((family, address) for family, _, _, _, address in found))
    for tries_left in reversed(range(FREE_PORT_TRIES)):
        sockets: list[socket.socket] = []
        missing: OSError | None = None
        try:
            for family, (name, _, *rest) in places:
                chosen = sockets[0].getsockname()[1] if sockets and not port else port
                try:
                    sockets.append(_reserve(family, (name, chosen, *rest), is_only=len(places) == 1))
                except OSError as error:
                    if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                        raise
                    missing = error  # the machine does not speak that family
            if not sockets and missing is not None:
                raise missing
            return sockets
        except OSError as error:
            for made in sockets:
                made.close()
            if port or not tries_left or error.errno != errno.EADDRINUSE:
                raise  # else the port that was free at one address was not at another
    raise AssertionError("unreachable")


def _reserve(family: int, address: tuple[Any, ...], is_only: bool) -> socket.socket:
    """A socket that is bound, for itself alone.

    SO_REUSEADDR is needed where connections of a server that has ended linger. On Linux it also lets a second socket be bound
    beside one that does not listen, and of both only one can listen. So this one listens for a moment, is closed to other
    sockets, and goes back to refusing connections. A port that the system chooses belongs to no other server.
    """
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        if family == socket.AF_INET6:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, not is_only)
        if address[1]:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
        if address[1] and sys.platform == "linux":
            made.listen(1)
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
            made.shutdown(socket.SHUT_RDWR)
    except BaseException:
        made.close()
        raise
    return made


def _bind_unix(path: str, mode: int) -> Bound:
    """No client can connect before `listen`, and by then it has its mode. Raises OSError and ValueError."""
    made = socket.socket(socket.AF_UNIX)
    try:
        with _one_at_a_time(os.path.dirname(path) or "."):
            _remove_stale(path)
            made.bind(path)
        bound = Bound([made], path)
    except BaseException:
        made.close()
        raise
    try:
        os.chmod(path, mode)
    except BaseException:
        bound.close()
        raise
    return bound


def _remove_stale(path: str) -> None:
    """A unix socket of a server that was killed. One of another kind can connect to none, and is told so by a live one."""
    with contextlib.suppress(FileNotFoundError):
        if not _is_socket(path):
            return
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect(path)
            except ConnectionRefusedError:
                os.unlink(path)
            except OSError:
                return


@contextlib.contextmanager
def _one_at_a_time(folder: str) -> Iterator[None]:
    """Two servers must not both find a stale socket, and the later one remove what the other has made.

    A lock that another process holds for long is not waited for.
    """
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:  # it is not there, or may not be read
        yield
        return
    try:
        for _ in range(LOCK_TRIES):
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(LOCK_PAUSE_S)
            except OSError:
                break
            else:
                break
        yield
    finally:
        os.close(fd)


def _is_socket(path: str) -> bool:
    return stat.S_ISSOCK(os.stat(path).st_mode)


def _inode(path: str) -> tuple[int, int]:
    found = os.lstat(path)
    return found.st_dev, found.st_ino


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
