"""What routers see, made of journals and messages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from actorllm.actors.frontend import Consumer, JournalEntry
from actorllm.actors.load_board import ProgramLoad
from actorllm.client.stream import Mailbox, Sibling
from actorllm.clock import now
from actorllm.fleet.replica import RoutedReplica
from actorllm.messages import Submit
from actorllm.scheduling.router import LearntSteps, ReplicaView, Routable, steps_alike
from actorllm.types.objective import SLO
from actorllm.types.roles import Role


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


def moving_routable_of(sequences: Sequence[JournalEntry]) -> Routable:
    """What is left of a request, which moves: its output is computed again as well as its prompt."""
    num_tokens = sum(entry.submit.prompt.size + len(entry.emitted) for entry in sequences)
    return replace(routable_of(sequences[0].submit, len(sequences)), num_prompt=num_tokens)


def views_of(replicas: Sequence[RoutedReplica]) -> list[ReplicaView]:
    """In the order of their numbers. Exact for this program, but for what schedulers have done since their last outputs."""
    views: list[ReplicaView] = []
    learnt: dict[int, LearntSteps] = {}
    for replica in sorted(replicas, key=lambda replica: replica.number):
        view = ReplicaView(replica.number, seen=now(), is_on_trial=replica.frontend.has_suspects, **replica.limits)
        view.find = replica.find
        if (load := replica.load()) is not None:
            view.num_free_blocks, learnt[len(views)] = load
        add_journal(view, journal_of(replica))
        views.append(view)
    for at, steps in zip(learnt, steps_alike([*learnt.values()]), strict=True):
        views[at].step_seconds = steps
    return views


def role_of(replica: RoutedReplica) -> Role | None:
    """What a replica is for; None: everything."""
    role: Role | None = replica.limits.get("role")
    return role


def journal_of(replica: RoutedReplica) -> ProgramLoad:
    """What this program has there."""
    return load_of(replica.frontend.journal().values(), replica.number)


def load_of(entries: Iterable[JournalEntry], number: int) -> ProgramLoad:
    """What these requests are to the replica of this number."""
    num_waiting = num_waiting_tokens = num_running = num_context = num_pinned = 0
    for entry in entries:
        if entry.first_token is None:
            num_waiting += 1
            num_waiting_tokens += entry.submit.prompt.size
        else:
            num_running += 1
            num_context += entry.submit.prompt.size + len(entry.emitted)
        num_pinned += pin_of(entry.consumer) == number
    return ProgramLoad(num_waiting, num_waiting_tokens, num_running, num_context, num_pinned)


def pin_of(consumer: Consumer) -> int | None:
    """The replica that the caller asked for (`data_parallel_rank`); None: any."""
    mailbox = mailbox_of(consumer)
    return None if mailbox is None else mailbox.replica


def mailbox_of(consumer: Consumer) -> Mailbox | None:
    """Where the outputs of a request are taken; None: of a consumer of another kind."""
    if isinstance(consumer, Sibling):
        consumer = consumer.mailbox
    return consumer if isinstance(consumer, Mailbox) else None


def add_journal(view: ReplicaView, journal: ProgramLoad, sign: int = 1) -> None:
    """Count what a program has there; sign -1: no more."""
    view.num_waiting += sign * journal.num_waiting
    view.num_waiting_tokens += sign * journal.num_waiting_tokens
    view.num_running += sign * journal.num_running
    view.num_context += sign * journal.num_context
