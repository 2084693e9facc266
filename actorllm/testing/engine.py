"""`ScriptedAsyncLLM` and `ScriptedLLM`: the front doors over an engine whose worker follows a script.

Frontend, scheduler and worker run on the engine thread, under the supervisor of every engine. It starts a worker that the script
has ended again, as it does with a process.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from actorllm.actors.actor import Actor
from actorllm.actors.engine_thread import AsyncioLoop, EngineThread
from actorllm.actors.topology import ActorSpec, LinkSpec, Topology
from actorllm.api.async_llm import AsyncLLM
from actorllm.api.llm import LLM
from actorllm.client.engine import Engine
from actorllm.client.stream import RequestStream
from actorllm.client.submit import SubmitMaker
from actorllm.clock import now
from actorllm.config import EngineConfig
from actorllm.errors import ConfigError
from actorllm.intake.tokenization import PromptReader
from actorllm.supervision.children import Child, OwnerChild
from actorllm.supervision.death import ActorDeath
from actorllm.supervision.group import Group
from actorllm.supervision.restart import RestartLimits
from actorllm.supervision.supervisor import Supervisor
from actorllm.testing.script import Answers, Script
from actorllm.testing.scripted_worker import ScriptedEngineDeath, ScriptedWorkerActor
from actorllm.testing.virtual_loop import POLL_S, SettlingLoop
from actorllm.testing.virtual_time import RealTime, VirtualTime, deadline_of
from actorllm.text.tokenizer import Tokenizer

WORKER = ActorSpec(
    "worker0", "actorllm.testing.scripted_worker:ScriptedWorkerActor", placement="owner", group="workers"
)
TOPOLOGY = Topology(
    actors=(
        ActorSpec("frontend", "actorllm.actors.frontend:FrontendActor", placement="owner"),
        ActorSpec("scheduler", "actorllm.actors.scheduler:SchedulerActor", placement="owner"),
        WORKER,
    ),
    links=(LinkSpec.pair("scheduler", "frontend"), LinkSpec.broadcast("workers", "scheduler", [WORKER.name])),
)


class ScriptedSupervisor(Supervisor):
    """Starts scripted workers, each with the script of the engine."""

    def __init__(self, script: Script, time: RealTime | VirtualTime, config: EngineConfig, **options: Any) -> None:
        super().__init__(TOPOLOGY, config, **options)
        self._script, self._time = script, time
        self._groups = {WORKER.name: Group("workers", (WORKER,))} if config.on_failure == "restart" else {}

    def _make_child(self, spec: ActorSpec, loop: AsyncioLoop) -> Child:
        if spec is WORKER:
            worker = ScriptedWorkerActor(spec.name, spec.rank, self._script, self._time)
            return OwnerChild(spec, self._on_end, worker)
        return super()._make_child(spec, loop)

    def _on_end(self, child: Child, death: ActorDeath) -> None:
        is_last = isinstance(child, OwnerChild) and isinstance(child.runner.failure, ScriptedEngineDeath)
        if is_last and self._phase == "running":
            self._give_up(death)
        else:
            super()._on_end(child, death)


class VirtualSubmitMaker(SubmitMaker):
    """The limits of requests count in virtual time."""

    def __init__(self, config: EngineConfig, prompts: PromptReader, time: VirtualTime) -> None:
        super().__init__(config, prompts)
        self._time = time

    def carried(
        self, *, deadline: float | None = None, timeout: float | None = None, **extras: Any
    ) -> tuple[float, dict[str, Any]]:
        arrival, fields = super().carried(deadline=deadline, timeout=timeout, **extras)
        rest = [] if deadline is None else [deadline - now()]
        rest += [] if timeout is None else [timeout]
        if rest:
            fields["deadline"] = deadline_of(self._time.now() + min(rest))
        return arrival, fields


class ScriptedEngine(Engine):
    """An engine with a scripted worker. time: what its steps wait for."""

    def __init__(self, config: EngineConfig, answers: Answers, time: RealTime | VirtualTime) -> None:
        if config.model.tokenizer is None:
            raise ConfigError("a scripted engine reads prompts as text; leave skip_tokenizer_init out")
        if config.model.pooler is not None:
            raise ConfigError("a scripted engine generates text and makes no vectors; leave runner='pooling' out")
        self._script = Script(answers, Tokenizer(config.model.tokenizer), config.model.eos_token_ids[0])
        self._time = time
        self._loop: SettlingLoop | None = None
        self.num_calls = 0
        """Of callers that wait until the engine has stopped."""
        super().__init__(config)
        if isinstance(time, VirtualTime):
            self._submits = VirtualSubmitMaker(self.config, self.prompts, time)
            time.join(self, self._script)

    def _new_supervisor(self) -> Supervisor:
        return ScriptedSupervisor(
            self._script,
            self._time,
            self.config,
            resolve=self._resolve,
            on_death=self._on_death,
            actors={"frontend": self._frontend, "scheduler": self._new_scheduler()},
            restarts=RestartLimits() if self.config.on_failure == "restart" else None,
        )

    def _new_scheduler(self) -> Actor:
        from actorllm.testing.scripted_scheduler import ScriptedSchedulerActor

        return ScriptedSchedulerActor(self._script, self._time)

    def _new_thread(self) -> EngineThread:
        is_virtual = isinstance(self._time, VirtualTime)
        return EngineThread(self._new_service(), loop_factory=self._new_loop if is_virtual else None)

    def _new_loop(self) -> SettlingLoop:
        self._loop = SettlingLoop()
        return self._loop

    def _accept(self, *arguments: Any, **extras: Any) -> RequestStream:
        stream = super()._accept(*arguments, **extras)
        if isinstance(self._time, VirtualTime):
            stream._ends_at = None  # its limit is the engine's to keep, in another time than that of the stream's loop
        return stream

    @contextmanager
    def waited_for(self) -> Iterator[None]:
        """Around a wait until the engine has stopped, for which virtual time stands still."""
        self.num_calls += 1
        try:
            yield
        finally:
            self.num_calls -= 1

    def is_settled(self) -> bool:
        """See `Timed`. A request that no step works for, unless generation is paused, is on its way to one."""
        assert isinstance(self._time, VirtualTime)
        if self.num_calls or self._is_taking_in() or (self._loop is not None and not self._loop.is_settled(POLL_S)):
            return False
        if self._is_taking_in():  # it gave something to the loop meanwhile
            return False
        has_ended = all(stream.has_ended for stream in list(self._streams.values()))
        return has_ended or self._frontend.is_paused or self._time.delays(self._script)

    def _is_taking_in(self) -> bool:
        pool = self._tokenizer_pool
        return bool(self._wanting) or (pool is not None and pool.is_busy)


def _engine(answers: Answers, time: VirtualTime | None, model: str | os.PathLike[str], options: Any) -> ScriptedEngine:
    config = EngineConfig.from_arguments(model, topology="inline", **options)
    return ScriptedEngine(config, answers, RealTime() if time is None else time)


class ScriptedAsyncLLM(AsyncLLM):
    """An AsyncLLM whose model is a script.

    Arguments:
        answers: a mapping from the text of a prompt, a list in the order of arrival, or a function of the prompt; each answer
            is a text or a `ScriptedAnswer`.
        time: what latencies are counted in; None: real time.
        model: whose tokenizer and limits are used; default: the bundled model.
        options: further arguments of AsyncLLM, such as max_num_seqs; topology is "inline".

    Raises:
        ConfigError, UnknownArgumentError, ModelError: as AsyncLLM.
    """

    def __init__(
        self,
        answers: Answers,
        *,
        time: VirtualTime | None = None,
        model: str | os.PathLike[str] = "storyteller",
        **options: Any,
    ) -> None:
        self._scripted = _engine(answers, time, model, options)
        self._adopt(self._scripted)

    async def unload(self, timeout: float | None = None) -> None:
        with self._scripted.waited_for():
            await super().unload(timeout)

    async def __aexit__(self, *exception: object) -> None:
        with self._scripted.waited_for():
            await super().__aexit__(*exception)


class ScriptedLLM(LLM):
    """An LLM whose model is a script. Arguments and errors: as ScriptedAsyncLLM."""

    def __init__(self, answers: Answers, *, model: str | os.PathLike[str] = "storyteller", **options: Any) -> None:
        self._adopt(_engine(answers, None, model, options))
