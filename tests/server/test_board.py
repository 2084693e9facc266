"""The numbers that processes show each other, and the questions that they ask."""

from __future__ import annotations

import os
import socket
from typing import Any

import anyio
import pytest

from actorllm.errors import ConfigError, PeerLostError
from actorllm.server.api_process import MAX_NAMES_BYTES, _portions
from actorllm.server.board import LAG_BOUNDS, Board
from actorllm.server.line import ControlLine


def test_every_process_sees_the_rows_of_all() -> None:
    fd = Board.share(2)
    first, second = Board(2, fd), Board(2, fd)
    os.close(fd)
    first.set_in_flight(0, 3)
    second.set_in_flight(1, 4)
    assert first.num_in_flight == second.num_in_flight == 7
    first.note_lag(0, 0.004)
    second.note_lag(1, 100.0)
    lag = first.lag()
    assert lag == second.lag()
    assert lag["counts"][LAG_BOUNDS.index(0.005)] == lag["counts"][-1] == 1
    assert sum(lag["counts"]) == 2
    second.clear(0)  # its process died: what it had counted stays
    assert first.num_in_flight == 4
    assert first.lag() == lag


def test_names_go_in_portions_that_fit() -> None:
    names = [f"cmpl-{number}" for number in range(10_000)]
    portions = list(_portions(names))
    assert [name for portion in portions for name in portion or ()] == names
    assert len(portions) > 1
    assert list(_portions(["a", "x" * MAX_NAMES_BYTES, "b"])) == [["a", "b"]]
    assert list(_portions(None)) == [None]
    assert list(_portions([])) == []


@pytest.mark.anyio
async def test_questions_in_both_directions_and_the_end_of_one_side() -> None:
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    async def echo(verb: str, arguments: dict[str, Any], fds: tuple[int, ...]) -> Any:
        match verb:
            case "say":
                return arguments
            case "count":
                for fd in fds:
                    os.close(fd)
                return len(fds)
            case "refuse":
                raise ConfigError("no")
            case _:
                await anyio.sleep_forever()
                return None

    with here, there:
        first, second = ControlLine(here, echo), ControlLine(there, echo)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(first.run)
            async with anyio.create_task_group() as others:
                others.start_soon(second.run)
                assert await first.ask("say", 5, a=1) == {"a": 1}
                assert await second.ask("count", 5, fds=(here.fileno(), there.fileno())) == 2
                with pytest.raises(ConfigError, match="no"):
                    await first.ask("refuse", 5)
                with pytest.raises(TimeoutError):
                    await first.ask("never", 0.01)
                tasks.start_soon(_expect_loss, first)
                await anyio.wait_all_tasks_blocked()
                others.cancel_scope.cancel()
            there.close()
        with pytest.raises(PeerLostError):
            await first.ask("say", 5)


async def _expect_loss(line: ControlLine) -> None:
    with pytest.raises(PeerLostError, match="ended before it answered 'never'"):
        await line.ask("never", 20)
