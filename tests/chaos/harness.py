"""The chaos harness: many mixed requests on one engine, and somebody who kills, stops and starves its processes.

Every stream that ends is held against `tests/oracle.py`, token by token, and its text against its tokens, so no reference
run is needed and a run may be as long as one likes. `tests/chaos` runs it for a minute, `bench/soak.py` for half an hour.

A kill counts when every victim was alive, was not killed before, and is gone (its pidfd says all three), and it is noted how
many streams were running, whether some of them were still waiting for their first token, and whether the engine was about
to recover from the kill before. A stream runs from its submission until it ends, also over a recovery: with no more than half
as many requests as the engine has slots, or as many without siblings, none of them waits for a slot. A recovery is the time
from the kill to the first token that arrives after the engine runs again, with other processes.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import signal
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import torch

from actorllm import AsyncLLM, RequestOutputKind, SamplingParams
from tests.oracle import Account

VICTIMS = (("scheduler",), ("worker",), ("scheduler", "worker"))
MAX_MODEL_LEN = 512
STOP_STRINGS = (" the", "ing ", ". ", " and a")
NO_TOKEN_WITHIN_S = 60.0
"""A stream that gets nothing for so long counts as lost."""
MOMENT_WITHIN_S = 20.0
"""A kill comes so late at the latest, whatever runs then."""


@dataclass
class Request:
    """One request of the load, and what came of it."""

    number: int
    prompt: list[int]
    params: SamplingParams
    abort_after: int | None = None
    """The consumer leaves after so many tokens."""
    pause_s: float = 0.0
    """The consumer sleeps so long after each output."""
    streams: list[list[int]] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    finish: list[str | None] = field(default_factory=list)
    error: str | None = None
    num_kills: int = 0
    """That it lived through."""


@dataclass(frozen=True)
class Kill:
    """One verified kill."""

    victims: tuple[str, ...]
    num_running: int
    num_in_prefill: int
    recovery_s: float | None
    """None: nobody waited for it."""
    is_as_wanted: bool = True
    """False: the moment that was asked for did not come."""
    was_recovering: bool = False
    """From the death before."""
    is_by_parked: bool = False
    """A process that had been parked took the place of a victim."""


@dataclass
class Figures:
    """What a run prints."""

    requests: int = 0
    aborted: int = 0
    survivors: int = 0
    """Of those compared, how many lived through a kill."""
    lost: list[str] = field(default_factory=list)
    wrong_text: list[str] = field(default_factory=list)
    account: Account = field(default_factory=Account)
    kills: list[Kill] = field(default_factory=list)
    stops: int = 0

    def table(self) -> dict[str, Any]:
        """As plain numbers, for JSON and for people."""
        recoveries = [kill.recovery_s for kill in self.kills if kill.recovery_s is not None] or [math.nan]
        return {
            "requests": self.requests,
            "aborted": self.aborted,
            "lost": len(self.lost),
            "survivors compared": self.survivors,
            "tokens compared": self.account.tokens,
            "inside the margin": self.account.inside_margin,
            "differing": self.account.real,
            "wrong texts": len(self.wrong_text),
            "kills": len(self.kills),
            "kills by victim": dict(Counter("+".join(kill.victims) for kill in self.kills)),
            "kills with 16 and more running": sum(kill.num_running >= 16 for kill in self.kills),
            "kills with some in prefill": sum(kill.num_in_prefill > 0 for kill in self.kills),
            "kills with all in decode": sum(not kill.num_in_prefill for kill in self.kills),
            "kills at another moment than wanted": sum(not kill.is_as_wanted for kill in self.kills),
            "kills during a recovery": sum(kill.was_recovering for kill in self.kills),
            "recoveries by a parked process": sum(kill.is_by_parked for kill in self.kills),
            "stops": self.stops,
            "recoveries timed": sum(kill.recovery_s is not None for kill in self.kills),
            "recovery p50 s": round(float(np.quantile(recoveries, 0.5)), 3),
            "recovery p99 s": round(float(np.quantile(recoveries, 0.99)), 3),
        }


class Load:
    """Requests without end: shared prefixes, every kind of sampling, aborts, slow consumers, siblings. Seeded."""

    def __init__(self, seed: int, max_tokens: int = 120) -> None:
        self._rng = np.random.default_rng(seed)
        self._max_tokens = max_tokens
        self._prefixes = [self._ids(int(n)) for n in (40, 96, 200)]
        self._number = 0

    def _ids(self, count: int) -> list[int]:
        ids: list[int] = self._rng.integers(1, 4096, count).tolist()
        return ids

    def next(self) -> Request:
        rng = self._rng
        self._number += 1
        prefix = self._prefixes[self._number % 3] if rng.random() < 0.4 else []
        prompt = prefix + self._ids(int(rng.integers(1, 150)))
        kinds: list[dict[str, Any]] = [
            {"temperature": 0.0},
            {"temperature": 1.0},
            {"temperature": 0.8, "top_p": 0.95},
            {"temperature": 1.2, "top_k": 50},
            {"temperature": 0.9, "min_p": 0.02},
            {"temperature": 1.0, "presence_penalty": 0.6, "frequency_penalty": 0.3},
            {"temperature": 0.7, "repetition_penalty": 1.2},
            {"temperature": 1.0, "stop": [str(rng.choice(STOP_STRINGS))]},
            {"temperature": 1.0, "min_tokens": 20},
            {"temperature": 1.0, "n": 2},
        ]
        kind = kinds[self._number % len(kinds)]
        params = SamplingParams(
            max_tokens=int(rng.integers(self._max_tokens // 3, self._max_tokens)),
            ignore_eos="stop" not in kind and "min_tokens" not in kind,
            seed=int(rng.integers(0, 2**63)),
            output_kind=RequestOutputKind.DELTA,
            **kind,
        )
        return Request(
            self._number,
            prompt,
            params,
            abort_after=int(rng.integers(1, 40)) if rng.random() < 0.1 else None,
            pause_s=float(rng.random() * 0.2) if rng.random() < 0.1 else 0.0,
        )


class Chaos:
    """One run: `async with Chaos(engine, seed) as chaos`, then kills; at the end every open stream is awaited."""

    def __init__(self, engine: AsyncLLM, seed: int, concurrency: int = 32, max_tokens: int = 120) -> None:
        self.engine = engine
        self.figures = Figures()
        self._load = Load(seed, max_tokens)
        self._rng = np.random.default_rng(seed + 1)
        self._concurrency = concurrency
        self._is_feeding = True
        self._may_feed = anyio.Event()
        self._may_feed.set()
        self._waiting: dict[int, Request] = {}  # without a first token
        self._decoding: dict[int, Request] = {}
        self._num_tokens = 0
        self._token_came = anyio.Event()
        self._finished: list[Request] = []
        self._tokenizer: Any = None
        self._killed: dict[str, int] = {}  # the last process of each actor that was killed here

    # The load ---------------------------------------------------------------------------------------------------------

    async def feed(self) -> None:
        """Keep `concurrency` requests open until `stop_feeding`, and return when the last one has ended."""
        self._tokenizer = self.engine.get_tokenizer()
        limiter = anyio.Semaphore(self._concurrency)
        async with anyio.create_task_group() as group:
            while self._is_feeding:
                await self._may_feed.wait()
                await limiter.acquire()
                group.start_soon(self._consume, self._load.next(), limiter)

    def stop_feeding(self) -> None:
        self._is_feeding = False

    @property
    def num_finished(self) -> int:
        return self.figures.requests

    async def _consume(self, request: Request, limiter: anyio.Semaphore) -> None:
        n = request.params.n
        request.streams, request.texts, request.finish = [[] for _ in range(n)], [""] * n, [None] * n
        self._waiting[request.number] = request
        try:
            stream = self.engine.generate({"prompt_token_ids": request.prompt}, request.params)
            async with stream:
                while True:
                    with anyio.fail_after(NO_TOKEN_WITHIN_S):
                        try:
                            output = await anext(stream)
                        except StopAsyncIteration:
                            break
                    for part in output.outputs:
                        request.streams[part.index] += part.token_ids
                        request.texts[part.index] += part.text
                        request.finish[part.index] = part.finish_reason or request.finish[part.index]
                        self._num_tokens += len(part.token_ids)
                    self._waiting.pop(request.number, None)
                    self._decoding[request.number] = request
                    self._token_came.set()
                    self._token_came = anyio.Event()
                    if request.abort_after is not None and len(request.streams[0]) >= request.abort_after:
                        break
                    if request.pause_s:
                        await anyio.sleep(request.pause_s)
        except Exception as error:  # whatever it is, the stream is lost, and the run says so at its end
            request.error = f"{type(error).__name__}: {error}"
        finally:
            self._waiting.pop(request.number, None)
            self._decoding.pop(request.number, None)
            limiter.release()
        self._account(request)

    def _account(self, request: Request) -> None:
        figures, params = self.figures, request.params
        figures.requests += 1
        if request.error is not None:
            figures.lost.append(f"request {request.number}: {request.error}")
            return
        self._finished.append(request)
        if request.abort_after is not None and None in request.finish:
            figures.aborted += 1
            return
        for index, (stream, reason) in enumerate(zip(request.streams, request.finish, strict=True)):
            if reason not in ("stop", "length") or (reason == "length" and len(stream) != params.max_tokens):
                figures.lost.append(f"request {request.number}.{index}: ended as {reason} after {len(stream)} tokens")

    def take(self, request: Request, sequences: list[tuple[list[int], str, str | None]]) -> None:
        """A request that another program has made of the same engine: the tokens, the text and the end of each sequence."""
        request.streams, request.texts, request.finish = map(list, zip(*sequences, strict=True))  # type: ignore[assignment]
        request.abort_after = None  # it has not left early
        request.num_kills = 1  # they may have come, and every one of its streams is compared
        self._account(request)

    # Violence ---------------------------------------------------------------------------------------------------------

    def pids(self) -> dict[str, int]:
        """Of the engine's processes now, by their actors' names."""
        return {name: actor.pid for name, actor in self.engine.health().actors.items() if actor.pid is not None}

    async def kill(
        self, victims: tuple[str, ...], *, in_prefill: bool, enough: int = 16, is_patient: bool = True
    ) -> None:
        """SIGKILL these when `enough` streams run, some of them without a token or all of them with one.

        Waits until every victim has a process that was not killed before; TimeoutError if one gets none.
        is_patient: wait until tokens flow again; else the next kill may come while this one is being recovered from.
        """
        with anyio.move_on_after(MOMENT_WITHIN_S):
            while self._num_running < enough:
                await self._tick()
            if not in_prefill:
                self._may_feed = anyio.Event()
            while bool(self._waiting) != in_prefill or not self._living(victims):
                await self._tick()
        with anyio.fail_after(NO_TOKEN_WITHIN_S):
            while (began := self._kill_now(victims, in_prefill, enough)) is None:
                await self._tick()
        parked = {pid for name, pid in self.pids().items() if is_parked(name)}
        self._may_feed.set()
        if is_patient:
            await self._recovered({pid for name, pid in self._killed.items() if name.startswith(victims)})
            took_s = time.monotonic() - began
            is_by_parked = any(pid in parked for name, pid in self.pids().items() if name.startswith(victims))
            self.figures.kills[-1] = replace(self.figures.kills[-1], recovery_s=took_s, is_by_parked=is_by_parked)

    def _kill_now(self, victims: tuple[str, ...], in_prefill: bool, enough: int) -> float | None:
        """Kill all of them, note it and return when it was. None: not all of them are there, and nothing was done."""
        chosen = self._living(victims)
        if not chosen:
            return None
        num_running, num_in_prefill = self._num_running, len(self._waiting)
        was_recovering = self.engine.health().state != "running"
        try:
            with pidfds(chosen.values()) as handles:
                if select.select(handles, [], [], 0)[0]:
                    return None  # one died of itself or with its group, and nobody has noticed yet
                began = time.monotonic()
                for handle in handles:
                    signal.pidfd_send_signal(handle, signal.SIGKILL)
                for handle in handles:
                    ended, _, _ = select.select([handle], [], [], 10)
                    assert ended, f"one of {chosen} is not gone"
        except ProcessLookupError:  # the same, and it is buried already
            return None
        self._killed |= chosen
        for request in (*self._waiting.values(), *self._decoding.values()):
            request.num_kills += 1
        is_as_wanted = num_running >= enough and bool(num_in_prefill) == in_prefill
        self.figures.kills.append(Kill(victims, num_running, num_in_prefill, None, is_as_wanted, was_recovering))
        return began

    def _living(self, victims: tuple[str, ...]) -> dict[str, int]:
        """The processes of all these actors, none of them one that was killed; empty while one is missing."""
        found = {name: actor.pid for name, actor in self.engine.health().actors.items() if name.startswith(victims)}
        living = {name: pid for name, pid in found.items() if pid is not None and pid != self._killed.get(name)}
        is_complete = living.keys() == found.keys() and all(
            any(name.startswith(victim) for name in living) for victim in victims
        )
        return living if is_complete else {}

    @property
    def _num_running(self) -> int:
        return len(self._waiting) + len(self._decoding)

    async def _recovered(self, gone: set[int]) -> None:
        """Return with the first token after the engine runs again without these processes."""
        with anyio.fail_after(NO_TOKEN_WITHIN_S):
            while self.engine.health().state != "running" or gone & set(self.pids().values()):
                await anyio.sleep(0.002)
            await self._token_came.wait()

    async def stop(self, name: str, seconds: float) -> None:
        """SIGSTOP a process for a while: it is slow, and not dead."""
        pid = next((pid for actor, pid in self.pids().items() if actor.startswith(name)), None)
        if pid is None:  # it is started again just now
            return
        os.kill(pid, signal.SIGSTOP)
        await anyio.sleep(seconds)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
        self.figures.stops += 1

    async def _tick(self) -> None:
        with anyio.move_on_after(0.01):
            await self._token_came.wait()

    # The verdict ------------------------------------------------------------------------------------------------------

    async def compare(self) -> None:
        """Until cancelled: hold what ends against the oracle, in a thread of its own, on a core that waits for processes."""
        while True:
            await anyio.to_thread.run_sync(lambda: self.check_finished(only_survivors=True))
            await anyio.sleep(0.5)

    def check_finished(self, *, only_survivors: bool = False) -> None:
        """Hold what ended since the last call against the oracle. Blocks: for when nobody else needs the core.

        only_survivors: of the streams to which nothing was done, every fourth is enough.
        """
        torch.set_num_threads(1)  # a team of two on cores that others use waits for its members most of the time
        finished, self._finished = self._finished, []
        for request in finished:
            if only_survivors and not request.num_kills and request.number % 4:
                continue
            self.figures.survivors += request.num_kills > 0
            for index, (stream, text) in enumerate(zip(request.streams, request.texts, strict=True)):
                if not stream:
                    continue
                self.figures.account.check(request.prompt, request.params, stream, index)
                if not self._is_right_text(request, stream, text, request.finish[index]):
                    self.figures.wrong_text.append(f"request {request.number}.{index}: {text!r}")

    def _is_right_text(self, request: Request, stream: list[int], text: str, reason: str | None) -> bool:
        prompt_text = self._tokenizer.decode(request.prompt[-8:], skip_special_tokens=True)
        whole = self._tokenizer.decode([*request.prompt[-8:], *stream], skip_special_tokens=True)
        expected = whole[len(prompt_text) :] if whole.startswith(prompt_text) else whole
        ends = [end for stop in request.params.stop or () if (end := expected.find(stop)) >= 0]
        if reason == "stop" and ends:
            return text == expected[: min(ends)]
        if reason is None:  # left early: what came must be how it begins
            return expected.startswith(text.rstrip("\ufffd"))
        return text.rstrip("\ufffd") == expected.rstrip("\ufffd")


@contextlib.contextmanager
def pidfds(pids: Any) -> Iterator[list[int]]:
    """Handles of processes, by which their death is seen whatever becomes of their numbers."""
    handles: list[int] = []
    try:
        handles.extend(os.pidfd_open(pid) for pid in pids)  # keeps those before one that is gone
        yield handles
    finally:
        for handle in handles:
            os.close(handle)


def is_parked(name: str) -> bool:
    """Whether an actor of this name, of a replica or not, waits to take the place of another one."""
    return name.rpartition("/")[2].startswith("parked ")


def own_mib(pids: Any, cache_bytes: int) -> float:
    """Memory of these processes together that no file backs, without KV caches of at least so many bytes.

    The pages of a cache come with use: a process that lives longer has more of them, up to its size. Raises OSError: one is gone.
    """
    total = 0
    for pid in pids:
        size = 0
        for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
            name, _, value = line.partition(":")
            if name == "Size":
                size = 1024 * int(value.split()[0])
            elif name == "Anonymous" and size < cache_bytes:
                total += 1024 * int(value.split()[0])
    return total / 2**20


def resident_mib(pids: Any) -> float:
    """Memory of these processes together."""
    total = 0
    for pid in pids:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            total += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return total / 2**20
