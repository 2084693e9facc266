"""The supervisor of one scheduler and its workers, made from a configuration. Used by `Engine` and by each replica of a fleet."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from actorllm.actors.frontend import FrontendActor
from actorllm.actors.private_file import check_private
from actorllm.actors.topology import engine_topology
from actorllm.config import EngineConfig
from actorllm.supervision.death import ActorDeath
from actorllm.supervision.renewal import MeetingPlace, without_endless_policies
from actorllm.supervision.restart import RestartLimits
from actorllm.supervision.standby import StandbyOptions
from actorllm.supervision.start_log import StartLog
from actorllm.supervision.supervisor import ChildMaker, Supervisor


def make_supervisor(
    config: EngineConfig,
    frontend: FrontendActor | ChildMaker,
    meeting_place: MeetingPlace,
    log: StartLog,
    on_death: Callable[[ActorDeath], None],
    on_fall: Callable[[str], None] | None = None,
    elsewhere: Mapping[str, ChildMaker] | None = None,
) -> Supervisor:
    """Arguments as of Supervisor.

    frontend: or what makes the child of one that is elsewhere. log: resolves the configuration, too. meeting_place: of the ranks,
    renewed with each start. elsewhere: what makes the workers of other machines, by name.
    """
    return Supervisor(
        engine_topology(config),
        config,
        resolve=log.resolve,
        on_death=on_death,
        on_fall=on_fall,
        actors={"frontend": frontend} if isinstance(frontend, FrontendActor) else {},
        elsewhere={**(elsewhere or {}), **({} if isinstance(frontend, FrontendActor) else {"frontend": frontend})},
        check=partial(check_private, config.record, "record"),
        restarts=RestartLimits() if config.on_failure == "restart" else None,
        renew=meeting_place.renewed,
        amend=without_endless_policies,
        standby=StandbyOptions.of(config),
        heartbeat_timeout_s=config.heartbeat_timeout_s,
        step_timeout_s=config.step_timeout_s,
        start_timeout_s=config.start_timeout_s,
        restart_timeout_s=config.restart_timeout_s,
        around_start=log.around,
    )
