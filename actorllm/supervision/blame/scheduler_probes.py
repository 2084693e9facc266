"""`SchedulerProbes`: the search of `scheduler_deaths`, with the clock and the frontends of a scheduler actor.

Decides when the search begins and when the next probe group is taken on. Ends held requests that need not wait any more.
Names the group to every frontend before anything is done with it. Owned by SchedulerActor, which takes on the requests
that it is given (`next_requests`). Costs nothing while nothing dies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, Generic, TypeVar

import numpy as np

from actorllm.clock import now
from actorllm.messages import DEADLINE_PASSED, I32, Begun, ProbeGroup, Submit
from actorllm.scheduling.events import End
from actorllm.scheduling.ledger import StepRecord
from actorllm.scheduling.pause import PauseState
from actorllm.scheduling.scheduler import Scheduler
from actorllm.scheduling.sequence import Key, RequestKey, Sequence, State
from actorllm.supervision.blame.scheduler_deaths import SchedulerBisection
from actorllm.types.outputs import FinishReason

Outlet = TypeVar("Outlet")
"""What leads to one frontend; it is only handed to `send`."""

JOURNAL_PATIENCE_S = 1.0
"""How long a search waits for the journals of all frontends before it begins with what is there."""
SHORT_PATIENCE_S = 0.25
"""As long as there is no suspect: how long a program that is stopped may hold up the others after a death."""


class SchedulerProbes(SchedulerBisection, Generic[Outlet]):
    """See the module docstring."""

    def __init__(
        self,
        scheduler: Scheduler,
        outlets: Mapping[int, Outlet],
        send: Callable[[Outlet, ProbeGroup | Begun], None],
        report_progress: Callable[[], None],
        check_itself: Callable[[], None],
        drop_output: Callable[[Key], int],
        *,
        probes_alone: bool = False,
    ) -> None:
        """outlets: all frontends there are, by number; send: to one of them, which may be lost by it. check_itself: dies if
        this process dies of everything. drop_output: forgets what a request holds back of its output, and returns how many
        tokens. probes_alone: as of SchedulerBisection."""
        super().__init__(lambda key, message: scheduler.release(key[0], message), probes_alone=probes_alone)
        self._scheduler = scheduler
        self._outlets = outlets
        self._send = send
        self._report_progress = report_progress
        self._check_itself = check_itself
        self._drop_output = drop_output
        self._isolated: list[tuple[Key, Submit]] = []
        """The sequences of the request that was probed alone last."""
        self._left: dict[Key, RequestKey] = {}
        """Members of groups of the search that is over, which had not had a token by then."""
        self._had_to_wait = False
        """For the end of a search for the request that the workers die of."""
        self._is_checked = False
        self.resubmitting: set[int] = set()
        """Frontends of the scheduler before that have not said that they have submitted everything again."""
        self.expected_until = 0.0
        """Until when any frontend may bring suspects, for another replica has died (`expect_suspects`)."""
        self.begins_at = 0.0
        """When the search begins even if some frontends have not submitted everything again."""
        self._first_step = 0
        """The first that was planned after the last group was taken on."""
        self.not_begun: set[Key] = set()
        """Requests that were submitted again and have not been in a step of this scheduler."""

    # Frontends

    def on_frontend(self, number: int, generation: int) -> None:
        """A frontend is linked to its generation-th scheduler."""
        if generation > 1:
            self.resubmitting.add(number)
        if self.is_on:
            self._send(self._outlets[number], ProbeGroup(size=self._told_size))
        elif generation > (1 if self._probes_alone else 2) and self._scheduler.is_idle:
            self._begin_within(
                SHORT_PATIENCE_S
            )  # from some death on suspects are probed alone, whichever frontend has them

    def drop_frontend(self, frontend: int) -> None:
        self.resubmitting.discard(frontend)
        super().drop_frontend(frontend)
        self.not_begun = {key for key in self.not_begun if key[0] != frontend}

    # Requests

    def with_trusted_deaths(self, frontend: int, message: Submit, is_own: bool) -> Submit:
        """A request with deaths on its record, as far as they count here; with the first suspect a search begins.

        is_own: its frontend is the owner's, which may have it from another replica that died.
        """
        may_bring = is_own or frontend in self.resubmitting or now() < self.expected_until
        if not may_bring:  # it has nothing to submit again, and no scheduler died of it
            return replace(message, num_deaths=0)
        if not self.has_suspects:
            self._begin_within(JOURNAL_PATIENCE_S)
        return message

    def hold_back(self, key: Key, message: Submit) -> list[End]:
        """A request that has to wait for the end of the search, or for its turn in it; or its end: too many wait."""
        if key in self:
            return []
        refusal = self._scheduler.hold(key[0], message)
        if refusal is not None:
            return [end_of_unknown(key, message, "error", refusal.message, refusal.details)]
        self.hold(key, message)
        return []

    def abort(self, keys: Iterable[Key]) -> list[End]:
        """Of those of these requests that are held."""
        return [end_of_unknown(*held, "abort") for held in self.take(keys)]

    def abort_all(self) -> list[End]:
        return [end_of_unknown(key, message, "abort") for key, message in self.take_all()]

    def expire(self, at: float) -> list[End]:
        return [end_of_unknown(*held, "abort", stop_reason=DEADLINE_PASSED) for held in self.take_due(at)]

    @property
    def wakes_at(self) -> float:
        """When there is something to do even if nothing arrives."""
        is_waiting = self.resubmitting and now() < self.begins_at
        return min(self.expires_at, self.begins_at) if is_waiting else self.expires_at

    # The search

    def _begin_within(self, patience_s: float) -> None:
        """Hold back everything that comes, until all journals are there or patience is over."""
        was_on = self.is_on
        self.begin()
        self.begins_at = now() + patience_s
        if not was_on:
            found = ((key, self._scheduler.sequence(key)) for key in self._left)
            waiting = {key for key, sequence in found if sequence is not None and sequence.slot < 0}
            self._pending = {key: one for key, one in self._left.items() if key in waiting}
            self._left = {}
            self._tell(self._pending)

    def next_requests(self) -> list[tuple[Key, Submit]]:
        """What to take on now: the next probe group when nothing is to be expected of the last one, at the end the others.

        To be asked again until there is none.
        """
        if not self.is_on or not self._may_probe_next():
            return []
        is_pausing = self._scheduler.pause_state is PauseState.NOTHING_NEW
        if self.isolates_next(is_pausing=is_pausing) and not self._is_alone_again():
            return []
        if not self._is_checked and self.has_suspects:
            self._is_checked = True
            self._check_itself()
        self._pending = {key: one for key, one in self._pending.items() if self._scheduler.sequence(key) is not None}
        group = self.next_group(is_pausing=is_pausing)
        if self.is_on:
            if not group:
                return []
            if self.is_narrowing or self._is_alone:
                self._report_progress()
        self._isolated = group if self.is_isolated else []
        self._first_step = self._scheduler.ledger.next_step
        self._tell(self._pending)
        if not self.is_on:
            self._left, self._pending = self._pending, {}
        return group or self.take_all()

    def _is_alone_again(self) -> bool:
        """Hold back what was probed alone and cleared, so that the next one is alone as well. Whether no step has it."""
        for key, message in self._isolated:
            sequence = self._scheduler.sequence(key)
            if sequence is not None:
                output = self._scheduler.output_of(sequence)
                self._scheduler.abort([key], now())
                self.not_begun.discard(key)
                num_sent = output.size - self._drop_output(key)
                self._scheduler.hold(key[0], message)
                self.hold(key, _cleared(message, output[:num_sent], sequence.first_token))
        self._isolated = []
        return not self._scheduler.is_idle or not self._scheduler.num_in_flight

    def _may_probe_next(self) -> bool:
        if self._scheduler.pause_state is PauseState.NOTHING:
            return False
        if self.resubmitting and now() < self.begins_at:
            return False
        if self._probes_alone and self._scheduler.is_probing_workers:
            self._had_to_wait = True
            return False  # the next suspect would be beside the one that workers die of
        if self._had_to_wait:  # as did members of the group, which have yet to be in a step
            self._had_to_wait = False
            self.shrink_groups()
            self._first_step = self._scheduler.ledger.next_step
            self.on_delay()
        if self._is_preparing_suspect():
            self.on_delay()
            return False
        for key in self.pending:
            sequence = self._scheduler.sequence(key)
            if sequence is None or sequence.state is State.BLOCKED:
                continue  # it waits for another request
            if sequence.slot >= 0 or not self.has_stepped:
                return False
        return True

    def on_result(self, with_tokens: Iterable[Key]) -> None:
        """The result of the oldest step in flight was applied, and these had tokens."""
        self.on_step(with_tokens, is_older=self._scheduler.ledger.last_done < self._first_step)

    def is_stuck(self, has_workers: bool) -> bool:
        """Whether no member of the group can run now."""
        is_waiting = has_workers and not self._scheduler.num_in_flight and not self.has_stepped
        return is_waiting and not self._is_preparing_suspect()

    def _is_preparing_suspect(self) -> bool:
        """Whether a member of the group waits for its grammar, its adapter or its KV, of which a process may die as well."""
        members = (self._scheduler.sequence(key) for key in self.pending)
        return any(
            s is not None
            and s.state is State.BLOCKED
            and (s.submit.blocked_on is None or s.submit.grammar is not None or s.submit.adapter is not None)
            for s in members
        )

    # What frontends are told

    def _tell(self, keys: Iterable[Key]) -> None:
        """Every frontend hears of the group before anything is done with it."""
        is_alone = self._is_alone
        by_frontend: dict[int, list[int]] = {number: [] for number in self._outlets}
        for number, rid in keys:
            by_frontend[number].append(rid)
        for number, rids in by_frontend.items():
            if number in self._outlets:
                members = np.array(rids, np.int32)
                group = ProbeGroup(rids=members, size=self._told_size, is_alone=is_alone)
                self._send(self._outlets[number], group)

    @property
    def _is_alone(self) -> bool:
        return self.group_size == 1 and self._scheduler.is_idle

    @property
    def _told_size(self) -> int:
        """As frontends are told: 0 when there is no search; before it begins no request runs, and it is 1."""
        return max(1, self.group_size) if self.is_on else 0

    def tell_begun(self, record: StepRecord) -> None:
        """Requests that were submitted again are in a step for the first time: should this scheduler die, they were there."""
        by_frontend: dict[int, list[int]] = {}
        for sequence, _ in record.prefills:
            if sequence.key in self.not_begun:
                self.not_begun.discard(sequence.key)
                by_frontend.setdefault(sequence.key[0], []).append(sequence.key[1])
        for number, rids in by_frontend.items():
            if number in self._outlets:
                self._send(self._outlets[number], Begun(rids=np.array(rids, np.int32)))


def _cleared(message: Submit, output: I32, first_token: float | None) -> Submit:
    """A request that goes on later, behind this output. It is suspected no more."""
    return replace(
        message,
        output=output,
        is_resumed=True,
        had_slot=True,
        first_token=first_token if output.size else message.first_token,
        num_deaths=0,
        probe_size=0,
        num_losses=0,
    )


def end_of_unknown(
    key: Key,
    message: Submit,
    reason: FinishReason,
    error: str | None = None,
    details: dict[str, Any] | None = None,
    stop_reason: str | None = None,
) -> End:
    """Of a request that the scheduler has not taken on."""
    sequence = Sequence(key, message, 0, message.prompt, 0, frozenset(), frozenset(), queued=now())
    return End(sequence, reason, stop_reason, error, details)
