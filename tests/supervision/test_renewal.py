"""A tree that outlives its processes: who is started again with whom, who notices, and when it ends after all."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import resource
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

from actorllm.actors.heartbeat import is_stopped
from actorllm.actors.topology import ActorSpec, LinkSpec, Topology
from actorllm.errors import (
    EngineDeadError,
    EngineShutdownError,
    EngineStartError,
    PeerLostError,
    PeerRestartedError,
    SharedMemoryError,
)
from actorllm.messages import StepPlan
from actorllm.ring.channel import create_link
from actorllm.supervision import supervisor, wiring
from actorllm.supervision.children import RemoteChild
from actorllm.supervision.death import ActorDeath
from actorllm.supervision.restart import RestartLimits
from actorllm.supervision.standby import StandbyOptions
from tests.actors.echo import EchoConfig
from tests.supervision.conftest import Engine, echo_topology

QUICK = RestartLimits(first_delay_s=0.01)


def grouped() -> Topology:
    """front (owner) ── middle, front ══ echo0, echo1, which die together."""
    topology = echo_topology("process")
    actors = tuple(replace(a, group="echoes") if a.name.startswith("echo") else a for a in topology.actors)
    return replace(topology, actors=actors)


@pytest.fixture
def make_tree(make_engine: Callable[..., Engine]) -> Callable[..., Engine]:
    def make(config: EchoConfig | None = None, **arguments: Any) -> Engine:
        return make_engine(grouped(), config, **({"restarts": QUICK} | arguments))

    return make


@pytest.fixture
def tree(make_tree: Callable[..., Engine]) -> Engine:
    engine = make_tree()
    engine.thread.start(30)
    return engine


def wait_until(is_true: Callable[[], bool], timeout_s: float = 20) -> bool:
    deadline = time.monotonic() + timeout_s
    while not is_true():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


def kill(engine: Engine, *names: str) -> dict[str, int]:
    """By SIGKILL; returns the pids of before, when other processes have taken their place and are linked."""
    pids = engine.supervisor.pids
    num_restarts = restarts_of(engine)
    groups = {"middle" if name == "middle" else "echoes" for name in names}
    for name in names:
        os.kill(pids[name], signal.SIGKILL)
    assert wait_until(lambda: all(restarts_of(engine)[g] > num_restarts[g] for g in groups))
    assert not any(Path(f"/proc/{pids[name]}").exists() for name in names)
    return pids


def restarts_of(engine: Engine) -> dict[str, int]:
    counts: dict[str, int] = engine.thread.call(engine.supervisor.statistics).result(30)["num_restarts"]
    return counts


@contextlib.contextmanager
def no_descriptors(pid: int = 0) -> Iterator[None]:
    """For a while a process (this one) opens no file, makes no socket and starts no process."""
    limits = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, limits[1]))
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)


def echoes_work(engine: Engine) -> None:
    echoed = engine.exchange("echoes", *[StepPlan(step=i) for i in range(20)], num_replies=40)
    assert sorted((link.rank, m.step) for link, m in echoed) == [(r, i) for r in range(2) for i in range(20)]  # type: ignore[union-attr]


def test_who_dies_alone_is_started_again_alone(tree: Engine) -> None:
    link = tree.front.links["middle"]
    asked = tree.thread.call(tree.front.ask, link, "never")
    assert tree.ask("ping") == "middle"
    before = kill(tree, "middle")
    with pytest.raises(PeerRestartedError, match="middle is gone: middle was killed"):
        asked.result(30)
    after = tree.supervisor.pids
    assert after["middle"] != before["middle"]
    assert [after[f"echo{rank}"] for rank in range(2)] == [before[f"echo{rank}"] for rank in range(2)]
    assert tree.front.lost == [link]
    assert isinstance(link.lost, PeerRestartedError)
    assert str(link.lost) == "middle was killed by signal 9 (SIGKILL)"
    assert tree.front.links["middle"].generation == 2
    assert tree.front.links["echoes"].generation == 1
    assert tree.ask("configuration")["total"] == 11, "it is configured as the one before"
    echoes_work(tree)
    assert tree.deaths == []


def test_the_death_of_one_is_the_restart_of_its_group(tree: Engine) -> None:
    before = kill(tree, "echo1")
    after = tree.supervisor.pids
    assert after["middle"] == before["middle"]
    assert not {after["echo0"], after["echo1"]} & {before["echo0"], before["echo1"]}
    assert not Path(f"/proc/{before['echo0']}").exists()
    assert [link.peer for link in tree.front.lost] == ["echoes"]
    assert tree.front.links["echoes"].generation == 2
    echoes_work(tree)


def test_a_log_tells_every_death_and_every_new_link_in_fields(tree: Engine, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "actorllm")
    kill(tree, "echo1")
    kill(tree, "middle")
    assert wait_until(lambda: tree.supervisor.health().num_recoveries == 2)
    told = [vars(record) for record in caplog.records if "event" in vars(record)]
    assert [(line["event"], line["group"], line["actors"], line["num_restarts"]) for line in told] == [
        ("death", "echoes", ("echo0", "echo1"), 0),
        ("restart", "echoes", ("echo0", "echo1"), 1),
        ("death", "middle", ("middle",), 0),
        ("restart", "middle", ("middle",), 1),
    ]
    assert told[0]["message"].startswith("echo1 was killed by signal 9 (SIGKILL)")
    assert told[1]["generations"]["echoes"] == told[3]["generations"]["echoes"] == 2
    assert told[3]["seconds"] > 0


def test_a_peer_with_a_defect_dies_of_it_unless_it_is_another_one_already(tree: Engine) -> None:
    link = tree.front.links["middle"]
    tree.thread.call(tree.front.report_defect, link, "contradicting itself").result(30)
    assert wait_until(lambda: tree.supervisor.health().num_recoveries == 1)
    failure = "middle was killed because it was contradicting itself"
    assert tree.supervisor.health().actors["middle"].last_failure == failure
    tree.thread.call(tree.front.report_defect, link, "contradicting itself").result(30)
    assert tree.ask("ping") == "middle"
    assert tree.supervisor.health().num_recoveries == 1


def test_who_takes_the_place_of_a_dead_one_does_not_answer_for_it(
    tree: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A report of a defect that comes late, when another process is up and not linked yet."""
    link, before = tree.front.links["middle"], tree.supervisor.pids["middle"]
    shortage = Shortage(monkeypatch, 1_000_000)
    monkeypatch.setattr(supervisor, "MAX_SHORTAGE_DELAY_S", 0.02)
    os.kill(before, signal.SIGKILL)
    assert wait_until(lambda: tree.supervisor.pids.get("middle", before) != before)
    assert wait_until(lambda: tree.supervisor._children["middle"].phase == "configured")
    tree.thread.call(tree.front.report_defect, link, "contradicting itself").result(30)
    shortage.num_failures = 0
    assert wait_until(lambda: restarts_of(tree)["middle"] == 1)
    assert tree.supervisor._counter is not None
    assert tree.supervisor._counter._deaths == {"middle": 1}
    assert tree.supervisor.health().actors["middle"].last_failure == "middle was killed by signal 9 (SIGKILL)"


def test_who_cannot_change_the_configuration_after_a_death_keeps_nobody_from_starting(
    make_tree: Callable[..., Engine], caplog: pytest.LogCaptureFixture
) -> None:
    def amend(config: EchoConfig, death: ActorDeath) -> EchoConfig:
        raise RuntimeError("a module of the user does not import")

    tree = make_tree(amend=amend)
    tree.thread.start(30)
    kill(tree, "middle")
    assert tree.ask("ping") == "middle"
    assert "a module of the user does not import" in caplog.text


def test_everybody_at_once(tree: Engine) -> None:
    num_fds = []
    for _ in range(2):
        before = kill(tree, "middle", "echo0", "echo1")
        assert not set(tree.supervisor.pids.values()) & set(before.values())
        assert tree.ask("ping") == "middle"
        echoes_work(tree)
        num_fds.append(len(os.listdir("/proc/self/fd")))
    # A death that is still cleaned up holds some more.
    assert wait_until(lambda: len(os.listdir("/proc/self/fd")) <= num_fds[0]), num_fds
    assert restarts_of(tree) == {"middle": 2, "echoes": 2}
    health = tree.supervisor.health()
    assert (health.state, health.num_recoveries) == ("running", 4)
    assert health.recovery_s > 0
    for name in ("middle", "echo0", "echo1"):
        actor = health.actors[name]
        assert (actor.state, actor.generation, actor.num_restarts) == ("running", 3, 2)
        assert actor.pid == tree.supervisor.pids[name]
        assert actor.last_failure is None or "was killed by signal 9" in actor.last_failure
    assert health.actors["front"].num_restarts == 0


def test_too_many_deaths_in_a_row_are_the_end(
    make_tree: Callable[..., Engine], caplog: pytest.LogCaptureFixture
) -> None:
    tree = make_tree(restarts=replace(QUICK, max_deaths=3))
    tree.thread.start(30)
    kill(tree, "middle")
    tree.ask("progress")
    assert wait_until(lambda: not tree.supervisor._counter._deaths)  # from here on it is another row
    kill(tree, "middle")
    kill(tree, "middle")
    os.kill(tree.supervisor.pids["middle"], signal.SIGSEGV)
    assert tree.died.wait(10)
    tree.thread.stop()
    assert tree.deaths[0].description == "was killed by signal 11 (SIGSEGV)"
    error = tree.supervisor.failure
    assert isinstance(error, EngineDeadError)
    assert error.__notes__ == [
        "The engine was not restarted: these were 3 deaths in a row without one token in between."
    ]
    assert not isinstance(tree.front.lost[-1].lost, PeerLostError), "it will not come back"
    assert tree.supervisor.health().state == "dead"
    (last,) = [vars(record) for record in caplog.records if vars(record).get("event") == "end"]
    assert (last["group"], last["actors"], last["num_restarts"]) == ("middle", ("middle",), 3)


def test_who_does_not_get_ready_again_ends_it_with_its_own_error(make_tree: Callable[..., Engine]) -> None:
    engine = make_tree(renew=lambda config: replace(config, fail_at="start"))
    engine.thread.start(30)
    os.kill(engine.supervisor.pids["echo1"], signal.SIGKILL)
    assert engine.died.wait(20)
    engine.thread.stop()
    with pytest.raises(EngineDeadError, match="echo0 failed with RuntimeError: told to fail"):
        raise engine.supervisor.failure
    assert "did not become ready in 3 attempts" in engine.supervisor.failure.__notes__[-1]


def test_killed_again_before_it_was_ready(tree: Engine) -> None:
    before = tree.supervisor.pids["middle"]
    os.kill(before, signal.SIGKILL)
    assert wait_until(lambda: tree.supervisor.pids.get("middle", before) != before)
    second = tree.supervisor.pids["middle"]
    os.kill(second, signal.SIGKILL)
    assert wait_until(lambda: restarts_of(tree)["middle"] == 1)
    assert tree.supervisor.pids["middle"] not in (before, second)
    assert tree.ask("ping") == "middle"


class Shortage:
    """No rings can be made for so many attempts, or as long as one of these is to have one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, num_failures: int) -> None:
        self.num_failures = num_failures
        self.sizes: set[int] = set()
        monkeypatch.setattr(wiring, "create_link", self.create)

    def create(self, *arguments: Any) -> Any:
        if self.num_failures > 0 or arguments[0] in self.sizes:
            self.num_failures -= 1
            raise SharedMemoryError(errno.ENOSPC, "full")
        return create_link(*arguments)


def test_a_shortage_of_memory_is_waited_for(tree: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process that was loaded is good, and is not thrown away for it."""
    monkeypatch.setattr(supervisor, "MAX_SHORTAGE_DELAY_S", 0.02)
    Shortage(monkeypatch, 10)
    kill(tree, "echo0")
    assert tree.supervisor._counter is not None
    assert tree.supervisor._counter._deaths == {"echoes": 1}
    echoes_work(tree)


def test_a_shortage_of_descriptors_is_waited_for(
    tree: Engine, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that keeps more processes from being started than may die in a row."""
    monkeypatch.setattr(supervisor, "MAX_SHORTAGE_DELAY_S", 0.02)

    def num_told() -> int:
        return sum(vars(record).get("event") == "shortage" for record in list(caplog.records))

    num_fds = len(os.listdir("/proc/self/fd"))
    with no_descriptors():
        os.kill(tree.supervisor.pids["middle"], signal.SIGKILL)
        assert wait_until(lambda: num_told() >= 8)
    assert wait_until(lambda: restarts_of(tree)["middle"] == 1)
    assert tree.ask("ping") == "middle"
    assert tree.supervisor._counter is not None
    assert tree.supervisor._counter._deaths == {"middle": 1}
    assert wait_until(lambda: len(os.listdir("/proc/self/fd")) <= num_fds)


def test_who_attached_and_cannot_be_linked_again_is_dropped(tree: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    class Guest(RemoteChild):
        told: ClassVar[list[tuple[str, str]]] = []

        def _send(self, op: str, fds: tuple[int, ...] = (), **fields: Any) -> None:
            self.told.append((op, fields.get("type_name", "")))

        def close(self) -> None:
            self.gone.set()
            tree.supervisor.dismiss(self.spec.name, PeerLostError("it is gone"))

        def kill(self) -> None: ...

        async def spawn(self, tasks: Any, config: Any) -> None: ...

        async def start(self, config: Any) -> dict[str, Any]:
            return {}

        async def configure(self, config: Any) -> None: ...

        async def run(self) -> None: ...

        def request_stop(self) -> None: ...

    guest = Guest(ActorSpec("guest", "", placement="attached"), lambda *_: None)
    guest.phase = "running"
    link = replace(LinkSpec.pair("middle", "guest"), capacity_down=1 << 16)
    tree.thread.call(tree.supervisor.admit, guest, link).result(30)
    assert guest.told == [("link", "")]
    monkeypatch.setattr(supervisor, "GUEST_PATIENCE_S", 0.05)
    Shortage(monkeypatch, 0).sizes.add(1 << 16)
    kill(tree, "middle")
    assert guest.told == [("link", ""), ("lost", "PeerRestartedError"), ("lost", "EngineDeadError")]
    assert tree.ask("ping") == "middle"
    assert "guest" not in tree.supervisor.health().actors


def test_a_process_that_is_killed_at_the_first_start_is_tried_again(make_tree: Callable[..., Engine]) -> None:
    engine = make_tree(EchoConfig(fail_at="kill"), renew=lambda config: replace(config, fail_at=""))
    engine.thread.start(30)
    assert engine.supervisor.config.total == 11  # type: ignore[attr-defined]
    assert engine.ask("ping") == "middle"
    echoes_work(engine)
    assert engine.front.is_running
    assert "echo0 was killed by signal 9" in str(engine.supervisor.health().last_failure)


def test_an_actor_of_this_process_runs_once_however_often_the_start_is_tried(make_tree: Callable[..., Engine]) -> None:
    engine = make_tree(EchoConfig(fail_at="kill"), renew=lambda config: replace(config, fail_at=""))
    num_runs: list[None] = []
    run = engine.front.run

    async def counted() -> None:
        num_runs.append(None)
        await run()

    engine.front.run = counted  # type: ignore[method-assign]
    engine.thread.start(30)
    engine.thread.call(engine.supervisor._children["front"].run).result(30)  # as if another one had died at this point
    engine.ask("ping")
    assert len(num_runs) == 1


def test_and_not_for_ever(make_tree: Callable[..., Engine]) -> None:
    engine = make_tree(EchoConfig(fail_at="kill"))
    with pytest.raises(EngineStartError, match=r"echo0 was killed by signal 9 \(SIGKILL\)"):
        engine.thread.start(30)


def test_an_error_at_the_first_start_is_not_tried_again(make_tree: Callable[..., Engine]) -> None:
    attempts: list[object] = []
    engine = make_tree(EchoConfig(fail_at="start"), renew=attempts.append)
    with pytest.raises(EngineStartError, match="told to fail"):
        engine.thread.start(30)
    assert attempts == []


def test_a_process_that_is_stopped_before_it_is_ready_again(make_tree: Callable[..., Engine]) -> None:
    tree = make_tree(heartbeat_timeout_s=1.0)
    tree.thread.start(30)
    before = tree.supervisor.pids["middle"]
    os.kill(before, signal.SIGKILL)
    assert wait_until(lambda: tree.supervisor.pids.get("middle", before) != before)
    second = tree.supervisor.pids["middle"]
    os.kill(second, signal.SIGSTOP)
    assert wait_until(lambda: restarts_of(tree)["middle"] == 1)
    assert tree.supervisor.pids["middle"] not in (before, second)
    failure = tree.supervisor.health().actors["middle"].last_failure
    assert "was killed because it was stuck: the process was stopped for " in str(failure)
    assert "during its start, limit 1 s" in str(failure)
    assert tree.ask("ping") == "middle"


def test_a_process_that_is_stopped_at_the_first_start(make_tree: Callable[..., Engine]) -> None:
    tree = make_tree(heartbeat_timeout_s=1.0)
    started = tree.thread.start_nowait()
    assert wait_until(lambda: "echo1" in tree.supervisor.pids)
    os.kill(tree.supervisor.pids["echo1"], signal.SIGSTOP)
    started.result(30)
    assert "echo1 was killed because it was stuck" in str(tree.supervisor.health().last_failure)
    echoes_work(tree)


def test_a_process_that_takes_too_long_to_get_ready_again(make_tree: Callable[..., Engine]) -> None:
    limits = replace(QUICK, max_early_deaths=1)
    tree = make_tree(renew=lambda config: replace(config, fail_at="hang"), restarts=limits, restart_timeout_s=3.0)
    tree.thread.start(30)
    os.kill(tree.supervisor.pids["echo1"], signal.SIGKILL)
    assert tree.died.wait(20)
    tree.thread.stop()
    with pytest.raises(
        EngineDeadError, match=r"echo0 was killed because it was stuck: its start ran for .* deadline 3 s"
    ):
        raise tree.supervisor.failure


def test_who_has_no_room_for_a_new_link_makes_way_for_one_that_has(make_engine: Callable[..., Engine]) -> None:
    """middle is out of descriptors when echo0, with which it works, was started again."""
    actors = [replace(actor, group=None) for actor in echo_topology("process").actors if actor.name != "echo1"]
    names = ("front-middle", "front-echo0", "echoes")
    links = (
        LinkSpec.pair("front", "middle"),
        LinkSpec.pair("front", "echo0"),
        LinkSpec.broadcast("echoes", "middle", ["echo0"]),
    )
    tree = make_engine(Topology(tuple(actors), links), restarts=QUICK)
    tree.thread.start(30)
    before = tree.supervisor.pids
    with no_descriptors(before["middle"]):
        os.kill(before["echo0"], signal.SIGKILL)
        assert wait_until(lambda: tree.supervisor.pids.get("middle", before["middle"]) != before["middle"])
    assert wait_until(lambda: restarts_of(tree) == {"middle": 1, "echo0": 1})
    generations = tree.thread.call(tree.supervisor.statistics).result(30)["generations"]
    assert set(generations) == set(names)
    ends = [tree.ask("statistics", peer)["links"] for peer in ("middle", "echo0")]
    assert ends[0]["echoes"]["generation"] == ends[1]["middle"]["generation"] == generations["echoes"]
    assert "an end of 6 descriptors came with 0" in str(tree.supervisor.health().actors["middle"].last_failure)


class Looks:
    """Counts how often the processes of a tree that has work are looked at; each look may be made to fail."""

    def __init__(self, tree: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num = 0
        self.is_failing = False
        vigil = tree.supervisor._watch._detector
        look = vigil.look

        def counted(*arguments: Any) -> Any:
            self.num += 1
            if self.is_failing:
                raise RuntimeError("this look fails")
            return look(*arguments)

        monkeypatch.setattr(vigil, "look", counted)
        monkeypatch.setattr(type(tree.front), "has_work", True)
        tree.thread.call(tree.front.on_work).result(30)

    def go_on(self) -> bool:
        before = self.num
        return wait_until(lambda: self.num >= before + 3)


def test_a_shortage_of_descriptors_does_not_end_what_is_watched(
    make_tree: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = make_tree(heartbeat_timeout_s=4.0)
    tree.thread.start(30)
    looks = Looks(tree, monkeypatch)
    with no_descriptors():
        assert looks.go_on()
    assert tree.supervisor.health().state == "running"
    assert tree.ask("ping") == "middle"


def test_a_look_that_fails_is_logged_and_the_next_one_follows(
    make_tree: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tree = make_tree(heartbeat_timeout_s=1.0)
    tree.thread.start(30)
    looks = Looks(tree, monkeypatch)
    looks.is_failing = True
    assert looks.go_on()
    looks.is_failing = False
    os.kill(tree.supervisor.pids["middle"], signal.SIGSTOP)
    assert wait_until(lambda: restarts_of(tree)["middle"] == 1)
    told = [record for record in caplog.records if "could not be looked at" in record.getMessage()]
    assert len(told) == 1


def test_a_parked_process_that_is_stopped_is_not_taken(make_tree: Callable[..., Engine]) -> None:
    tree = make_tree(standby=StandbyOptions("echoes"), heartbeat_timeout_s=1.0)
    tree.thread.start(30)
    assert wait_until(lambda: tree.supervisor.statistics()["num_parked"] == 2)
    health = tree.supervisor.health()
    assert [health.actors[f"parked echo{rank}"].state for rank in range(2)] == ["parked", "parked"]
    pid_of = {f"echo{rank}": tree.supervisor.pids[f"parked echo{rank}"] for rank in range(2)}
    assert health.actors["parked echo1"].pid == pid_of["echo1"]
    os.kill(pid_of["echo1"], signal.SIGSTOP)
    assert wait_until(lambda: is_stopped(pid_of["echo1"]))
    kill(tree, "echo0")
    assert tree.supervisor.pids["echo0"] == pid_of["echo0"]
    assert tree.supervisor.pids["echo1"] != pid_of["echo1"]
    echoes_work(tree)


def test_a_killed_process_that_does_not_end_is_the_end_of_the_engine(
    tree: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other rank waits for it in vain, and so would every request."""
    monkeypatch.setattr(supervisor, "END_PATIENCE_S", 0.1)
    monkeypatch.setattr(tree.supervisor._children["echo0"], "kill", lambda: None)
    os.kill(tree.supervisor.pids["echo1"], signal.SIGKILL)
    assert tree.died.wait(20)
    tree.thread.stop()
    with pytest.raises(EngineDeadError, match=r"echo0 was killed and has not ended within 0\.1 s: none can take its"):
        raise tree.supervisor.failure


def test_a_parked_process_that_does_not_end_keeps_nobody_from_stopping(
    make_tree: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(supervisor, "KILL_TIMEOUT_S", 0.1)
    tree = make_tree(standby=StandbyOptions("echoes"))
    tree.thread.start(30)
    assert wait_until(lambda: tree.supervisor.statistics()["num_parked"] == 2)
    parked = tree.supervisor._all_parked()
    for child in parked:
        monkeypatch.setattr(child, "kill", lambda: None)
    tree.thread.stop()
    assert not tree.thread.is_alive
    assert "did not stop" not in caplog.text
    for child in parked:
        assert child._process is not None
        assert child._process.wait(20) is not None


def test_stopped_between_two_attempts_of_the_first_start(make_tree: Callable[..., Engine]) -> None:
    def renew(config: EchoConfig) -> EchoConfig:
        engine.supervisor.request_stop()
        return replace(config, fail_at="hang")

    engine = make_tree(EchoConfig(fail_at="kill"), renew=renew)
    with pytest.raises(EngineShutdownError, match="the engine was shut down while it started"):
        engine.thread.start(20)
    assert engine.supervisor.pids == {}


def test_stopped_in_the_middle_of_a_restart(tree: Engine) -> None:
    for name in ("middle", "echo1"):
        os.kill(tree.supervisor.pids[name], signal.SIGKILL)
    assert wait_until(lambda: tree.supervisor.health().state == "recovering")
    tree.thread.stop()
    assert tree.supervisor.pids == {}
    assert tree.deaths == []
    assert tree.supervisor.health().state == "stopped"


def test_an_actor_in_this_process_cannot_be_restarted(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine("thread", restarts=QUICK)
    engine.thread.start(30)
    with contextlib.suppress(PeerLostError):
        engine.ask_echoes("crash", how="raise")
    assert engine.died.wait(10)
    assert engine.deaths[0].description == "failed with RuntimeError: told to raise"
