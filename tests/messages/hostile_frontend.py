"""A hostile attached frontend: messages of every type with a field that no frontend would send, to a scheduler at work.

What must hold: whatever it sends, nothing is raised into the scheduler's loop; its link is dropped or what it sent is worked on;
and an honest frontend beside it gets its streams, token by token.
"""

from __future__ import annotations

import random
from collections.abc import Coroutine
from types import SimpleNamespace
from typing import Any

import numpy as np

from actorllm.actors.actor import Runner
from actorllm.actors.scheduler import SchedulerActor
from actorllm.client.stepper import NoWaiter, run_to_end
from actorllm.config import EngineConfig
from actorllm.errors import PeerLostError
from actorllm.messages import (
    Abort,
    Ask,
    Begun,
    KvOffer,
    LateInputs,
    Message,
    Outputs,
    PauseChanged,
    ProbeGroup,
    Reply,
    StepFailed,
    StepPlan,
    StepResult,
    Submit,
    Unblock,
    WeightsChanged,
)
from actorllm.messages.embeds import EMBEDDED
from tests.ring.hostile import EMBEDDING_BYTES, Report, strange_messages, through_the_wire
from tests.scheduling.chained_tokens import ScriptedWorker, reference_stream

VOCAB = 4096
MESSAGE_TYPES = (
    Submit,
    Abort,
    Unblock,
    Ask,
    Reply,
    StepResult,
    StepFailed,
    Outputs,
    PauseChanged,
    WeightsChanged,
    ProbeGroup,
    Begun,
    KvOffer,
)


class Anything:
    """A task group that starts nothing, an event that nobody waits for."""

    def set(self) -> None: ...

    def start_soon(self, function: Any, *arguments: Any) -> None:
        for argument in arguments:
            if isinstance(argument, Coroutine):
                argument.close()


class Called(Runner):
    """There is no loop: what is done on threads is waited for."""

    def waker(self) -> None:
        return None


class RecordingLink:
    """One end of a link, which keeps what is sent."""

    group = None
    generation = 1
    info = SimpleNamespace(index=0)

    def __init__(self, peer: str) -> None:
        self.name = self.peer = peer
        self.rank = 0
        self.is_open = True
        self.lost: BaseException | None = None
        self.sent: list[Any] = []

    @property
    def spokes(self) -> tuple[RecordingLink, ...]:
        return (self,)

    def send_nowait(self, message: Any) -> None:
        self.sent.append(message)

    def finish(self) -> None: ...

    def close(self) -> None:
        self.is_open = False


class Engine:
    """A scheduler actor between an honest frontend, hostile ones, and a scripted worker."""

    def __init__(self) -> None:
        self.config = EngineConfig.from_arguments(
            "storyteller", dtype="float32", max_num_seqs=8, async_scheduling=False, enable_prompt_embeds=True
        ).resolved(80)
        assert self.config.model.embedding_bytes == EMBEDDING_BYTES
        self.actor = SchedulerActor()
        self.failures: list[BaseException | None] = []
        self.runner = Called(self.actor, self.failures.append)
        self.runner._ended = Anything()  # type: ignore[assignment]
        self.runner._tasks = Anything()  # type: ignore[assignment]
        self.actor._wakeup = NoWaiter()
        run_to_end(self.actor.on_start(self.config))
        self.actor.on_configure(self.config)
        self.model = ScriptedWorker(self.config.cache.block_size, 80, vocab=VOCAB)
        self.workers, self.honest = RecordingLink("workers"), RecordingLink("frontend")
        for link in (self.workers, self.honest):
            self.actor.links[link.peer] = link  # type: ignore[assignment]
            self.actor.on_link(link)  # type: ignore[arg-type]
        self.num_visitors = 0
        self.visitor = self.new_visitor()
        self.num_steps = 0

    def new_visitor(self) -> RecordingLink:
        self.num_visitors += 1
        visitor = RecordingLink(f"attached{self.num_visitors}")
        self.actor.links[visitor.peer] = visitor  # type: ignore[assignment]
        self.actor.on_link(visitor)  # type: ignore[arg-type]
        return visitor

    def deliver(self, link: RecordingLink, message: Message) -> None:
        self.runner.deliver(link, message)  # type: ignore[arg-type]
        if self.failures:
            raise AssertionError("the scheduler failed") from self.failures[0]

    def turn(self) -> None:
        """One step, if there is one."""
        self.actor.turn()
        sent, self.workers.sent = self.workers.sent, []
        plans = [message for message in sent if isinstance(message, StepPlan)]
        late = {message.step: message for message in sent if isinstance(message, LateInputs)}
        for plan in plans:
            self.num_steps += 1
            step_late = late.get(plan.step) or (LateInputs(step=plan.step) if plan.late_slots.size else None)
            result = self.model.run(plan, step_late)
            chunks = zip(plan.prefill_slots.tolist(), plan.prefill_counts.tolist(), strict=True)
            rows = [(self.model.rows[slot], count) for slot, count in chunks]
            num_embedded = sum(row.tokens[row.computed - count : row.computed].count(EMBEDDED) for row, count in rows)
            assert plan.embeds.size == num_embedded * EMBEDDING_BYTES, "the worker refuses the plan"
            self.deliver(self.workers, result)
        self.actor.turn()

    def honest_stream(self, rid: int) -> list[int]:
        """A whole request of the honest frontend."""
        self.honest.sent.clear()
        scheduler = self.actor.scheduler
        if scheduler.pause_state.value != "running":  # a visitor may pause the engine like anybody else
            scheduler.resume(0.0)
        prompt = [10 + rid % 50, 20, 30]
        submit = good_submit(rid, prompt)
        self.deliver(self.honest, submit)
        for _ in range(600):
            self.turn()
            outputs = [message for message in self.honest.sent if isinstance(message, Outputs)]
            if any(message.ends for message in outputs):
                break
        assert [end[1:4] for o in outputs for end in o.ends] == [["length", None, None]]
        tokens = [token for o in outputs for token in o.tokens.tolist()]
        assert tokens == reference_stream(prompt, rid, 6, VOCAB)
        return tokens


def good_submit(rid: int, prompt: list[int]) -> Submit:
    return Submit(
        rid=rid,
        arrival=0.0,
        prompt=np.array(prompt, np.int32),
        max_tokens=6,
        seed=rid,
        ignore_eos=True,
        detokenize=False,
    )


def run(trials: int, seed: int) -> Report:
    """So many strange messages, and an honest request after every hundred."""
    chance = random.Random(seed)
    report = Report()
    engine = Engine()
    messages = strange_messages(chance, MESSAGE_TYPES)
    for trial in range(trials):
        if trial % 100 == 50:
            engine.honest_stream(trial)
        if trial % 1000 == 999:  # whatever it left running, or blocked for ever, goes with its link
            engine.runner._drop(engine.visitor, PeerLostError("gone"))  # type: ignore[arg-type]
            engine.visitor = engine.new_visitor()
            engine.actor.scheduler.check_integrity()
        target, message = next(messages)
        received = through_the_wire(message)
        if received is None:
            report.note(target, is_refused=True)
            continue
        if isinstance(received, Ask) and received.verb in ("start_profile", "stop_profile", "worker_statistics"):
            continue  # the workers answer that, in time
        visitor = engine.visitor
        engine.deliver(visitor, received)
        if chance.random() < 0.3:
            engine.turn()
        is_dropped = not visitor.is_open
        if is_dropped:
            assert isinstance(visitor.lost, Exception)
            engine.visitor = engine.new_visitor()
        visitor.sent.clear()
        report.note(target, is_refused=is_dropped)
    return report
