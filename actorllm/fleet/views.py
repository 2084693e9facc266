"""What routers see, made of journals and messages."""

from __future__ import annotations

from collections.abc import Sequence

from actorllm.clock import now
from actorllm.fleet.replica import Replica
from actorllm.messages import Submit
from actorllm.scheduling.router import ReplicaView, Routable
from actorllm.types.objective import SLO


def routable_of(submit: Submit, num_sequences: int) -> Routable:
    """A request as it is sent to a scheduler."""
    return Routable(
        num_prompt=submit.prompt.size,
        block_hashes=submit.block_hashes.tobytes(),
        num_sequences=num_sequences,
        max_tokens=submit.max_tokens,
        priority=submit.priority,
        slo=None if submit.slo is None else SLO.from_fields(submit.slo),
    )


def views_of(replicas: Sequence[Replica]) -> list[ReplicaView]:
    """In the order of their numbers. Exact, but for what schedulers have done since their last outputs."""
    return [_view_of(replica) for replica in sorted(replicas, key=lambda replica: replica.number)]


def _view_of(replica: Replica) -> ReplicaView:
    view = ReplicaView(replica.number, seen=now(), is_on_trial=replica.frontend.has_suspects, **replica.limits)
    if (load := replica.load()) is not None:
        view.num_free_blocks, view.step_seconds = load
    for entry in replica.frontend.journal().values():
        if entry.first_token is None:
            view.num_waiting += 1
            view.num_waiting_tokens += entry.submit.prompt.size
        else:
            view.num_running += 1
            view.num_context += entry.submit.prompt.size + len(entry.emitted)
    return view
