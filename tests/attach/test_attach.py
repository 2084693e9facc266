"""Attached frontends over a scripted model: joining, leaving, dying, misbehaving, and who is let in at all."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

import actorllm.client.engine_supervisor
from actorllm import LLM, AsyncLLM, EngineDeadError, SamplingParams, __version__
from actorllm.actors import link as link_module
from actorllm.actors.child import receive_frame, send_frame
from actorllm.actors.topology import LinkSpec, attached_frontend
from actorllm.attach import client as attach_client
from actorllm.attach import rendezvous
from actorllm.attach import server as attach_server
from actorllm.cli import main
from actorllm.client.stream import RequestStream
from actorllm.config import EngineConfig
from actorllm.errors import AttachError, ConfigError, EngineNotFoundError, EngineShutdownError
from actorllm.messages import StepResult, Submit
from actorllm.ring.layout import SLEEP, STATE, TAIL_WORD, reader_word
from tests import programs
from tests.actors.scripted_topology import with_workers
from tests.actors.scripted_worker import VOCAB
from tests.scheduling.chained_tokens import reference_stream

ROOT = Path(__file__).parents[2]
PROMPT = [7, 8, 9]
LONG = 900
"""Tokens that take seconds."""


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, Any]]:
    return "asyncio", {"use_uvloop": True}


@pytest.fixture
def make_owner(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., AsyncLLM]]:
    """Engines over a scripted model that are named, started, and shut down when the test is over."""
    monkeypatch.setattr(actorllm.client.engine_supervisor, "engine_topology", with_workers("SlowWorkerActor"))
    llms: list[AsyncLLM] = []

    def make(name: str = "tale", *, is_started: bool = True, **arguments: Any) -> AsyncLLM:
        llms.append(AsyncLLM("storyteller", name=name, **arguments))
        if is_started:
            llms[-1]._engine.start()
        return llms[-1]

    yield make
    for llm in llms:
        llm.shutdown()


@pytest.fixture
def owner(make_owner: Callable[..., AsyncLLM]) -> AsyncLLM:
    return make_owner()


@pytest.fixture
def attach() -> Iterator[Callable[..., AsyncLLM]]:
    """Engines that this process joins, besides owning one: the same code as in another process."""
    llms: list[AsyncLLM] = []

    def join(name: str = "tale") -> AsyncLLM:
        llms.append(AsyncLLM.attach(name))
        return llms[-1]

    yield join
    for llm in llms:
        llm.shutdown()


class Guest:
    """Another program that has joined the engine."""

    def __init__(self, name: str = "tale") -> None:
        self.process = programs.popen(
            [sys.executable, str(ROOT / "tests" / "attach" / "guest.py"), name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
        )
        assert self.hear() == {"attached": True}

    def hear(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "it ended"
        return json.loads(line)

    def stream(self, max_tokens: int = LONG, seed: int = 1, prompt: list[int] = PROMPT) -> None:
        """Begin a stream; returns at its first output."""
        self.tell(do="stream", prompt=prompt, max_tokens=max_tokens, seed=seed)
        assert self.hear() == {"first": True}

    def tell(self, **command: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command).encode() + b"\n")
        self.process.stdin.flush()

    def end(self) -> int:
        """Let it leave (if it lives); its exit status."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        status = self.process.wait(30)
        self.process.stdout.close()
        return status


@pytest.fixture
def make_guest() -> Iterator[Callable[..., Guest]]:
    guests: list[Guest] = []

    def make(name: str = "tale") -> Guest:
        guests.append(Guest(name))
        return guests[-1]

    yield make
    for guest in guests:
        with contextlib.suppress(ProcessLookupError):
            guest.process.kill()
        guest.end()


def params(max_tokens: int = 20, seed: int = 1) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, seed=seed, ignore_eos=True, detokenize=False)


async def tokens_of(llm: AsyncLLM, max_tokens: int = 20, seed: int = 1) -> list[int]:
    return (await llm.complete(PROMPT, params(max_tokens, seed))).outputs[0].token_ids


def expected(max_tokens: int = 20, seed: int = 1) -> list[int]:
    return reference_stream(PROMPT, seed, max_tokens, VOCAB)


def scheduler_of(llm: AsyncLLM) -> Any:
    return llm._engine.ask_scheduler("statistics").result(10)


def wait_until(is_true: Callable[[], bool], timeout_s: float = 30) -> bool:
    deadline = time.monotonic() + timeout_s
    while not is_true():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


def is_idle(owner: AsyncLLM) -> bool:
    """Nobody is attached, no request is alive, and every block is free."""
    state = scheduler_of(owner)
    scheduler = state["scheduler"]
    free = scheduler["kv"]["num_free"] == owner.config.cache.num_blocks
    return set(state["links"]) == {"frontend", "workers"} and not scheduler["num_running"] and free


def error_of(stream: RequestStream) -> BaseException:
    """What a stream ends with."""

    async def drain() -> None:
        async for _ in stream:
            pass

    with pytest.raises(Exception) as caught:
        anyio.run(drain)
    return caught.value


# Together -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("topology", ["process", "inline"])
def test_two_programs_and_the_owner_share_an_engine(
    make_owner: Callable[..., AsyncLLM], make_guest: Callable[..., Guest], topology: str
) -> None:
    owner = make_owner(topology=topology)
    guests = [make_guest(), make_guest()]
    for seed, guest in enumerate(guests, 2):
        guest.stream(200, seed)
    assert anyio.run(tokens_of, owner, 200, 1) == expected(200, 1)
    assert [guest.hear() for guest in guests] == [{"tokens": expected(200, 2)}, {"tokens": expected(200, 3)}]
    assert [guest.end() for guest in guests] == [0, 0]
    assert wait_until(lambda: is_idle(owner))
    assert anyio.run(tokens_of, owner) == expected()


def test_leaving_ends_the_own_requests_and_nothing_else(owner: AsyncLLM, attach: Callable[..., AsyncLLM]) -> None:
    guest, other = attach(), attach()
    assert guest.config == owner.config
    assert guest._engine.pids == {}
    stays = other.generate(PROMPT, params(200, 2))
    left = guest.generate(PROMPT, params(LONG))
    assert wait_until(lambda: scheduler_of(owner)["scheduler"]["num_running"] == 2)
    guest.shutdown()
    guest.shutdown()
    assert isinstance(error_of(left), EngineShutdownError)
    with pytest.raises(EngineShutdownError):
        guest.generate(PROMPT)
    assert wait_until(lambda: scheduler_of(owner)["scheduler"]["num_running"] == 1)

    async def last() -> Any:
        return [output async for output in stays][-1]

    assert anyio.run(last).outputs[0].token_ids == expected(200, 2)
    other.shutdown()
    assert wait_until(lambda: is_idle(owner))


async def test_aborts_and_controls_work_from_outside(owner: AsyncLLM, attach: Callable[..., AsyncLLM]) -> None:
    async with attach() as guest:
        stream = guest.generate(PROMPT, params(LONG), request_id="a")
        await stream.__anext__()
        await guest.abort("a")
        *_, last = [output async for output in stream]
        assert last.outputs[0].finish_reason == "abort"
        stats = await guest.stats()
        assert stats["scheduler"]["scheduler"]["num_running"] == 0
        assert len(stats["workers"]) == 1
        assert stats["supervisor"] == {"phase": "attached", "engine": "tale", "owner_pid": os.getpid()}
        assert owner._engine.statistics()["supervisor"]["actors"]["attached1"]["pid"] == os.getpid()


def test_an_engine_that_starts_is_joined_when_it_is_ready(
    make_owner: Callable[..., AsyncLLM],
    attach: Callable[..., AsyncLLM],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("ACTORLLM_TEST_WAIT", str(tmp_path / "go"))
    started = make_owner(is_started=False)._engine.start_in_background()
    assert wait_until(lambda: rendezvous.names() == ["tale"])
    guest = attach()
    stream = guest.generate(PROMPT, params())
    (description,) = rendezvous.running_engines()
    assert (description.state, description.num_running) == ("starting", None)
    assert not stream.has_ended
    (tmp_path / "go").touch()
    assert anyio.run(tokens_of, guest) == expected()
    assert guest.config.cache.num_blocks is not None
    started.result(10)


def test_an_engine_that_fails_to_start_says_so_to_who_waits(
    make_owner: Callable[..., AsyncLLM],
    attach: Callable[..., AsyncLLM],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("ACTORLLM_TEST_WAIT", str(tmp_path / "go"))
    started = make_owner(is_started=False)._engine.start_in_background()
    assert wait_until(lambda: rendezvous.names() == ["tale"])
    stream = attach().generate(PROMPT, params())
    (tmp_path / "fail").write_text("fail")
    (tmp_path / "fail").rename(tmp_path / "go")
    with pytest.raises(Exception, match="told to fail"):
        started.result(10)
    error = error_of(stream)
    assert isinstance(error, EngineDeadError)
    assert "did not start" in str(error)
    assert "told to fail" in str(error)
    assert rendezvous.names() == []


# Deaths ---------------------------------------------------------------------------------------------------------------


def test_a_killed_program_harms_nobody(owner: AsyncLLM, make_guest: Callable[..., Guest]) -> None:
    victim, other = make_guest(), make_guest()
    for seed in range(3):
        victim.stream(seed=seed)
    other.stream(200, 5)
    assert scheduler_of(owner)["scheduler"]["num_running"] == 4
    victim.process.kill()
    victim.process.wait()
    steps = scheduler_of(owner)["scheduler"]["num_steps"]
    assert wait_until(lambda: scheduler_of(owner)["scheduler"]["num_running"] <= 1)
    assert scheduler_of(owner)["scheduler"]["num_steps"] - steps < 40, "its requests go when it goes"
    assert anyio.run(tokens_of, owner) == expected()
    assert other.hear() == {"tokens": expected(200, 5)}
    other.end()
    assert wait_until(lambda: is_idle(owner))


def test_a_killed_program_whose_fork_lives_on(owner: AsyncLLM, make_guest: Callable[..., Guest]) -> None:
    """The fork keeps its socket open: the process itself is watched."""
    guest = make_guest()
    guest.stream()
    guest.tell(do="die")
    assert guest.hear() == {"forked": True}
    guest.process.wait()
    assert wait_until(lambda: is_idle(owner))


@pytest.mark.parametrize("victim", ["scheduler", "worker0"])
def test_attached_streams_hear_of_a_death_in_the_engine(
    make_owner: Callable[..., AsyncLLM], make_guest: Callable[..., Guest], victim: str
) -> None:
    owner = make_owner(on_failure="raise")
    guest = make_guest()
    guest.stream()
    os.kill(owner._engine.pids[victim], signal.SIGKILL)
    heard = guest.hear()
    assert heard["error"] == "EngineDeadError"
    assert f"{victim} was killed by signal 9" in heard["message"]
    assert guest.end() == 0
    assert wait_until(lambda: rendezvous.names() == [])


def test_an_orderly_shutdown_of_the_owner(owner: AsyncLLM, make_guest: Callable[..., Guest]) -> None:
    guest = make_guest()
    guest.stream()
    owner.shutdown()
    heard = guest.hear()
    assert heard["error"] == "EngineShutdownError"
    assert f"was shut down by its owner (process {os.getpid()})" in heard["message"]
    assert guest.end() == 0
    assert rendezvous.names() == []


def descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def mappings(pid: int) -> int:
    return Path(f"/proc/{pid}/maps").read_text().count("/allm-")


def test_coming_and_going_leaves_nothing(owner: AsyncLLM) -> None:
    def visit() -> None:
        guest = AsyncLLM.attach("tale")
        assert anyio.run(tokens_of, guest, 2) == expected(2)
        guest.shutdown()
        AsyncLLM.attach("tale").shutdown()  # one that never joins

    pids = [os.getpid(), owner._engine.pids["scheduler"]]
    visit()
    assert wait_until(lambda: is_idle(owner))
    before = [(descriptors(pid), mappings(pid)) for pid in pids]
    for _ in range(20):
        visit()
    assert wait_until(lambda: is_idle(owner))

    def is_no_more() -> bool:
        return all(
            descriptors(pid) <= num and mappings(pid) <= maps for pid, (num, maps) in zip(pids, before, strict=True)
        )

    assert wait_until(is_no_more), before


# Misbehaviour ---------------------------------------------------------------------------------------------------------


def small_link(number: int) -> Any:
    spec, link = attached_frontend(number)
    return spec, dataclasses.replace(link, capacity_down=1024)


def test_a_program_that_is_stopped_stalls_nobody(
    make_owner: Callable[..., AsyncLLM], make_guest: Callable[..., Guest], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a ring and an outbox that hold a few steps only."""

    monkeypatch.setattr(attach_server, "attached_frontend", small_link)
    monkeypatch.setattr(link_module, "open_hub", partial(link_module.open_hub, max_outbox_bytes=512))
    owner = make_owner(topology="inline")
    guest = make_guest()
    guest.stream(300, 2)
    guest.process.send_signal(signal.SIGSTOP)
    assert anyio.run(tokens_of, owner, 200) == expected(200)
    assert wait_until(lambda: scheduler_of(owner)["scheduler"]["num_running"] == 0), "its request ran to the end"
    assert scheduler_of(owner)["num_held_outputs"] > 50
    guest.process.send_signal(signal.SIGCONT)
    assert guest.hear() == {"tokens": expected(300, 2)}
    assert wait_until(lambda: not scheduler_of(owner)["num_held_outputs"])


def ring_of(guest: AsyncLLM) -> Any:
    return guest._engine._frontend._scheduler._channel  # type: ignore[union-attr]


def forge_tail(guest: AsyncLLM) -> None:
    writer = ring_of(guest).sender.writer
    writer._words[TAIL_WORD] = 12345
    writer.bells[0].ring()


def forge_state(guest: AsyncLLM) -> None:
    ring_of(guest).receiver.reader._words[reader_word(0) + STATE] = 9


def forge_sleep(guest: AsyncLLM) -> None:
    ring_of(guest).receiver.reader._words[reader_word(0) + SLEEP] = 99
    time.sleep(1.0)  # on the thread that reads: it would write the word itself before the scheduler looks at it


def send_garbage(guest: AsyncLLM) -> None:
    ring_of(guest).sender.send_nowait(77, ["no such message"])


def send_another_ones_message(guest: AsyncLLM) -> None:
    guest._engine._frontend._scheduler.send_nowait(StepResult(step=1))  # type: ignore[union-attr]


def send_impossible_submit(guest: AsyncLLM) -> None:
    submit = Submit(rid=999, arrival=0.0, prompt=np.array([1], np.int32), max_tokens=5, temperature="hot")  # type: ignore[arg-type]
    guest._engine._frontend._scheduler.send_nowait(submit)  # type: ignore[union-attr]


@pytest.mark.parametrize("topology", ["process", "inline"])
def test_whoever_writes_nonsense_is_dropped_and_nobody_else(
    make_owner: Callable[..., AsyncLLM],
    attach: Callable[..., AsyncLLM],
    monkeypatch: pytest.MonkeyPatch,
    topology: str,
) -> None:
    monkeypatch.setattr(
        attach_server, "attached_frontend", small_link
    )  # soon full: then the writer looks at every word
    owner = make_owner(topology=topology)
    stays = attach()
    streams = []
    for spoil in (
        forge_tail,
        forge_state,
        forge_sleep,
        send_garbage,
        send_another_ones_message,
        send_impossible_submit,
    ):
        guest = attach()
        assert anyio.run(tokens_of, guest) == expected()
        streams.append(guest.generate(PROMPT, params(LONG)))
        assert wait_until(lambda: scheduler_of(owner)["scheduler"]["num_running"] == 1)
        guest._engine._thread.call(spoil, guest).result(10)
        error = error_of(streams[-1])
        assert isinstance(error, EngineDeadError), spoil
        who_sees_it = "the link was dropped" if spoil is not forge_state else "the link to scheduler is lost"
        assert who_sees_it in str(error), spoil
        with pytest.raises(EngineDeadError):
            anyio.run(tokens_of, guest)
        assert anyio.run(tokens_of, stays) == expected()
        assert wait_until(lambda: scheduler_of(owner)["scheduler"]["num_running"] == 0)
    assert anyio.run(tokens_of, owner) == expected()
    stays.shutdown()
    assert wait_until(lambda: is_idle(owner))


def test_nonsense_on_the_control_socket(owner: AsyncLLM, capfd: pytest.CaptureFixture[str]) -> None:
    for packet in (b"{", b"[]", b'"text"', b"{}", b'{"op": "hello"}', b'{"op": "fly"}', b'{"op": "join"}', b"\xff"):
        with rendezvous.connect("tale") as control:
            control.send(packet)
            frame, _ = receive_frame(control)
            assert frame is None or frame["op"] == "refused", packet
    assert anyio.run(tokens_of, owner) == expected()
    before = descriptors(os.getpid())
    with rendezvous.connect("tale") as control:  # descriptors that nobody asked for
        send_frame(control, "describe", (control.fileno(),) * 5)
        frame, _ = receive_frame(control)
        assert frame is not None
        assert frame["op"] == "description"
    with rendezvous.connect("tale") as control:
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("i", control.fileno()))
        control.sendmsg([b"{"], [rights])
        assert receive_frame(control) == (None, ())
    assert wait_until(lambda: descriptors(os.getpid()) <= before)
    assert anyio.run(tokens_of, owner) == expected()


def test_no_room_for_another_frontend(
    owner: AsyncLLM, attach: Callable[..., AsyncLLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    def huge_link(number: int) -> Any:
        spec, _ = attached_frontend(number)
        return spec, LinkSpec.pair("scheduler", spec.name, capacity_down=1 << 40)

    monkeypatch.setattr(attach_server, "attached_frontend", huge_link)
    error = error_of(attach().generate(PROMPT))
    assert isinstance(error, AttachError)
    assert "cannot take another frontend" in str(error)
    monkeypatch.undo()
    assert anyio.run(tokens_of, attach()) == expected()
    assert anyio.run(tokens_of, owner) == expected()


# Who is let in --------------------------------------------------------------------------------------------------------


def test_names_that_nobody_has(make_owner: Callable[..., AsyncLLM]) -> None:
    with pytest.raises(EngineNotFoundError, match="no named engine of this user runs"):
        AsyncLLM.attach("tale")
    make_owner("tale")
    make_owner("other", topology="inline")
    with pytest.raises(EngineNotFoundError, match=r"'tails' \(running: other, tale\); did you mean 'tale'\?"):
        AsyncLLM.attach("tails")
    with pytest.raises(EngineNotFoundError, match=r"'xyzzy' \(running: other, tale\)$"):
        LLM.attach("xyzzy")


@pytest.mark.parametrize("name", ["", "../x", "a b", ".hidden", "x" * 65, "naïve", 5])
def test_names_that_cannot_be(name: Any) -> None:
    with pytest.raises(ConfigError, match="name="):
        AsyncLLM("storyteller", name=name)
    with pytest.raises(ConfigError, match="name="):
        AsyncLLM.attach(name)


def test_a_name_belongs_to_one_engine(owner: AsyncLLM, make_owner: Callable[..., AsyncLLM]) -> None:
    second = make_owner(is_started=False)
    with pytest.raises(ConfigError, match=r"name='tale' is that of a running engine of this process"):
        second._engine.start()
    second.shutdown()
    assert anyio.run(tokens_of, owner) == expected()
    owner.shutdown()
    assert anyio.run(tokens_of, make_owner()) == expected()


def test_names_of_the_dead_are_free(make_owner: Callable[..., AsyncLLM]) -> None:
    """Of a process that was killed, also when a fork of it still holds the socket."""
    program = """
import os, signal, sys
from actorllm.actors import rendezvous
claims = [rendezvous.claim(name) for name in ("dead", "forked", "listed")]
claims[0].listener.close()
claims[2].listener.close()
if os.fork() == 0:
    sys.stdin.read()
    os._exit(0)
print(flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert process.stdin is not None
    assert process.stdout is not None
    with process.stdin, process.stdout:
        process.stdout.readline()
        process.wait(30)
        with pytest.raises(EngineNotFoundError):
            AsyncLLM.attach("forked")
        for name in ("dead", "forked"):
            assert anyio.run(tokens_of, make_owner(name, topology="inline")) == expected()
        assert rendezvous.names() == ["dead", "forked"]
        assert not (rendezvous.folder() / "listed.engine").exists(), "a look at the names clears up"
        assert rendezvous.folder().stat().st_mode & 0o777 == 0o700
        assert (rendezvous.folder() / "dead.engine").stat().st_mode & 0o777 == 0o600


def test_another_version(owner: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attach_client, "__version__", "0.0.9")
    with pytest.raises(AttachError, match=rf"runs actorllm {__version__} and the process .* has 0\.0\.9"):
        AsyncLLM.attach("tale")
    assert rendezvous.running_engines()[0].version == __version__


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
def test_another_user(owner: AsyncLLM) -> None:
    """Were the folder open to him, the engine would still ask who he is; and he asks the engine."""
    program = """
import json, os, socket, sys
control = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
try:
    control.connect(sys.argv[1])
    control.send(json.dumps({"op": "hello", "version": sys.argv[2]}).encode())
    print(control.recv(1 << 16).decode())
except PermissionError as error:
    print(json.dumps({"op": "denied"}))
"""
    entry = rendezvous.folder() / "tale.engine"
    python = shutil.which("python3", path="/usr/bin:/usr/local/bin")
    if python is None:
        pytest.skip("no Python that another user may run")

    def ask() -> Any:
        command = [str(python), "-c", program, str(entry), __version__]
        result = subprocess.run(command, user=65534, group=65534, cwd="/", capture_output=True, check=True, timeout=20)
        return json.loads(result.stdout)

    assert ask() == {"op": "denied"}
    folders = [rendezvous.folder().parent, rendezvous.folder()]
    for path in (*folders, entry):
        path.chmod(0o777)
    try:
        answer = ask()
    finally:
        for path in folders:
            path.chmod(0o700)
    assert (answer["op"], answer["type_name"]) == ("refused", "AttachError")
    assert "uid 0 and this process by uid 65534" in answer["message"]


def test_an_engine_of_another_user(owner: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "peer_of", lambda control: rendezvous.Peer(os.getpid(), 4711))
    with pytest.raises(AttachError, match=r"is run by uid 4711 and this process by uid \d+; only .* same user"):
        AsyncLLM.attach("tale")


def test_a_folder_that_others_can_write_to() -> None:
    folder = rendezvous.folder()
    folder.mkdir(mode=0o700, exist_ok=True)
    folder.chmod(0o777)
    try:
        with pytest.raises(ConfigError, match="only this user"):
            rendezvous.claim("tale")
        with pytest.raises(ConfigError, match="only this user"):
            AsyncLLM.attach("tale")
    finally:
        folder.chmod(0o700)


def test_an_engine_that_is_shutting_down(owner: AsyncLLM) -> None:
    door: Any = owner._engine._thread._service  # type: ignore[union-attr]
    door._state = "stopping"
    with pytest.raises(EngineShutdownError, match="'tale' is shutting down"):
        AsyncLLM.attach("tale")


@pytest.fixture
def silent_engine() -> Iterator[socket.socket]:
    """A name behind which nobody works."""
    claim = rendezvous.claim("silent")
    claim.listener.setblocking(True)
    yield claim.listener
    claim.release()


def test_the_owner_dies_during_the_handshake(silent_engine: socket.socket) -> None:
    def die() -> None:
        control, _ = silent_engine.accept()
        control.recv(100)
        control.close()

    thread = threading.Thread(target=die)
    thread.start()
    with pytest.raises(EngineDeadError, match=r"'silent'.* ended during the handshake"):
        AsyncLLM.attach("silent")
    thread.join()


def test_the_owner_dies_between_the_handshake_and_the_start(silent_engine: socket.socket) -> None:
    config = EngineConfig.from_arguments("storyteller", name="silent")

    def die() -> None:
        control, _ = silent_engine.accept()
        control.recv(100)
        send_frame(control, "welcome", pid=os.getpid(), config=config.to_json().decode())
        control.close()

    thread = threading.Thread(target=die)
    thread.start()
    guest = AsyncLLM.attach("silent")
    thread.join()
    error = error_of(guest.generate(PROMPT))
    assert isinstance(error, EngineDeadError)
    assert f"the process that owns engine 'silent' (pid {os.getpid()}) died" in str(error)
    guest.shutdown()


def test_an_engine_that_does_not_answer(
    silent_engine: socket.socket, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(rendezvous, "HANDSHAKE_TIMEOUT_S", 0.1)
    with pytest.raises(AttachError, match=r"'silent' \(process \d+\) has not answered within 0\.1 s"):
        AsyncLLM.attach("silent")
    assert main(["ps"]) == 0
    assert capsys.readouterr().out.splitlines()[1].split()[:4] == ["silent", str(os.getpid()), "-", "silent"]


# ps -------------------------------------------------------------------------------------------------------------------


def test_ps(
    make_owner: Callable[..., AsyncLLM], attach: Callable[..., AsyncLLM], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["ps", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == []
    owner = make_owner(max_num_seqs=1)
    guest = attach()
    streams = [llm.generate(PROMPT, params(LONG)) for llm in (owner, guest)]
    assert wait_until(lambda: scheduler_of(owner)["scheduler"]["num_waiting"] == 1)
    assert main(["ps", "--json"]) == 0
    (engine,) = json.loads(capsys.readouterr().out)
    assert engine.pop("uptime_s") > 0
    assert engine == {
        "name": "tale",
        "pid": os.getpid(),
        "model": "storyteller",
        "version": __version__,
        "state": "running",
        "num_replicas": 1,
        "num_frontends": 2,
        "num_running": 1,
        "num_waiting": 1,
    }
    assert main(["ps"]) == 0
    header, row = capsys.readouterr().out.splitlines()
    assert header.split() == [
        "NAME",
        "PID",
        "MODEL",
        "STATE",
        "UPTIME",
        "VERSION",
        "REPLICAS",
        "FRONTENDS",
        "RUNNING",
        "WAITING",
    ]
    fields = row.split()
    assert fields.pop(4).startswith("0:00:")
    assert fields == ["tale", str(os.getpid()), "storyteller", "running", __version__, "1", "2", "1", "1"]
    del streams
