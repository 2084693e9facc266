"""Where processes that do not know each other meet: the named engines of one user, as sockets in a private folder.

Owns the folder, the names in it, and what the two sides check of each other. The folder is $XDG_RUNTIME_DIR/actorllm.
Without that it is /run/user/<uid>/actorllm, or actorllm-<uid> in the folder for temporary files; its mode is 0700. An
entry is a SEQPACKET socket on which the owner of the engine listens. Its frames are those of `child.send_frame`:

    program → engine    hello {version}  describe  join  leave  relink {replica, link}
    engine → program    welcome {pid, config}  description {...}  refused {type_name, message}
                        joined {config}  link {info, generation, num_spokes, index} + descriptors
                        lost {link, generation, type_name, error}  bye {type_name, message}

Invariants: the file mode keeps other users out, and both sides ask SO_PEERCRED as well. An entry whose owner is dead is
no engine, and is removed at the next look. Entries are made and removed under the folder's lock only. `AttachServer`
claims a name; `AttachClient` and `actorllm ps` connect.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import socket
import stat
import struct
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from actorllm.actors.actor import own_class
from actorllm.actors.child import receive_frame, send_frame
from actorllm.config import check_engine_name
from actorllm.errors import (
    ActorLLMError,
    AttachError,
    ConfigError,
    EngineDeadError,
    EngineError,
    EngineNotFoundError,
    nearest_name,
)

HANDSHAKE_TIMEOUT_S = 5.0
"""How long an engine may take to answer a frame. Its engine thread does nothing else of this length."""
BACKLOG = 128
SUFFIX = ".engine"
LOCK = ".lock"


@dataclass(frozen=True, slots=True)
class Peer:
    """The process at the other end of a socket, as the kernel says."""

    pid: int
    """0: it lives in another pid namespace."""
    uid: int


def peer_of(control: socket.socket) -> Peer:
    """Of a connected socket: on the engine's side the process that connected, on the other the one that began to listen."""
    pid, uid, _ = struct.unpack("3i", control.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return Peer(pid, uid)


def is_alive(pid: int) -> bool:
    """Whether the process runs; one that only waits to be reaped does not. pid 0 stands for one that cannot be seen."""
    if pid == 0:
        return True
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return False
    try:
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        return not poll.poll(0)
    finally:
        os.close(fd)


# The folder -----------------------------------------------------------------------------------------------------------


def folder() -> Path:
    """Where the engines of this user meet. Not made yet, perhaps."""
    uid = os.geteuid()
    runtime = os.environ.get("XDG_RUNTIME_DIR") or f"/run/user/{uid}"
    if os.path.isdir(runtime) and os.access(runtime, os.W_OK | os.X_OK):
        return Path(runtime) / "actorllm"
    return Path(tempfile.gettempdir()) / f"actorllm-{uid}"


@contextlib.contextmanager
def _open_folder(path: Path) -> Iterator[int]:
    """A descriptor of the folder. FileNotFoundError, or ConfigError when another user can get in."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        info = os.fstat(fd)
        if info.st_uid != os.geteuid() or info.st_mode & 0o022:
            raise ConfigError(
                f"{str(path)!r} belongs to uid {info.st_uid} with mode {stat.S_IMODE(info.st_mode):#o}; named engines "
                f"need a folder that only this user (uid {os.geteuid()}) can write to: remove it, or set "
                f"XDG_RUNTIME_DIR to another one"
            )
        yield fd
    finally:
        os.close(fd)


@contextlib.contextmanager
def _locked(folder_fd: int) -> Iterator[None]:
    """Alone among the processes that make and remove entries; held for microseconds."""
    lock = os.open(LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600, dir_fd=folder_fd)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def _address(folder_fd: int, name: str) -> str:
    """The path of an entry, whatever the length of the folder's own (a socket's is limited to 107 bytes)."""
    return f"/proc/self/fd/{folder_fd}/{name}{SUFFIX}"


def _reach(folder_fd: int, name: str, timeout_s: float) -> socket.socket | None:
    """A connection to the engine; None when there is none of this name. OSError as `connect`."""
    control = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        control.settimeout(timeout_s)
        control.connect(_address(folder_fd, name))
        if is_alive(peer_of(control).pid):
            return control
        # The owner is dead, and a fork of it holds the socket: no answer will ever come.
    except (FileNotFoundError, ConnectionRefusedError):
        pass
    except BaseException:
        control.close()
        raise
    control.close()
    return None


def _owner(folder_fd: int, name: str) -> int | None:
    """The pid of the process whose engine has this name; None: there is none. 0: one that cannot be asked now."""
    try:
        control = _reach(folder_fd, name, HANDSHAKE_TIMEOUT_S)
    except OSError:
        return 0
    if control is None:
        return None
    with control:
        return peer_of(control).pid


# The engine's side ----------------------------------------------------------------------------------------------------


class Claim:
    """A name, held until `release`, and the socket that listens under it."""

    def __init__(self, name: str, listener: socket.socket, path: Path) -> None:
        self.name = name
        self.listener = listener
        self._path = path
        self._inode = os.stat(path / f"{name}{SUFFIX}").st_ino

    def release(self) -> None:
        """Give the name back. Idempotent."""
        self.listener.close()
        entry = f"{self.name}{SUFFIX}"
        with contextlib.suppress(FileNotFoundError, ConfigError), _open_folder(self._path) as fd, _locked(fd):
            if os.stat(entry, dir_fd=fd).st_ino == self._inode:  # else the entry was removed, and the name is another's
                os.unlink(entry, dir_fd=fd)


def claim(name: str) -> Claim:
    """Take a name for an engine of this process. ConfigError: it is taken, or the folder cannot be used."""
    check_engine_name(name)
    path = folder()
    try:
        path.mkdir(mode=0o700, exist_ok=True)
        with _open_folder(path) as fd, _locked(fd):
            owner = _owner(fd, name)
            if owner is not None:
                who = "this process" if owner == os.getpid() else f"process {owner}"
                raise ConfigError(
                    f"name={name!r} is that of a running engine of {who}; choose another name, or join that one with "
                    f"AsyncLLM.attach({name!r})"
                )
            with contextlib.suppress(FileNotFoundError):
                os.unlink(f"{name}{SUFFIX}", dir_fd=fd)
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            try:
                listener.bind(_address(fd, name))
                os.chmod(f"{name}{SUFFIX}", 0o600, dir_fd=fd)
                listener.listen(BACKLOG)
                listener.setblocking(False)
                return Claim(name, listener, path)
            except BaseException:
                listener.close()
                raise
    except OSError as error:
        raise ConfigError(f"name={name!r} cannot be registered in {str(path)!r}: {error}") from error


# The other side -------------------------------------------------------------------------------------------------------


def names() -> list[str]:
    """The names of this user's running engines, sorted; entries of dead ones are removed on the way."""
    found = []
    path = folder()
    try:
        with _open_folder(path) as fd:
            for entry in sorted(os.listdir(fd)):
                name = entry.removesuffix(SUFFIX)
                if name == entry:
                    continue
                with _locked(fd):
                    if _owner(fd, name) is not None:
                        found.append(name)
                    else:
                        with contextlib.suppress(FileNotFoundError):
                            os.unlink(entry, dir_fd=fd)
    except FileNotFoundError:
        return []
    return found


def connect(name: str) -> socket.socket:
    """A connection to the engine of this name, with HANDSHAKE_TIMEOUT_S as its timeout.

    EngineNotFoundError: there is none; says which there are. AttachError: it cannot be reached, or is another user's.
    """
    check_engine_name(name)
    path = folder()
    try:
        with _open_folder(path) as fd:
            control = _reach(fd, name, HANDSHAKE_TIMEOUT_S)
    except FileNotFoundError:
        control = None
    except PermissionError as error:
        raise AttachError(f"engine {name!r} in {str(path)!r} is another user's: {error}") from error
    except OSError as error:
        raise AttachError(f"engine {name!r} cannot be reached: {error}") from error
    if control is None:
        raise _not_found(name)
    peer = peer_of(control)
    if peer.uid != os.geteuid():
        control.close()
        raise AttachError(
            f"engine {name!r} is run by uid {peer.uid} and this process by uid {os.geteuid()}; only processes of the "
            f"same user can join"
        )
    return control


def _not_found(name: str) -> EngineNotFoundError:
    running = names()
    if not running:
        return EngineNotFoundError(
            f"there is no engine {name!r}: no named engine of this user runs; start one with AsyncLLM(model, name={name!r})"
        )
    return EngineNotFoundError(
        f"there is no engine {name!r} (running: {', '.join(running)}){nearest_name(name, running)}"
    )


def exchange(control: socket.socket, name: str, op: str, **values: Any) -> dict[str, Any]:
    """Send a frame and return the answer. Raises what the engine refused it with, EngineDeadError or AttachError."""
    pid = peer_of(control).pid
    try:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it may have said why before it closed
            send_frame(control, op, **values)
        frame, fds = receive_frame(control)
    except TimeoutError as error:
        raise AttachError(
            f"engine {name!r} (process {pid}) has not answered within {HANDSHAKE_TIMEOUT_S:g} s"
        ) from error
    for fd in fds:
        os.close(fd)
    if frame is None:
        raise EngineDeadError(f"engine {name!r} (process {pid}) ended during the handshake")
    if frame["op"] in ("refused", "bye"):
        raise error_of(frame)
    return frame


def error_of(frame: dict[str, Any]) -> ActorLLMError:
    """The exception that a "refused" or a "bye" stands for."""
    cls = own_class(frame["type_name"]) or EngineError
    return cls(frame["message"])


@dataclass(frozen=True, slots=True)
class EngineDescription:
    """A running engine from outside."""

    name: str
    pid: int
    """Of the process that owns it."""
    model: str
    version: str
    state: str
    """starting, running or stopping; or "silent": it does not answer, and what follows is not known."""
    uptime_s: float | None
    num_frontends: int | None
    num_running: int | None
    """Requests; None while it starts."""
    num_waiting: int | None
    num_replicas: int | None = None
    """That run now."""


def running_engines() -> list[EngineDescription]:
    """The named engines of this user, whatever their version. One that ends meanwhile is left out."""
    found = []
    for name in names():
        with contextlib.suppress(EngineNotFoundError, EngineDeadError), connect(name) as control:
            pid = peer_of(control).pid
            try:
                answer = exchange(control, name, "describe")
            except AttachError:
                found.append(EngineDescription(name, pid, "", "", "silent", None, None, None, None))
                continue
            known: dict[str, Any] = {f.name: answer.get(f.name) for f in fields(EngineDescription)}
            found.append(EngineDescription(**known | {"name": name, "pid": pid}))
    return found
