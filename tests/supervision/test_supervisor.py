"""A tree of actors: the phases of the start, what a death does, and that nothing is left. For every placement."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import pytest
import trio
import uvloop

from actorllm.actors import engine_thread
from actorllm.actors.engine_thread import HostLoop, current_loop
from actorllm.actors.topology import ActorSpec, LinkSpec, Topology, engine_topology
from actorllm.config import EngineConfig
from actorllm.errors import (
    ConfigError,
    EngineDeadError,
    EngineShutdownError,
    EngineStartError,
    PeerLostError,
    UnsupportedModelError,
)
from actorllm.messages import StepPlan
from actorllm.supervision import stderr_pipe
from actorllm.supervision.children import ProcessChild
from actorllm.supervision.death import ActorDeath
from actorllm.supervision.stderr_pipe import StderrPipe
from tests.actors import echo
from tests.actors.echo import EchoConfig

ECHO = "tests.actors.echo:EchoActor"

placements = pytest.mark.parametrize("placement", ["process", "thread"])
MakeEngine = Callable[..., Any]


@placements
def test_a_whole_life(run_engine: MakeEngine, placement: str) -> None:
    start = time.perf_counter()
    engine = run_engine(placement, EchoConfig(greeting="good day"))
    print(f"\n{placement}: three echoes ready after {(time.perf_counter() - start) * 1e3:.0f} ms")
    # Facts of all were resolved into one configuration, and everyone has it.
    assert engine.supervisor.config == EchoConfig(greeting="good day", total=1 + 2 + 8)
    configuration = engine.ask("configuration")
    assert configuration["total"] == 11
    assert configuration["environment"] == ("good day" if placement == "process" else None)
    # Each process is one of its own.
    pids = [engine.ask("pid"), *engine.ask_echoes("pid")]
    assert len({os.getpid(), *pids}) == (4 if placement == "process" else 1)
    if placement == "process":
        assert sorted(engine.supervisor.pids.values()) == sorted(pids)
    # A pair echoes in order, a broadcast reaches both ranks once.
    echoed = engine.exchange("middle", *[StepPlan(step=i) for i in range(500)], num_replies=500)
    assert [message.step for _, message in echoed] == list(range(500))
    echoed = engine.exchange("echoes", *[StepPlan(step=i) for i in range(500)], num_replies=1000)
    for rank in range(2):
        assert [message.step for link, message in echoed if link.rank == rank] == list(range(500))
    # Statistics of everyone and of the tree.
    assert [s["num_messages"] for s in engine.ask_echoes("statistics")] == [500, 500]
    tree = engine.thread.call(engine.supervisor.statistics).result(30)
    assert tree["phase"] == "running"
    assert {actor["phase"] for actor in tree["actors"].values()} == {"running"}
    assert tree["generations"] == {"front-middle": 1, "echoes": 1}
    engine.thread.stop()
    engine.thread.stop()
    assert engine.deaths == []
    assert engine.supervisor.failure is None
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids if pid != os.getpid())


@placements
@pytest.mark.parametrize(
    ("fail_at", "error", "text"),
    [
        ("start", EngineStartError, "echo0 failed to start: RuntimeError: told to fail"),
        ("configure", EngineStartError, "echo0 failed to start: ValueError: this configuration is no good"),
        ("unsupported", UnsupportedModelError, "architecture 'Parrot' is not supported"),
    ],
)
def test_an_error_at_the_start_is_the_callers(
    make_engine: MakeEngine, placement: str, fail_at: str, error: type[Exception], text: str
) -> None:
    engine = make_engine(placement, EchoConfig(fail_at=fail_at))
    with pytest.raises(error) as caught:
        engine.thread.start(30)
    assert type(caught.value) is error
    assert str(caught.value) == text
    assert "In echo0:" in caught.value.__notes__[0]
    assert "echo.py" in caught.value.__notes__[0]
    assert engine.deaths == []


@pytest.mark.parametrize(
    ("fail_at", "text"),
    [
        ("exit", r"echo0 exited with code 3; its last words:\n +these are my last words"),
        ("kill", r"echo0 was killed by signal 9 \(SIGKILL\)\nthe kernel .* lower kv_cache_memory_bytes or"),
    ],
)
def test_a_process_that_dies_at_the_start(make_engine: MakeEngine, fail_at: str, text: str) -> None:
    engine = make_engine("process", EchoConfig(fail_at=fail_at))
    with pytest.raises(EngineStartError, match="the engine did not start: " + text):
        engine.thread.start(30)


@placements
def test_a_class_that_cannot_be_imported(make_engine: MakeEngine, placement: str) -> None:
    engine = make_engine(Topology((ActorSpec("ghost", "no.such.module:Ghost", placement=placement),), ()))  # type: ignore[arg-type]
    with pytest.raises(EngineStartError, match="ghost failed to start: ModuleNotFoundError: No module named 'no'"):
        engine.thread.start(30)


@placements
def test_what_resolve_raises(make_engine: MakeEngine, placement: str) -> None:
    def resolve(config: EchoConfig, facts: dict[str, Any]) -> EchoConfig:
        assert set(facts) == {"front", "middle", "echo0", "echo1"}
        raise ConfigError("too little memory")

    engine = make_engine(placement, resolve=resolve)
    with pytest.raises(ConfigError, match="too little memory"):
        engine.thread.start(30)


@placements
def test_a_start_that_takes_too_long_names_who_is_late(make_engine: MakeEngine, placement: str) -> None:
    engine = make_engine(placement, EchoConfig(fail_at="hang", fail_rank=1), start_timeout_s=1.0)
    with pytest.raises(EngineStartError, match=r"not ready within 1 s; waiting for .*echo1 \(starting\)"):
        engine.thread.start(30)


@placements
@pytest.mark.parametrize("run", [asyncio.run, uvloop.run, None])
def test_cancelled_in_the_middle_of_the_start(make_engine: MakeEngine, placement: str, run: Any) -> None:
    """By the caller's cancel scope, from any loop."""
    engine = make_engine(placement, EchoConfig(fail_at="hang"))

    async def main() -> None:
        with anyio.move_on_after(0.3) as scope:
            await HostLoop.current().result_of(engine.thread.start_nowait())
        assert scope.cancelled_caught

    trio.run(main) if run is None else run(main())
    engine.thread.stop()
    assert engine.supervisor.pids == {}


@placements
def test_stopped_in_the_middle_of_the_start(make_engine: MakeEngine, placement: str) -> None:
    engine = make_engine(placement, EchoConfig(fail_at="hang"))
    timer = threading.Timer(0.2, engine.thread.stop)
    timer.start()
    with pytest.raises(EngineShutdownError):
        engine.thread.start(30)
    timer.join()


def test_a_kill_is_seen_at_once(run_engine: MakeEngine) -> None:
    engine = run_engine()
    seen: list[float] = []
    engine.supervisor._on_death = lambda death: (seen.append(time.perf_counter()), engine.died.set())
    pending = engine.thread.call(engine.front.ask, engine.front.links["middle"], "never")
    assert engine.ask("ping") == "middle"  # so the other ask has been sent
    pid = engine.supervisor.pids["middle"]
    start = time.perf_counter()
    os.kill(pid, signal.SIGKILL)
    assert engine.died.wait(10)
    print(f"\nkill -9 seen after {(seen[0] - start) * 1e3:.1f} ms")
    with pytest.raises(PeerLostError, match=r"middle was killed by signal 9 \(SIGKILL\)") as caught:
        pending.result(10)
    assert isinstance(caught.value.__cause__, EngineDeadError)
    # The survivors were told, then everything was stopped, and the engine says why.
    assert [link.peer for link in engine.front.lost] == ["middle"]
    assert str(engine.front.lost[0].lost) == "middle was killed by signal 9 (SIGKILL)"
    engine.thread.stop()
    assert str(engine.supervisor.failure) == "middle was killed by signal 9 (SIGKILL)"
    assert engine.supervisor.pids == {}
    with pytest.raises(EngineShutdownError):
        engine.thread.call(print)


@placements
def test_a_death_by_exception(run_engine: MakeEngine, placement: str) -> None:
    engine = run_engine(placement)
    engine.ask("crash", how="raise")
    assert engine.died.wait(10)
    (death,) = engine.deaths
    assert death.actor == "middle"
    assert death.description == "failed with RuntimeError: told to raise"
    assert "In middle:\nTraceback" in engine.supervisor.failure.__notes__[0]


@pytest.mark.parametrize(
    ("how", "description"), [("exit", "exited with code 3"), ("abort", "was killed by signal 6 (SIGABRT)")]
)
def test_a_death_with_last_words(
    run_engine: MakeEngine, how: str, description: str, capfd: pytest.CaptureFixture[str]
) -> None:
    engine = run_engine()
    engine.ask("crash", how=how, text="so long\nand thanks")
    assert engine.died.wait(10)
    (death,) = engine.deaths
    assert death.description == description
    assert death.last_words[:2] == ("so long", "and thanks")
    if how == "abort":
        assert any("_crash" in line for line in death.last_words)  # faulthandler
    engine.thread.stop()
    assert "so long\nand thanks\n" in capfd.readouterr().err
    assert f"middle {description}; its last words:\n    so long\n    and thanks" in str(engine.supervisor.failure)


def test_the_death_of_one_rank_is_the_loss_of_the_group(run_engine: MakeEngine) -> None:
    engine = run_engine()
    os.kill(engine.supervisor.pids["echo1"], signal.SIGSEGV)
    assert engine.died.wait(10)
    engine.thread.stop()
    assert [link.peer for link in engine.front.lost] == ["echoes"]
    assert str(engine.front.lost[0].lost).startswith("echo1 was killed by signal 11 (SIGSEGV)")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_that_are_for_the_owner_do_nothing_to_the_children(run_engine: MakeEngine, number: int) -> None:
    engine = run_engine()
    os.kill(engine.supervisor.pids["middle"], number)
    assert engine.ask("ping") == "middle"


def test_children_hang_on_nothing_of_the_owner(run_engine: MakeEngine) -> None:
    """A session and a name of its own, and no pipe or socket of a sibling, which would hide that one's end."""
    engine = run_engine()
    pid = engine.supervisor.pids["echo1"]
    assert Path(f"/proc/{pid}/comm").read_text() == "actor:echo1\n"
    assert os.getsid(pid) == pid
    shared = pipes_and_sockets(pid) & pipes_and_sockets(engine.supervisor.pids["echo0"])
    assert not shared


def pipes_and_sockets(pid: int) -> set[str]:
    targets = [os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")]
    return {target for target in targets if target.startswith(("pipe:", "socket:"))}


def test_a_process_that_hangs_is_killed(run_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the supervisor, on its own thread: whoever waits for that in vain kills everything from outside."""
    killed: list[tuple[str, str]] = []
    kill = ProcessChild.kill

    def note(self: ProcessChild) -> None:
        killed.append((self.spec.name, threading.current_thread().name))
        kill(self)

    monkeypatch.setattr(ProcessChild, "kill", note)
    engine = run_engine()
    engine.ask("crash", how="hang")  # for longer than any test
    engine.thread.stop(timeout=0.3)
    assert engine.supervisor.pids == {}
    assert ("middle", engine.thread._thread.name) in killed


def test_a_thread_that_hangs_is_abandoned(run_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()
    awake: list[bool] = []
    monkeypatch.setattr(echo, "time", SimpleNamespace(sleep=lambda _: awake.append(release.wait(30))))
    num_threads = threading.active_count()
    engine = run_engine("thread")
    assert engine.ask_echoes("crash", how="hang") == ["soon", "soon"]
    engine.thread.stop(timeout=0.3)
    assert not engine.thread.is_alive
    assert awake == [], "nobody waited for them"
    release.set()  # whoever comes to life again ends by himself
    for thread in threading.enumerate():
        if thread.name.startswith("actorllm:"):
            thread.join(10)
    assert threading.active_count() <= num_threads


def test_a_new_link_is_of_the_next_generation(run_engine: MakeEngine) -> None:
    engine = run_engine()
    old = engine.front.links["echoes"]
    engine.thread.call(engine.supervisor._wiring.connect, "echo0").result(30)
    assert engine.front.links["echoes"].generation == 2
    assert [link.peer for link in engine.front.lost] == ["echoes"]
    assert not old.is_open
    echoed = engine.exchange("echoes", StepPlan(step=1), num_replies=2)
    assert {(link.rank, link.generation) for link, _ in echoed} == {(0, 2), (1, 2)}
    assert engine.ask("ping") == "middle"
    assert engine.deaths == []


def test_two_engines_in_one_process(run_engine: MakeEngine) -> None:
    one, other = run_engine("process"), run_engine("thread")
    assert one.ask("ping") == other.ask("ping") == "middle"
    one.thread.stop()
    assert other.ask_echoes("ping") == ["echo0", "echo1"]


@placements
def test_starting_and_stopping_leaves_nothing(run_engine: MakeEngine, placement: str) -> None:
    def count() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    counts = []
    for _ in range(5):
        engine = run_engine(placement)
        assert engine.ask("ping") == "middle"
        engine.thread.stop()
        counts.append(count())
    num_fds, num_threads = counts[0]
    assert all(fds <= num_fds and threads <= num_threads for fds, threads in counts), counts


def test_a_loop_that_takes_long_to_close_is_closed_when_the_engine_has_stopped(
    run_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy machine: else its descriptors outlive the engine, for a moment."""
    run_loop = engine_thread.run_loop

    def run_slowly(*arguments: Any, **more: Any) -> None:
        run_loop(*arguments, **more)
        if threading.current_thread().name == "actorllm:echo1":
            time.sleep(1.2)

    monkeypatch.setattr(engine_thread, "run_loop", run_slowly)
    engine = run_engine("thread")
    engine.thread.stop()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("actorllm:")]


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run, None])
def test_a_host_of_any_kind(make_engine: MakeEngine, run: Any) -> None:
    """Built, started and asked from the host's loop, which never waits in a call."""
    answers: list[Any] = []

    async def main() -> None:
        engine = make_engine("thread")
        host = HostLoop.current()
        await host.result_of(engine.thread.start_nowait())
        answers.append(await host.result_of(engine.thread.call(engine.front.ask, engine.front.links["middle"], "ping")))

    trio.run(main) if run is None else run(main())
    assert answers == ["middle"]


async def test_stderr_that_nobody_takes_is_cut_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    is_blocked = True
    written = bytearray()
    monkeypatch.setattr(stderr_pipe, "_is_writable", lambda _: not is_blocked)
    monkeypatch.setattr(stderr_pipe.os, "write", lambda _, data: written.extend(data) or len(data))
    read_end, write_end = os.pipe()
    pipe = StderrPipe(current_loop(), read_end)
    monkeypatch.undo()
    monkeypatch.setattr(stderr_pipe, "_is_writable", lambda _: not is_blocked)
    line = b"x" * 99 + b"\n"
    for _ in range(10):
        os.write(write_end, line * 100)
        pipe.drain()
    assert pipe.num_cut == 100_000 - stderr_pipe.MAX_STDERR_BACKLOG
    is_blocked = False
    monkeypatch.setattr(stderr_pipe.os, "write", lambda _, data: written.extend(data) or len(data))
    pipe.close()
    monkeypatch.undo()
    os.close(write_end)
    assert written.startswith(b"[%d bytes of stderr cut]\n" % pipe.num_cut)
    assert len(pipe.last_lines()) == stderr_pipe.MAX_LAST_WORDS


def test_one_timer_waits_for_stderr_however_much_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stderr_pipe, "_is_writable", lambda _: False)
    timers: list[Callable[[], None]] = []
    loop = SimpleNamespace(
        watch=lambda *_: None, unwatch=lambda *_: None, call_later=lambda _, then: timers.append(then)
    )
    read_end, write_end = os.pipe()
    pipe = StderrPipe(loop, read_end)  # type: ignore[arg-type]
    for _ in range(3):
        os.write(write_end, b"a line\n")
        pipe.drain()
    assert len(timers) == 1
    timers[0]()
    assert len(timers) == 2, "it waits on"
    pipe.close()
    os.close(write_end)


def test_descriptions() -> None:
    assert str(ActorDeath("a")) == "a ended by itself"
    assert "memory" in ActorDeath("a", signal=9).to_error().__notes__[0]
    assert not hasattr(ActorDeath("a", signal=15).to_error(), "__notes__")
    assert str(ActorDeath("a", signal=64)).startswith("a was killed by signal 64 (SIGRTMAX)")
    assert str(ActorDeath("a", signal=99)) == "a was killed by signal 99 (unknown)"
    assert str(ActorDeath("a", exit_code=1, last_words=("x", "y"))) == (
        "a exited with code 1; its last words:\n    x\n    y"
    )
    stack = ("Current thread 0x1 (most recent call first):", *(f"  frame {i}" for i in range(100)))
    quoted = str(ActorDeath("a", signal=6, last_words=(*(f"line {i}" for i in range(100)), *stack)))
    assert "line 99\n    Current thread" in quoted
    assert "frame 0\n" in quoted
    assert "frame 50" not in quoted


@pytest.mark.parametrize("topology", ["process", "inline"])
def test_the_engines_topology(topology: str) -> None:
    config = replace(EngineConfig.from_arguments("storyteller", topology=topology, num_threads=1), world_size=2)
    engine = engine_topology(config)
    assert [actor.name for actor in engine.actors] == ["frontend", "scheduler", "worker0", "worker1"]
    assert engine.actor("frontend").placement == "owner"
    assert engine.actor("scheduler").placement == ("owner" if topology == "inline" else "process")
    assert engine.actor("worker1").placement == ("thread" if topology == "inline" else "process")
    assert engine.actor("worker1").rank == 1
    assert [link.ends for link in engine.links] == [("scheduler", "frontend"), ("scheduler", "worker0", "worker1")]
    assert [link.is_broadcast for link in engine.links] == [False, True]


def test_topologies_that_do_not_fit_together() -> None:
    a, b = ActorSpec("a", ECHO), ActorSpec("b", ECHO, placement="thread")
    for actors, links, text in [
        ((a, a), (), "two actors"),
        ((a,), (LinkSpec.pair("a", "b"),), "joins"),
        ((a,), (LinkSpec.pair("a", "a"),), "joins"),
        ((a, b), (LinkSpec.pair("a", "b"),), "thread of the owner"),
        ((a, replace(b, placement="owner")), (LinkSpec.pair("a", "b"), LinkSpec.pair("a", "b")), "two links"),
        ((a,), (LinkSpec.broadcast("x", "a", []),), "joins"),
    ]:
        with pytest.raises(ValueError, match=text):
            Topology(actors, links)
    with pytest.raises(KeyError):
        Topology((a,), ()).actor("z")
