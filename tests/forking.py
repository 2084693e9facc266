"""Processes of engines, forked from one that has loaded what they need.

Most of what the start of a worker costs is the import of torch: 1.5 of 2.5 s of processor time, for each of some hundred
engines of this suite. So engines of the tests' own process do not exec their workers and schedulers. A process of each
kind has imported what `ActorSpec.preload` names, and makes copies of itself. A copy runs the same program, `actors/child.py`,
as a child of the tests' process. It has the descriptors, the environment, the folder and the session that exec gives it.

Programs that tests run are copied in the same way (`tests/programs.py`). Each copy has a process beside it that makes the copies
for its engines.

Where anything that a process inherits is not as it was when the tests began, exec it is: another environment, another limit.
So it is for actors of tests. `ACTORLLM_EXEC=1` forks nothing: `make test-slow` sets it.

Run as a program by `Preloaded`: `python -P forking.py <descriptor> <module> ...`.
"""

from __future__ import annotations

import array
import atexit
import builtins
import contextlib
import ctypes
import fcntl
import gc
import importlib
import io
import json
import logging
import os
import platform
import resource
import runpy
import signal
import socket
import subprocess
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SYS_CLONE = {"x86_64": 56, "aarch64": 220}.get(platform.machine())
PR_SET_PDEATHSIG, PR_SET_NAME = 1, 15
CLONE_PARENT = 0x8000
"""The new process is a child of the parent of the one that makes it, and not its own."""
IS_ASKED_TO_EXEC = bool(os.environ.get("ACTORLLM_EXEC"))
LIMITS = [name for name in dir(resource) if name.startswith("RLIMIT_")]
OF_A_TEST = ("PYTEST_CURRENT_TEST", "ACTORLLM_TEST_", "TORCHINDUCTOR_CACHE_DIR", "XDG_")
"""What variables begin with that nothing reads while it is imported. torch sets that of its compiler in the tests' process."""
OF_A_PROGRAM = (*OF_A_TEST, "ACTORLLM_", "PYTHONPATH", "PYTHONUNBUFFERED")
"""The same for programs. `run` does what Python does with those of Python."""
OF_SCRIPTED_WORKERS = ("numpy",)
"""What workers without a model import (`tests.actors.scripted_topology`): less than a scheduler does."""
OF_EVERY_LOOP = ("actorllm.actors.engine_thread", "anyio._backends._asyncio", "uvloop")
NAME = "preloaded"
"""What ps shows of a process that is copied."""
MAX_REQUEST = 1 << 17
HIGH_DESCRIPTOR = 300
"""A program may look at which low numbers are free."""
LOADING_S = 200.0
"""Imports that take longer hang."""


def without(names: tuple[str, ...], environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that begin with none of these."""
    return {name: value for name, value in environment.items() if not name.startswith(names)}


def limits() -> dict[str, tuple[int, int]]:
    return {name: resource.getrlimit(getattr(resource, name)) for name in LIMITS}


@contextlib.contextmanager
def outside_the_timeout() -> Iterator[None]:
    """What is done within it takes nothing of the time that pytest-timeout leaves the test."""
    left, every = signal.getitimer(signal.ITIMER_REAL)
    if not left:  # no test is timed
        yield
        return
    signal.setitimer(signal.ITIMER_REAL, left + LOADING_S, every)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, left, every)


class Source:
    """Where copies are from: the other end of the socket of a process that makes them."""

    def __init__(self, requests: socket.socket) -> None:
        self._socket = requests
        self._lock = threading.Lock()

    def copy(self, program: str, arguments: list[str], descriptors: list[int], environment: Mapping[str, str]) -> int:
        """The pid of one that runs this program. descriptors: stdin, stdout, stderr, and that of the first argument."""
        return self._ask({"program": program, "arguments": arguments, "folder": os.getcwd()}, descriptors, environment)

    def _ask(self, request: dict[str, Any], descriptors: list[int], environment: Mapping[str, str]) -> int:
        packet = json.dumps(request | {"environment": {**environment}}).encode()
        with self._lock:
            self._socket.sendmsg([packet], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))])
            if not (pid := self._socket.recv(64)):
                raise RuntimeError("the process that is copied has ended: see its stderr")
            return int(pid)


class Preloaded(Source):
    """A process that imports these modules when it is first asked for a copy, and then makes copies of itself.

    Made by the main thread: the kernel ends the children of a thread with it, if they have asked for that.

    Arguments:
        modules: their names.
        environment: what the process has, and its copies are to have.
        more: variables that are read while something is loaded, and that copies need not have.
        options: of the interpreter.
        free: beginnings of the names of variables that may differ.
    """

    def __init__(
        self,
        modules: Sequence[str],
        environment: Mapping[str, str],
        *,
        more: Mapping[str, str] | None = None,
        options: Sequence[str] = (),
        free: tuple[str, ...] = OF_A_TEST,
    ) -> None:
        self._is_loaded = False
        self._free = free
        self._environment = without(free, environment)
        self._limits = limits()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        super().__init__(ours)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, *options, "-P", __file__, str(theirs.fileno()), *modules],
                env={**self._environment, **(more or {})},
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
            )

    def fits(self, environment: Mapping[str, str]) -> bool:
        """Whether a process with this environment, made by exec now, would inherit what a copy has."""
        is_same = without(self._free, environment) == self._environment
        return is_same and limits() == self._limits and not self.has_ended

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def begin(
        self, argv: list[str], descriptors: list[int], folder: str, environment: Mapping[str, str], *, is_leader: bool
    ) -> int:
        """The pid of a copy that goes on as Python with these arguments. is_leader: in a session of its own."""
        return self._ask({"argv": argv, "folder": folder, "is_leader": is_leader}, descriptors, environment)

    def _ask(self, request: dict[str, Any], descriptors: list[int], environment: Mapping[str, str]) -> int:
        if self._is_loaded:
            return super()._ask(request, descriptors, environment)
        with outside_the_timeout():  # the imports are for many tests, and whichever is first waits for them
            pid = super()._ask(request, descriptors, environment)
        self._is_loaded = True
        return pid

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # also where a forked child has the descriptor
        self._socket.close()
        self._process.wait()


class Copy:
    """What the supervisor uses of `subprocess.Popen`, of a child that was not made by it. From any thread."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        return self._wait(os.WNOHANG)

    def wait(self) -> int | None:
        return self._wait(0)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def send_signal(self, number: int) -> None:
        with self._lock:
            if self.returncode is None:
                os.kill(self.pid, number)  # not reaped: the pid is no stranger's

    def _wait(self, options: int) -> int | None:
        with self._lock:
            if self.returncode is None:
                pid, status = os.waitpid(self.pid, options)
                if pid:
                    self.returncode = os.waitstatus_to_exitcode(status)
            return self.returncode


@contextlib.contextmanager
def forked_actors() -> Iterator[None]:
    """Within it, engines of this process fork their workers and schedulers."""
    import pytest

    from actorllm.actors.topology import engine_topology
    from actorllm.config import EngineConfig
    from actorllm.model.threads import worker_environment
    from actorllm.supervision import children

    if SYS_CLONE is None or IS_ASKED_TO_EXEC:
        yield
        return
    alone, by_default = (EngineConfig.from_arguments("storyteller", num_threads=number) for number in (1, None))
    scheduler = engine_topology(alone).actor("scheduler")
    light = Preloaded(scheduler.preload, children.ENVIRONMENT | os.environ)
    preloaded = [(scheduler.preload, light), (OF_SCRIPTED_WORKERS, light)]
    for config in (alone, by_default):
        worker = engine_topology(config).actor("worker0")
        given = children.ENVIRONMENT | os.environ | worker_environment(config)
        preloaded.append((worker.preload, Preloaded(worker.preload, given)))

    def find(modules: tuple[str, ...], environment: Mapping[str, str]) -> Source | None:
        return next((one for names, one in preloaded if names == modules and one.fits(environment)), None)

    try:
        with pytest.MonkeyPatch.context() as patch:
            copy_actors(find, patch.setattr)
            yield
    finally:
        for one in {one for _, one in preloaded}:
            one.close()


def copy_actors(
    find: Callable[[tuple[str, ...], Mapping[str, str]], Source | None], set_attribute: Callable[[Any, str, Any], None]
) -> None:
    """Let engines of this process take their processes from what `find` returns for modules and an environment."""
    from actorllm.supervision import children

    of_this_thread = threading.local()

    def popen(command: list[str], **given: Any) -> subprocess.Popen[bytes] | Copy:
        if (source := find(of_this_thread.modules, given["env"])) is None:
            return subprocess.Popen(command, **given)
        *_, program, control, owner = command
        with open(os.devnull, "rb") as nothing:
            descriptors = [nothing.fileno(), given["stdout"], given["stderr"], int(control)]
            return Copy(source.copy(program, [owner], descriptors, given["env"]))

    started = children.ProcessChild._exec

    def start(child: children.ProcessChild, environment: Mapping[str, str]) -> None:
        of_this_thread.modules = child.spec.preload
        started(child, environment)

    set_attribute(children, "subprocess", SimpleNamespace(Popen=popen, DEVNULL=subprocess.DEVNULL))
    set_attribute(children.ProcessChild, "_exec", start)


# The process that is copied -------------------------------------------------------------------------------------------


def serve(requests: socket.socket, modules: Sequence[str]) -> tuple[dict[str, Any], list[int]] | None:
    """Make a copy for each request, until the other side is gone; returns None then.

    In a copy that is to be a program, what it was asked for, and its descriptors.
    """
    set_name(NAME)
    is_loaded = not modules
    while True:
        fds = array.array("i")
        packet, ancillary, _, _ = requests.recvmsg(MAX_REQUEST, socket.CMSG_SPACE(4 * fds.itemsize))
        if not packet:
            return None
        for _, _, data in ancillary:
            fds.frombytes(data)
        if not is_loaded:
            for name in (*modules, *OF_EVERY_LOOP):
                importlib.import_module(name)
            importlib.import_module("tests.quick_starts").keep_measured_sizes()
            for module in list(sys.modules.values()):  # what was warned of here is to be warned of in copies, too
                getattr(module, "__dict__", {}).get("__warningregistry__", {}).clear()
            gc.collect()
            gc.freeze()
            is_loaded = True
        # As after exec, nothing is delivered to a copy before it has taken its role.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
        if (pid := clone(CLONE_PARENT)) == 0:
            requests.close()
            request = json.loads(packet)
            if "program" in request:
                become(request, list(fds))
            if request["is_leader"]:
                os.setsid()
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            return request, list(fds)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        for fd in fds:
            os.close(fd)
        requests.send(str(pid).encode())


def clone(flags: int) -> int:
    """As `os.fork`: 0 in the copy."""
    if len(os.listdir("/proc/self/task")) != 1:
        raise RuntimeError("what was imported has begun a thread, which a copy would not have")
    python, libc = ctypes.pythonapi, ctypes.PyDLL(None, use_errno=True)
    python.PyOS_BeforeFork()
    pid = int(libc.syscall(SYS_CLONE, flags | signal.SIGCHLD, 0, 0, 0, 0))
    if pid == 0:
        python.PyOS_AfterFork_Child()
    else:
        python.PyOS_AfterFork_Parent()
    if pid < 0:
        raise OSError(ctypes.get_errno(), "clone")
    return pid


def set_name(name: str) -> None:
    ctypes.CDLL(None).prctl(PR_SET_NAME, name.encode(), 0, 0, 0)


def take_over(request: dict[str, Any], fds: list[int]) -> None:
    """The standard descriptors, the folder and the environment."""
    for number, fd in enumerate(fds):
        os.dup2(fd, number)
        os.close(fd)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])


def become(request: dict[str, Any], fds: list[int]) -> None:
    """What exec makes of a process of an engine; does not return."""
    from actorllm.actors.child import FOR_THE_OWNER

    os.setsid()
    signal.pthread_sigmask(signal.SIG_BLOCK, FOR_THE_OWNER)
    *standard, control = fds
    take_over(request, standard)
    sys.argv = [request["program"], str(control), *request["arguments"]]
    try:
        runpy.run_path(request["program"], run_name="__main__")
    except Exception:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(1)


# A copy that is a program ---------------------------------------------------------------------------------------------


def run(request: dict[str, Any], fds: list[int], paths: list[str]) -> None:
    """What Python does with its arguments. paths: what it imports from, but for what the environment and arguments say."""
    set_name("python")
    take_over(request, fds)
    copy_own_actors()
    if os.environ.get("PYTHONUNBUFFERED"):
        for number, name in ((1, "stdout"), (2, "stderr")):
            unbuffered = io.TextIOWrapper(io.FileIO(number, "wb", closefd=False), "utf-8", write_through=True)
            setattr(sys, name, unbuffered)
            setattr(sys, f"__{name}__", unbuffered)
    main = sys.modules["__main__"] = ModuleType("__main__")
    names = vars(main)
    names["__builtins__"] = builtins
    first, *arguments = request["argv"]
    of_environment = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    begins = {"-c": "", "-m": os.getcwd()}.get(first, str(Path(first).resolve().parent))
    sys.path[:] = [begins, *of_environment, *paths]
    if first == "-m":
        sys.argv = arguments
        runpy._run_module_as_main(arguments[0])  # type: ignore[attr-defined]
        return
    if first == "-c":
        source, *arguments = arguments
        name = "<string>"
    else:
        name = names["__file__"] = first
        source = Path(first).read_text()
    sys.argv = [first, *arguments]
    exec(compile(source, name, "exec", dont_inherit=True), names)


class OwnCopies(Source):
    """Copies of this program as it was at its beginning, made by a process beside it, which is its child as they are."""

    def __init__(self, requests: socket.socket) -> None:
        super().__init__(requests)
        self._pid = os.getpid()
        self._modules = set(sys.modules)
        self._environment = without(OF_A_PROGRAM, os.environ)
        self._limits = limits()

    def find(self, modules: tuple[str, ...], environment: Mapping[str, str]) -> OwnCopies | None:
        from actorllm.config import EngineConfig
        from actorllm.model.threads import worker_environment
        from actorllm.supervision import children

        alone, by_default = (
            children.ENVIRONMENT | worker_environment(EngineConfig.from_arguments("storyteller", num_threads=number))
            for number in (1, None)
        )
        loaded_with, kept = alone, without(OF_A_PROGRAM, environment)
        # A worker tells torch how many threads it has, whatever number that was loaded with.
        is_known = all(kept.pop(name, value) in (value, by_default[name]) for name, value in loaded_with.items())
        is_same = kept == {name: value for name, value in self._environment.items() if name not in loaded_with}
        is_here = os.getpid() == self._pid and limits() == self._limits and self._modules.issuperset(modules)
        return self if is_known and is_same and is_here else None


def copy_own_actors() -> None:
    """Let engines of this program fork their processes."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if clone(0) == 0:
        ours.close()
        os.setsid()
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        nothing = os.open(os.devnull, os.O_RDWR)
        for number in range(3):
            os.dup2(nothing, number)
        os.close(nothing)
        if sys.flags.dev_mode:  # which processes of an engine do not inherit by exec
            warnings.simplefilter("ignore")
            logging.getLogger("asyncio").setLevel(logging.ERROR)
        serve(theirs, ())
        os._exit(0)
    theirs.close()
    high = fcntl.fcntl(ours.fileno(), fcntl.F_DUPFD_CLOEXEC, HIGH_DESCRIPTOR)
    ours.close()
    requests = socket.socket(fileno=high)
    atexit.register(requests.detach)  # one that nothing closes would be told of at the end
    copy_actors(OwnCopies(requests).find, setattr)


if __name__ == "__main__":
    given = list(sys.path)
    sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]
    requests = socket.socket(fileno=int(sys.argv[1]))
    requests.set_inheritable(False)
    asked = serve(requests, sys.argv[2:])
    requests.close()
    if asked is not None:
        run(*asked, given)
