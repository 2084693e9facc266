"""How many connections a server keeps, and which of them are closed early."""

from __future__ import annotations

import resource
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from actorllm.errors import ConfigError
from actorllm.server import connections
from actorllm.server.connections import ConnectionLimit, max_connections


class Connection:
    """A protocol and its transport in one."""

    def __init__(self) -> None:
        self.transport: Any = self
        self.is_aborted = False

    def abort(self) -> None:
        self.is_aborted = True


class ConnectionLimitMachine(RuleBasedStateMachine):
    """Connections come, get busy and idle, and go. The model is a list in the order in which they became idle."""

    LIMIT = 3

    def __init__(self) -> None:
        super().__init__()
        self.limit = ConnectionLimit(self.LIMIT)
        self.idle: list[Connection] = []
        self.busy: list[Connection] = []

    @rule()
    def connect(self) -> None:
        one = Connection()
        is_full = len(self.idle) + len(self.busy) == self.LIMIT
        assert self.limit.add(one) == (bool(self.idle) or not is_full)
        if is_full and self.idle:
            closed = self.idle.pop(0)
            assert closed.is_aborted
            self.limit.remove(closed)  # uvicorn tells it later
            self.limit.set_idle(closed)
        if self.idle or not is_full or len(self.busy) < self.LIMIT:
            self.idle.append(one)

    @rule(data=st.data())
    def begin(self, data: st.DataObject) -> None:
        if self.idle:
            one = self.idle.pop(data.draw(st.integers(0, len(self.idle) - 1)))
            self.limit.set_busy(one)
            self.busy.append(one)

    @rule(data=st.data())
    def answer(self, data: st.DataObject) -> None:
        if self.busy:
            one = self.busy.pop(data.draw(st.integers(0, len(self.busy) - 1)))
            self.limit.set_idle(one)
            self.idle.append(one)

    @rule(data=st.data())
    def disconnect(self, data: st.DataObject) -> None:
        if self.idle or self.busy:
            one = data.draw(st.sampled_from(self.idle + self.busy))
            (self.idle if one in self.idle else self.busy).remove(one)
            self.limit.remove(one)

    @invariant()
    def the_count_is_right(self) -> None:
        assert len(self.limit) == len(self.idle) + len(self.busy) <= self.LIMIT
        assert not any(one.is_aborted for one in self.idle + self.busy)


TestConnectionLimit = ConnectionLimitMachine.TestCase


def test_the_default_is_what_the_descriptors_allow(monkeypatch: pytest.MonkeyPatch) -> None:
    for files, expected in ((1024, 768), (100, 16), (1 << 20, 8192), (resource.RLIM_INFINITY, 8192)):
        monkeypatch.setattr(connections.resource, "getrlimit", lambda _, files=files: (files, files))
        assert max_connections(None) == expected


def test_more_than_the_descriptors_allow_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections.resource, "getrlimit", lambda _: (1024, 1024))
    assert max_connections(768) == 768
    with pytest.raises(ConfigError, match=r"max_connections=769 needs 1025 open files.*at most 768"):
        max_connections(769)
    with pytest.raises(ConfigError, match="max_connections=0 must be at least 1"):
        max_connections(0)
