"""`ScriptedAsyncLLM` and `ScriptedLLM`: the front doors over an engine whose worker follows a script.

Frontend, scheduler and worker run on the engine thread, under the supervisor of every engine. It starts a worker that the script
has ended again, as it does with a process.
"""

from __future__ import annotations

import os
from typing import Any

from actorllm.actors.engine_thread import AsyncioLoop
from actorllm.actors.topology import ActorSpec, LinkSpec, Topology
from actorllm.api.async_llm import AsyncLLM
from actorllm.api.llm import LLM
from actorllm.client.engine import Engine
from actorllm.config import EngineConfig
from actorllm.errors import ConfigError
from actorllm.supervision.children import Child, OwnerChild
from actorllm.supervision.death import ActorDeath
from actorllm.supervision.group import Group
from actorllm.supervision.restart import RestartLimits
from actorllm.supervision.supervisor import Supervisor
from actorllm.testing.script import Answers, Script
from actorllm.testing.scripted_worker import ScriptedEngineDeath, ScriptedWorkerActor
from actorllm.testing.virtual_time import RealTime, VirtualTime
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


class ScriptedEngine(Engine):
    """An engine with a scripted worker. time: what its steps wait for."""

    def __init__(self, config: EngineConfig, answers: Answers, time: RealTime | VirtualTime) -> None:
        if config.model.tokenizer is None:
            raise ConfigError("a scripted engine reads prompts as text; leave skip_tokenizer_init out")
        if config.model.pooler is not None:
            raise ConfigError("a scripted engine generates text and makes no vectors; leave runner='pooling' out")
        self._script = Script(answers, Tokenizer(config.model.tokenizer), config.model.eos_token_ids[0])
        self._time = time
        super().__init__(config)
        if isinstance(time, VirtualTime):
            time.is_idle = lambda: all(stream.has_ended for stream in list(self._streams.values()))

    def _new_supervisor(self) -> Supervisor:
        return ScriptedSupervisor(
            self._script,
            self._time,
            self.config,
            resolve=self._resolve,
            on_death=self._on_death,
            actors={"frontend": self._frontend, "scheduler": _scheduler()},
            restarts=RestartLimits() if self.config.on_failure == "restart" else None,
        )


def _scheduler() -> Any:
    from actorllm.actors.scheduler import SchedulerActor

    return SchedulerActor("scheduler", 0)


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
        self._adopt(_engine(answers, time, model, options))


class ScriptedLLM(LLM):
    """An LLM whose model is a script. Arguments and errors: as ScriptedAsyncLLM."""

    def __init__(self, answers: Answers, *, model: str | os.PathLike[str] = "storyteller", **options: Any) -> None:
        self._adopt(_engine(answers, None, model, options))
