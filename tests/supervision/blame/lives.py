"""An engine of several programs in one thread: real frontend and scheduler actors, turned by hand, and schedulers that die.

What a process would be killed of is an exception here that nobody catches but `Lives`, which then does what the supervisor
does: it counts the death, tells the frontends, and begins the next life with links of the next generation.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

from actorllm.actors.frontend import Delta, FrontendActor
from actorllm.actors.scheduler import SchedulerActor
from actorllm.config import EngineConfig
from actorllm.errors import PeerLostError, PeerRestartedError
from actorllm.messages import StepPlan, Submit
from actorllm.supervision.restart import RestartCounter, RestartLimits
from tests.actors.scripted_worker import DEADLY, VOCAB
from tests.scheduling.chained_tokens import SIBLING, ScriptedWorker, reference_stream

NUM_BLOCKS = 80


class Killed(BaseException):
    """The scheduler's process is gone."""


class Wire:
    """One end of a link: what is sent is delivered at once, or, with nobody at the other end, not at all."""

    def __init__(self, name: str, generation: int = 1, deliver: Callable[[Any], object] | None = None) -> None:
        self.name = self.peer = name
        self.generation = generation
        self.rank = 0
        self.is_open = True
        self.lost: Exception | None = None
        self.deliver = deliver

    def send_nowait(self, message: Any) -> None:
        if self.deliver is not None:
            self.deliver(message)


class Caller:
    """The consumer of one sequence."""

    host = None
    wakes_at_end = False
    is_aborted = False

    def __init__(self, prompt: list[int], seed: int, index: int, max_tokens: int) -> None:
        self.prompt, self.seed, self.index, self.max_tokens = prompt, seed, index, max_tokens
        self.rid = 0
        self.tokens: list[int] = []
        self.reason: str | None = None
        self.error: BaseException | None = None

    @property
    def is_over(self) -> bool:
        return self.reason is not None or self.error is not None

    def push(self, delta: Delta) -> None:
        self.tokens += delta.tokens
        if delta.end is not None:
            self.reason = delta.end.reason

    def note_cached(self, num_tokens: int) -> None:
        pass

    def note_version(self, num_tokens: int, version: str) -> None:
        pass

    def fail(self, error: BaseException) -> None:
        self.error = error

    def wake(self) -> None:
        pass

    def check(self) -> None:
        """What came so far is what comes without deaths."""
        expected = reference_stream(self.prompt, self.seed + SIBLING * self.index, len(self.tokens), VOCAB)
        assert self.tokens == expected
        if self.reason == "length":
            assert len(self.tokens) == self.max_tokens


class Lives:
    """Schedulers, one after the other, and the programs that use them. clock: of the scheduler actor, to be patched in.

    is_replica: they are those of one of several replicas.
    """

    def __init__(
        self, num_frontends: int = 1, policy: str = "AtItsMoment", *, is_replica: bool = False, **arguments: Any
    ) -> None:
        self.is_replica = is_replica
        self.stream_interval = 1
        """Of the requests from here on."""
        if is_replica:
            arguments["data_parallel_size"] = 2
        arguments = {"max_num_seqs": 4, "scheduling_policy": f"tests.actors.deadly_policies:{policy}"} | arguments
        self.config = EngineConfig.from_arguments("storyteller", **arguments).resolved(NUM_BLOCKS)
        self.frontends: list[FrontendActor | None] = []
        self.ends: dict[FrontendActor, tuple[Wire, Wire]] = {}
        """Of their links: their own, and that of the scheduler."""
        self.generations: dict[FrontendActor, int] = {}
        self.late: set[FrontendActor] = set()
        """Those that do not get to submit again before something else has happened."""
        self.late_next: set[int] = set()
        """The numbers of those that will take their time after the next death."""
        self.counter = RestartCounter(RestartLimits())
        self.is_dead = False
        self.now = 0.0
        self.num_deaths = 0
        self.callers: list[Caller] = []
        self._reborn()
        for _ in range(num_frontends):
            self.join()

    def clock(self) -> float:
        return self.now

    # Programs

    def join(self) -> int:
        """A program attaches; returns its number."""
        frontend = self._make_frontend()
        self.frontends.append(frontend)
        self._connect([frontend])
        return len(self.frontends) - 1

    def _make_frontend(self, last_rid: int = 0) -> FrontendActor:
        frontend = FrontendActor(last_rid=last_rid)
        frontend.PROBES_ALONE = self.is_replica
        frontend._wakeup = SimpleNamespace(set=lambda: None)  # type: ignore[assignment]
        return frontend

    def adopt(self, number: int, requests: list[tuple[list[int], int, int]]) -> list[Caller]:
        """Requests that another replica may have died of, with prompt, tokens and sequences; they go on here."""
        home, mine = self._make_frontend(last_rid=10_000 + len(self.callers)), self.frontends[number]
        assert mine is not None
        callers = [caller for request in requests for caller in self._submit(home, *request)]
        entries = home.surrender()
        for entry in entries.values():
            entry.record.suspect()
        mine.adopt(entries, self.now)
        return callers

    def leave(self, number: int) -> None:
        """A program is gone, and its requests with it."""
        frontend = self.frontends[number]
        assert frontend is not None
        self.frontends[number] = None
        _, far = self.ends.pop(frontend)
        self.late.discard(frontend)
        far.is_open, far.deliver = False, None
        far.lost = PeerLostError("it left")
        self.scheduler.on_peer_lost(far)  # type: ignore[arg-type]

    def submit(self, number: int, prompt: list[int], max_tokens: int = 8, n: int = 1) -> list[Caller]:
        frontend = self.frontends[number]
        assert frontend is not None
        return self._submit(frontend, prompt, max_tokens, n)

    def _submit(self, frontend: FrontendActor, prompt: list[int], max_tokens: int, n: int) -> list[Caller]:
        seed = len(self.callers)
        callers = [Caller(prompt, seed, index, max_tokens) for index in range(n)]
        self.callers += callers

        def make(rid: int) -> Submit:
            tokens = np.array(prompt, np.int32)
            return Submit(
                rid=rid,
                arrival=0.0,
                prompt=tokens,
                max_tokens=max_tokens,
                seed=seed,
                ignore_eos=True,
                detokenize=False,
                stream_interval=self.stream_interval,
            )

        rids: list[int] = []
        if n == 1:
            frontend.submit(make, callers[0], rids.append)
        else:
            frontend.submit_several(make, callers, rids.append)
        for caller, rid in zip(callers, rids, strict=True):
            caller.rid = rid
        return callers

    # Lives

    def turn(self) -> bool:
        """One turn of the scheduler and one step of the workers. False: there is nothing to do."""
        if self.is_dead:
            return False
        num_done = len(self.plans)
        try:
            had_result = self.scheduler.turn()
        except Killed:
            self.die()
            return True
        self.scheduler.scheduler.check_integrity()
        if self.plans:
            plan = self.plans.pop(0)
            result = self.model.run(plan)
            if any(self._is_deadly(slot) for slot in plan.prefill_slots.tolist()):
                self.lose_workers()
            else:
                self.scheduler.on_message(self.workers, result)  # type: ignore[arg-type]
            return True
        return had_result or num_done > 0

    def _is_deadly(self, slot: int) -> bool:
        """Whether workers die of the prompt in this slot."""
        row = self.model.rows[slot]
        return DEADLY in row.tokens[: row.num_known_at_start - row.num_outputs_at_start]

    def lose_workers(self) -> None:
        """The workers are dead, and the next ones begin."""
        self.num_deaths += 1
        self.is_dead |= self.counter.died("workers", was_ready=True) is None
        lost = self.workers
        lost.is_open, lost.lost = False, PeerRestartedError("killed")
        try:
            self.scheduler.on_peer_lost(lost)  # type: ignore[arg-type]
        except Killed:
            self.die()
        else:
            self._begin_workers()

    def rest(self) -> None:
        """Turn until nothing happens any more. Whoever is late comes when the others have nothing left to do."""
        for _ in range(20_000):
            if self.is_dead:
                return
            if self.turn() or self.scheduler._inbox:
                continue
            probes = self.scheduler._probes
            if probes and probes.resubmitting and self.now < probes.begins_at:
                self.now = probes.begins_at
            elif self.late:
                self.catch_up()
            elif not self.turn():
                return
        raise AssertionError("it does not come to an end")

    def catch_up(self) -> None:
        """Those that are late submit again."""
        late, self.late = self.late, set()
        for frontend in late:
            frontend.on_link(self.ends[frontend][0])  # type: ignore[arg-type]

    def die(self) -> None:
        """The scheduler is dead, and the next one begins."""
        self.num_deaths += 1
        self.is_dead |= self.counter.died("scheduler", was_ready=True) is None
        alive = [frontend for frontend in self.frontends if frontend is not None]
        for frontend in alive:
            near, _ = self.ends[frontend]
            near.is_open, near.lost = False, PeerRestartedError("killed")
            if frontend in self.late:
                frontend.on_link(near)  # type: ignore[arg-type]
            frontend.on_peer_lost(near)  # type: ignore[arg-type]
        self._reborn()
        self.late = {f for number, f in enumerate(self.frontends) if f is not None and number in self.late_next}
        self.late_next = set()
        self._connect(alive)

    def _reborn(self) -> None:
        actor = self.scheduler = SchedulerActor()
        actor._wakeup = SimpleNamespace(set=lambda: None)  # type: ignore[assignment]
        actor._runner = SimpleNamespace(report_progress=self.counter.progressed)  # type: ignore[assignment]
        actor.on_configure(self.config)
        actor.is_running = True
        self._begin_workers()

    def _begin_workers(self) -> None:
        self.model = ScriptedWorker(self.config.cache.block_size, NUM_BLOCKS, vocab=VOCAB)
        self.plans: list[StepPlan] = []
        self.workers = Wire("workers", deliver=lambda m: self.plans.append(m) if isinstance(m, StepPlan) else None)
        self.scheduler.on_link(self.workers)  # type: ignore[arg-type]

    def _connect(self, frontends: list[FrontendActor]) -> None:
        actor = self.scheduler
        for frontend in frontends:
            generation = self.generations[frontend] = self.generations.get(frontend, 0) + 1
            near, far = Wire("scheduler", generation), Wire("frontend", generation)
            near.deliver = lambda message, far=far: actor.on_message(far, message)
            far.deliver = lambda message, near=near, frontend=frontend: frontend.on_message(near, message)
            self.ends[frontend] = near, far
            actor.on_link(far)  # type: ignore[arg-type]
        for frontend in frontends:
            if frontend not in self.late:
                frontend.on_link(self.ends[frontend][0])  # type: ignore[arg-type]
