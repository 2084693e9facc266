"""Processes of engines, forked from one that has loaded what they need.

Most of what the start of a worker costs is the import of torch: 1.5 of 2.5 s of processor time, for each of some hundred
engines of this suite. So engines of the tests' own process do not exec their workers and schedulers. A process of each
kind has imported what `ActorSpec.preload` names, and makes copies of itself. A copy runs the same program, `actors/child.py`,
as a child of the tests' process. It has the descriptors, the environment, the folder and the session that exec gives it.

Where anything that a process inherits is not as it was when the tests began, exec it is: another environment, another limit.
So it is for actors of tests, and for all that tests run as programs of their own: `tests/embedding/`, `tests/cli/`, examples.
`ACTORLLM_EXEC=1` forks nothing: `make test-slow` sets it.

Run as a program by `Preloaded`: `python -P forking.py <descriptor>`.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import gc
import importlib
import json
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
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

SYS_CLONE = {"x86_64": 56, "aarch64": 220}.get(platform.machine())
PR_SET_NAME = 15
CLONE_PARENT = 0x8000
"""The new process is a child of the parent of the one that makes it, and not its own."""
LIMITS = [name for name in dir(resource) if name.startswith("RLIMIT_")]
OF_A_TEST = ("PYTEST_CURRENT_TEST", "ACTORLLM_TEST_", "TORCHINDUCTOR_CACHE_DIR")
"""What variables begin with that nothing reads while it is imported. torch sets the last one in the tests' process."""
OF_SCRIPTED_WORKERS = ("numpy",)
"""What workers without a model import (`tests.actors.scripted_topology`): less than a scheduler does."""
OF_EVERY_LOOP = ("actorllm.actors.engine_thread", "anyio._backends._asyncio", "uvloop")
NAME = "preloaded"
"""What ps shows of a process that is copied."""
MAX_REQUEST = 1 << 17


def of_all_tests(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if not name.startswith(OF_A_TEST)}


def limits() -> dict[str, tuple[int, int]]:
    return {name: resource.getrlimit(getattr(resource, name)) for name in LIMITS}


class Preloaded:
    """A process that imports these modules when it is first asked for a copy, and then makes copies of itself.

    Made by the main thread: the kernel ends the children of a thread with it, if they have asked for that.
    """

    def __init__(self, modules: tuple[str, ...], environment: Mapping[str, str]) -> None:
        self._environment = of_all_tests(environment)
        self._limits = limits()
        self._lock = threading.Lock()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", __file__, str(theirs.fileno()), *modules],
                env={**self._environment, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
            )

    def fits(self, environment: Mapping[str, str]) -> bool:
        """Whether a process with this environment, made by exec now, would inherit what a copy has."""
        return (
            of_all_tests(environment) == self._environment and limits() == self._limits and self._process.poll() is None
        )

    def copy(self, program: str, arguments: list[str], descriptors: list[int], environment: Mapping[str, str]) -> int:
        """The pid of one that runs this program. descriptors: stdin, stdout, stderr, and that of the first argument."""
        request = {"program": program, "arguments": arguments, "folder": os.getcwd(), "environment": {**environment}}
        with self._lock:
            rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))
            self._socket.sendmsg([json.dumps(request).encode()], [rights])
            if not (pid := self._socket.recv(64)):
                raise RuntimeError(f"the process that is copied has ended with {self._process.wait()}: see its stderr")
            return int(pid)

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

    if SYS_CLONE is None or os.environ.get("ACTORLLM_EXEC"):
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
    of_this_thread = threading.local()

    def popen(command: list[str], **given: Any) -> subprocess.Popen[bytes] | Copy:
        fitting = (one for modules, one in preloaded if modules == of_this_thread.modules and one.fits(given["env"]))
        if (source := next(fitting, None)) is None:
            return subprocess.Popen(command, **given)
        *_, program, control, owner = command
        with open(os.devnull, "rb") as nothing:
            descriptors = [nothing.fileno(), given["stdout"], given["stderr"], int(control)]
            return Copy(source.copy(program, [owner], descriptors, given["env"]))

    started = children.ProcessChild._exec

    def start(child: children.ProcessChild, environment: Mapping[str, str]) -> None:
        of_this_thread.modules = child.spec.preload
        started(child, environment)

    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(children, "subprocess", SimpleNamespace(Popen=popen, DEVNULL=subprocess.DEVNULL))
            patch.setattr(children.ProcessChild, "_exec", start)
            yield
    finally:
        for one in {one for _, one in preloaded}:
            one.close()


# The process that is copied -------------------------------------------------------------------------------------------


def serve(descriptor: int, modules: list[str]) -> None:
    """Make a copy for each request, until the other side is gone."""
    requests = socket.socket(fileno=descriptor)
    requests.set_inheritable(False)
    ctypes.CDLL(None).prctl(PR_SET_NAME, NAME.encode(), 0, 0, 0)
    is_loaded = False
    while True:
        fds = array.array("i")
        packet, ancillary, _, _ = requests.recvmsg(MAX_REQUEST, socket.CMSG_SPACE(4 * fds.itemsize))
        if not packet:
            return
        for _, _, data in ancillary:
            fds.frombytes(data)
        if not is_loaded:
            for name in (*modules, *OF_EVERY_LOOP):
                importlib.import_module(name)
            gc.collect()
            gc.freeze()
            is_loaded = True
        if (pid := clone()) == 0:
            requests.close()
            become(json.loads(packet), list(fds))
        for fd in fds:
            os.close(fd)
        requests.send(str(pid).encode())


def clone() -> int:
    """As `os.fork`, but for the parent: 0 in the copy, which is a sibling."""
    if len(os.listdir("/proc/self/task")) != 1:
        raise RuntimeError("what was imported has begun a thread, which a copy would not have")
    python, libc = ctypes.pythonapi, ctypes.PyDLL(None, use_errno=True)
    python.PyOS_BeforeFork()
    pid = int(libc.syscall(SYS_CLONE, CLONE_PARENT | signal.SIGCHLD, 0, 0, 0, 0))
    if pid == 0:
        python.PyOS_AfterFork_Child()
    else:
        python.PyOS_AfterFork_Parent()
    if pid < 0:
        raise OSError(ctypes.get_errno(), "clone")
    return pid


def become(request: dict[str, Any], fds: list[int]) -> None:
    """What exec makes of a process; does not return."""
    from actorllm.actors.child import FOR_THE_OWNER

    os.setsid()
    signal.pthread_sigmask(signal.SIG_BLOCK, FOR_THE_OWNER)
    *standard, control = fds
    for number, fd in enumerate(standard):
        os.dup2(fd, number)
        os.close(fd)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.argv = [request["program"], str(control), *request["arguments"]]
    try:
        runpy.run_path(request["program"], run_name="__main__")
    except Exception:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(1)


if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[1])]
    serve(int(sys.argv[1]), sys.argv[2:])
