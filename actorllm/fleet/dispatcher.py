"""`Dispatcher`: what an engine of several replicas calls its frontend. Routes requests, and moves them between replicas.

A request belongs to the journal of one replica's frontend. When it moves, its journal entry goes to the frontend of another
replica as it is. Output, sampling index, grammar and deadline are in it, so the stream goes on with the same tokens. What still
comes of it from the first scheduler meets no entry there and is dropped.

What was on a replica that died is adopted on trial, all of it by one other replica. The scheduler there looks for the request
that is to blame, as after a death of its own (`supervision.blame.scheduler_deaths`). A suspect leaves the replica of its trial
only when that is lost for good. What stays where a process died is suspected there. Suspects are probed in groups, and
those of a group that fails one by one. So a poison request costs at most two deaths beyond the first one, both on one replica.

Runs on the engine thread.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import anyio

from actorllm.actors.frontend import Consumer, FrontendActor, JournalEntry
from actorllm.actors.load_board import LoadBoard, ProgramLoad
from actorllm.clock import now
from actorllm.errors import ActorLLMError, EngineDeadError, EngineError, EngineShutdownError, ReplicaLostError
from actorllm.fleet.merging import by_this_clock, merged
from actorllm.fleet.pacing import room
from actorllm.fleet.replica import RoutedReplica
from actorllm.fleet.views import (
    add_journal,
    journal_of,
    load_of,
    mailbox_of,
    moving_routable_of,
    pin_of,
    role_of,
    routable_of,
    views_of,
)
from actorllm.messages import I64, KvOffer, Submit
from actorllm.scheduling.role_router import RoleRouter
from actorllm.scheduling.router import VIEW_AGE_S, ReplicaView, Routable, Router, Seconds, number_of
from actorllm.types.kv_transfer import answer_of
from actorllm.types.weight_version import WeightSource

logger = logging.getLogger(__name__)

TRIAL_S = 10.0
"""How long after a death the replica that took its suspects takes those of other deaths."""
SUSPECTS_PACED_S = 5.0
"""How long a program that has joined may hold suspects back. A scheduler believes its suspicions for `SUSPECTS_EXPECTED_S`."""


class Dispatcher:
    """See the module docstring.

    replicas: by number, those that are stopped for good left out; changed by the fleet. last_rid: as of FrontendActor. board:
    where programs show each other what they have on each replica. program: the number of this one there; 0: the owner.
    return_lease: hears of leases on KV that nothing will copy.
    """

    def __init__(
        self,
        replicas: Mapping[int, RoutedReplica],
        router: Router,
        last_rid: int = 0,
        board: LoadBoard | None = None,
        program: int = 0,
        return_lease: Callable[[I64], None] | None = None,
        num_ranks: int = 1,
    ) -> None:
        self._return_lease = return_lease
        self._num_ranks = num_ranks
        self._replicas = replicas
        self.router = router
        self.last_rid = last_rid
        self._error: BaseException | None = None
        self._views: list[ReplicaView] = []
        self._views_at = -math.inf
        self._board = board
        self._program = program
        self._others: list[ProgramLoad] = []
        self._published_at = -math.inf
        self._num_published = 0
        self.on_arrival: Callable[[Routable, Sequence[ReplicaView]], None] | None = None
        """Hears of each request that is routed, and of the replicas that it may go to."""
        self._trial_replica: int | None = None
        self._trial_until = -math.inf
        self.waits = False
        """No replica runs, and machines that are away may come back: requests wait for these."""
        self.num_moved = 0
        """Sequences that went to another replica."""
        self.num_routed: dict[int, int] = {}
        """Requests that each replica was sent, by number."""
        self.num_handed_off = 0
        """Sequences that went on at another replica than the one which had computed their prompt."""

    def share(self, board: LoadBoard, program: int) -> None:
        """From here on other programs see what this one has on each replica, and it sees what they have."""
        self._board, self._program = board, program

    @property
    def num_open(self) -> int:
        """Sequences that have not ended."""
        return sum(replica.frontend.num_open for replica in list(self._replicas.values()))

    @property
    def is_paused(self) -> bool:
        """Generation is, or will be when what was asked for arrives."""
        return self.pause_mode is not None

    @property
    def pause_mode(self) -> str | None:
        """Of the pause that goes on, which a replica that starts now has to know; None: there is none."""
        modes = (replica.frontend.pause_mode for replica in self._replicas.values())
        return next((mode for mode in modes if mode is not None), None)

    def pause_mode_beside(self, number: int, known: str | None) -> str | None:
        """What the scheduler of a replica is told that begins a life: whether the others are paused. known: if there are none."""
        others = [
            one
            for one in self._replicas.values()
            if one.number != number and not (one.is_removed or one.is_lost or one.state in ("new", "starting"))
        ]
        modes = (one.frontend.pause_mode for one in others)
        return next((mode for mode in modes if mode is not None), None) if others else known

    def next_rid(self) -> int:
        """Unique among all replicas; a 32-bit integer on the wire."""
        while True:
            self.last_rid = self.last_rid % (2**31 - 1) + 1
            if self._owner_of(self.last_rid) is None:
                return self.last_rid

    # What the engine asks of a frontend

    def submit(self, make_submit: Callable[[int], Submit], consumer: Consumer, on_rid: Callable[[int], None]) -> None:
        """As FrontendActor.submit, of the replica that the router names."""
        replica, make = self._routed(make_submit, consumer, 1)
        if replica is not None:
            replica.frontend.submit(make, consumer, on_rid)
            self._show_sent(replica)

    def submit_several(
        self, make_submit: Callable[[int], Submit], consumers: Sequence[Consumer], on_rid: Callable[[int], None]
    ) -> None:
        """As FrontendActor.submit_several: the sequences of a request are on one replica."""
        replica, make = self._routed(make_submit, consumers[0], len(consumers))
        if replica is not None:
            replica.frontend.submit_several(make, consumers, on_rid)
            self._show_sent(replica)

    def abort(self, rid: int) -> None:
        """As FrontendActor.abort."""
        owner = self._owner_of(rid)
        if owner is not None:
            owner.frontend.abort(rid)

    def abort_all(self) -> None:
        """End every request."""
        for replica in self._replicas.values():
            replica.frontend.abort_all()

    def fail_all(self, error: BaseException) -> None:
        """The engine is gone: every request that has not ended, and every later one, ends with this error."""
        if self._error is None:
            self._error = error
        for replica in self._replicas.values():
            replica.frontend.end_all(error)

    def start_soon(self, function: Callable[..., Coroutine[Any, Any, None]], *args: Any) -> None:
        """As FrontendActor.start_soon, of a replica that runs; if there is none, nothing is done."""
        for replica in self._replicas.values():
            if replica.frontend.is_running:
                replica.frontend.start_soon(function, *args)
                return

    async def wait_until_idle(self) -> bool:
        """Wait until every request has ended, wherever it moves. False: they ended because the engine did."""
        while busy := next((r for r in self._replicas.values() if r.frontend.num_open), None):
            await busy.frontend.wait_until_idle()
        return self._error is None

    @property
    def weights(self) -> WeightSource:
        """The version that the first replica computes with which is there; another one may be on its way to it."""
        known = [one for one in self._replicas.values() if not one.is_lost] or list(self._replicas.values())
        return known[0].frontend.weights

    async def ask_scheduler(self, verb: str, **arguments: Any) -> Any:
        """What the schedulers of all replicas that run answer, as one answer (`merging`). Raises what one of them raised.

        EngineError: none runs now, and the engine goes on.
        """
        there = [one for one in self._replicas.values() if not one.is_removed]  # one that ends is not concerned
        beginning = [one for one in there if one.is_lost or one.state in ("new", "starting")]
        asked = [one for one in there if one not in beginning]
        changes_pause = verb in ("pause_generation", "resume_generation", "sleep")
        if changes_pause and verb != "sleep":
            asked += [one for one in beginning if not one.is_lost and one.frontend.has_link]
        if not asked:
            for_now = EngineError("no replica of the engine runs now; call again in a moment")
            raise self._error or (for_now if there else EngineShutdownError("the engine is not running"))
        if changes_pause:
            # What begins a life hears of it before it has a request, or was told already what has held until now.
            for replica in beginning if verb == "sleep" else there:
                replica.frontend.assume_paused(arguments.get("mode"))
        answers: dict[int, Any] = {}
        failures: dict[int, Exception] = {}
        gone: set[int] = set()

        async def ask(replica: RoutedReplica) -> None:
            own = dict(arguments)
            if verb == "start_profile":
                own["prefix"] = f"{arguments['prefix']}replica{replica.number}_"
            elif verb == "live":
                own["after"] = arguments["after"].get(replica.number, 0)
            try:
                answer = await replica.frontend.ask_scheduler(verb, **own)
                answers[replica.number] = by_this_clock(verb, answer, replica.clock_offset_s)
            except Exception as error:  # of one replica: the caller is told below, when all have answered
                failures[replica.number] = error
                if replica.is_lost or replica.is_removed or replica in beginning:
                    gone.add(replica.number)

        async with anyio.create_task_group() as group:
            for replica in asked:
                group.start_soon(ask, replica)
        told = [failures[number] for number in sorted(failures) if number not in gone or not answers]
        if told:  # of a replica that was lost or stopped meanwhile the others speak, if there are any
            raise told[0]
        answer = merged(verb, dict(sorted(answers.items())))
        if (
            verb == "wake_up" and not answer
        ):  # generation goes on, also where nothing slept but was paused with the others
            for replica in beginning:
                replica.frontend.assume_paused(None)
                if not replica.is_lost and replica.frontend.has_link:
                    with contextlib.suppress(ActorLLMError):  # it was lost meanwhile
                        await replica.frontend.ask_scheduler("resume_generation")
        return answer

    def statistics(self) -> dict[str, Any]:
        """As FrontendActor.statistics, added up, with what is the fleet's."""
        known = list(self._replicas.values())
        found = {one.number: one.frontend.statistics() for one in known if one.frontend.has_runner}
        return {
            **(merged("statistics of frontends", found) or {}),  # a lost one that is made anew has none yet
            "num_moved": self.num_moved,
            "num_routed": dict(self.num_routed),
            "num_handed_off": self.num_handed_off,
        }

    # Routing

    def _owner_of(self, rid: int) -> RoutedReplica | None:
        for replica in self._replicas.values():
            if replica.frontend.has(rid):
                return replica
        return None

    def _routed(
        self, make_submit: Callable[[int], Submit], consumer: Consumer, num_sequences: int
    ) -> tuple[RoutedReplica | None, Callable[[int], Submit]]:
        """Where a request goes, and how its message is made there. None: nowhere, and its consumer has been told."""
        pin = pin_of(consumer)
        if pin is not None:
            if pin not in self._replicas or self._replicas[pin].is_removed:
                self._refuse(consumer, ReplicaLostError(f"data_parallel_rank={pin}: this replica was stopped"))
                return None, make_submit
            return self._note(self._replicas[pin]), make_submit
        candidates = self._candidates()
        if not candidates:
            self._refuse(consumer, self._error or EngineDeadError("no replica of the engine runs"))
            return None, make_submit
        if len(candidates) == 1 and self.on_arrival is None:
            return self._note(candidates[0]), make_submit
        try:
            submit = make_submit(0)
        except Exception:  # of this request: the frontend makes it again, and tells its consumer
            return self._note(candidates[0]), make_submit
        request = routable_of(submit, num_sequences)
        if self.on_arrival is not None:
            self.on_arrival(request, self._views_of(candidates))
        fit = self._fit(submit, candidates)
        number = self._choose(request, fit, goes_on=submit.kv_lease.size > 0)
        hands_off = submit.hands_off or (submit.max_tokens > 1 and self._is_handed_off(number, candidates))
        return self._note(self._replicas[number]), lambda rid: replace(submit, rid=rid, hands_off=hands_off)

    def _candidates(self, without: RoutedReplica | None = None) -> list[RoutedReplica]:
        """Replicas that a request may go to; if none is ready, those that will be, or may be."""
        others = [replica for replica in self._replicas.values() if replica is not without]
        if without is not None:  # what moves is to decode, where there is a replica for that
            decoding = [one for one in others if role_of(one) != "prefill"]
            others = decoding if any(one.takes_requests and one.frontend.is_linked for one in decoding) else others
        ready = [replica for replica in others if replica.takes_requests]
        return (
            [replica for replica in ready if replica.frontend.is_linked]
            or ready
            or [replica for replica in others if replica.state in ("new", "starting")]
            or [one for one in others if not one.is_removed and (self.waits or (one.is_leaving and not one.is_lost))]
        )

    @staticmethod
    def _fit(submit: Submit, candidates: list[RoutedReplica]) -> list[RoutedReplica]:
        """Where a gateway wants a request: its prompt alone is computed, or its KV is copied. Of other requests, anywhere."""
        if submit.hands_off:
            fit = [one for one in candidates if role_of(one) == "prefill"]
        elif submit.kv_lease.size:
            fit = [one for one in candidates if role_of(one) != "prefill"]
        else:
            return candidates
        return fit or candidates

    @staticmethod
    def _is_handed_off(number: int, candidates: Sequence[RoutedReplica]) -> bool:
        """Whether a request that begins at this replica is to go on at one of another role."""
        roles = {one.number: role_of(one) for one in candidates}
        return roles[number] == "prefill" and any(role != "prefill" for role in roles.values())

    def _choose(self, request: Routable, candidates: Sequence[RoutedReplica], *, goes_on: bool = False) -> int:
        """goes_on: another replica has computed its prompt, and these may copy the KV."""
        views = self._views_of(candidates)
        offered = tuple(view for view in views if not view.is_on_trial) or tuple(views)
        route = self.router.route_on if goes_on and isinstance(self.router, RoleRouter) else self.router.route
        try:
            number = number_of(route(request, offered), offered)
        except Exception:  # of the application's own code: the request goes to the least busy one
            logger.exception("the router failed; the request goes where the fewest are")
            number = min(offered, key=lambda view: view.load).number
        view = next(view for view in views if view.number == number)
        view.add(request)
        return number

    def views(self) -> list[ReplicaView]:
        """Of the replicas that take requests now, with what all programs have there."""
        ready = [one for one in self._replicas.values() if one.takes_requests and one.frontend.is_linked]
        return self._views_of(ready)

    def _views_of(self, candidates: Sequence[RoutedReplica]) -> list[ReplicaView]:
        """Those of a moment ago, which count what was sent since: a burst does not look at every journal for each request."""
        at = now()
        is_old = at - self._views_at > VIEW_AGE_S or len(candidates) != len(self._views)
        if is_old or {view.number for view in self._views} != {replica.number for replica in candidates}:
            self._views, self._views_at, self._others = views_of(candidates), at, []
        if self._board is not None and self._board.has_others:
            before, self._others = self._others, self._board.journals_of_others(self._program)
            for view in self._views:
                if before:
                    add_journal(view, before[view.number], -1)
                add_journal(view, self._others[view.number])
        return self._views

    def publish(self) -> None:
        """Show other programs what this one has on each replica, when that has changed. Called with each batch of outputs."""
        if self._board is None or not self._board.has_others:
            return
        num_open, at = self.num_open, now()
        if num_open == self._num_published and at - self._published_at < VIEW_AGE_S:
            return
        self._num_published, self._published_at = num_open, at
        for replica in self._replicas.values():
            self._board.write_journal(self._program, replica.number, journal_of(replica))

    def num_pinned(self, number: int) -> int:
        """Sequences of all programs that may go to this replica only."""
        found = journal_of(self._replicas[number]).num_pinned
        if self._board is not None and self._board.has_others:
            found += self._board.journals_of_others(self._program)[number].num_pinned
        return found

    def _show_sent(self, replica: RoutedReplica) -> None:
        """What was just sent counts for the routers of other programs, pinned requests as well."""
        if self._board is not None and self._board.has_others:
            self._board.write_journal(self._program, replica.number, journal_of(replica))

    def _note(self, replica: RoutedReplica) -> RoutedReplica:
        self.num_routed[replica.number] = self.num_routed.get(replica.number, 0) + 1
        return replica

    @staticmethod
    def _refuse(consumer: Consumer, error: BaseException) -> None:
        consumer.fail(error)
        if consumer.host is not None:
            consumer.host.call_soon_threadsafe(consumer.wake)

    # Moves

    async def pause_as(self, frontend: FrontendActor) -> None:
        """Pause the replicas if that one is paused, whose place they are about to take."""
        while self.is_paused != frontend.is_paused:
            if frontend.is_paused:
                mode = "wait" if frontend.pause_mode == "wait" else "keep"
                await self.ask_scheduler("pause_generation", mode=mode, clear_cache=False, is_restored=True)
            else:
                await self.ask_scheduler("resume_generation")

    def take_over(self, frontend: FrontendActor) -> None:
        """What the only frontend of the engine had goes on here. Its scheduler lives, and is told to end it."""
        self.last_rid = frontend.last_rid
        entries = frontend.surrender()
        pinned = {rid: entry for rid, entry in entries.items() if pin_of(entry.consumer) is not None}
        rest = {rid: entry for rid, entry in entries.items() if rid not in pinned}
        first = self._replicas[0]
        if rest and not self._candidates(first):
            pinned, rest = entries, {}
        first.frontend.adopt(pinned, None)  # which it begins with
        self._rehome(first, rest, None, is_trial=any(entry.record.num_deaths for entry in rest.values()))

    def hand_off(self, number: int, offer: KvOffer) -> None:
        """The prompt of a request is computed at this replica: another one goes on with it, and copies the KV.

        If there is none now, or if the request may be what schedulers died of, it stays, and its lease is over.
        """
        if not self._hand_off(number, offer) and self._return_lease is not None:
            self._return_lease(offer.lease)

    def _hand_off(self, number: int, offer: KvOffer) -> bool:
        """Whether something will copy what this replica has leased."""
        source = self._replicas.get(number)
        entry = None if source is None else source.frontend.journal().get(offer.rid)
        if source is None or entry is None or entry.is_aborted:
            return False
        if entry.submit.max_tokens == 1:  # a gateway has another request go on with it
            mailbox = mailbox_of(entry.consumer)
            if mailbox is not None:
                mailbox.kv_transfer = answer_of(offer.lease.tolist(), offer.blocks.tolist(), self._num_ranks)
            return mailbox is not None
        if entry.record.num_deaths or self.is_on_trial(source):
            return False
        targets = [
            one
            for one in self._others_than(source)
            if role_of(one) != "prefill" and one.takes_requests and one.frontend.is_linked and not self.is_on_trial(one)
        ]
        if not targets:
            return False
        record = entry.record  # of all sequences of the request
        entries = source.frontend.surrender(lambda one: one.record is record and not one.is_aborted)
        self._views_at = -math.inf  # the journals change
        target = self._replicas[self._choose(routable_of(entry.submit, len(entries)), targets, goes_on=True)]
        for one in entries.values():
            one.submit = replace(one.submit, hands_off=False, kv_lease=offer.lease)
            one.num_cached = offer.num_cached
            one.consumer.note_cached(offer.num_cached)
        target.frontend.adopt_handed_off(entries, partial(self._note_hand_off, offer.lease.item(3)))
        self.num_handed_off += len(entries)
        self._show_sent(source)
        self._show_sent(target)
        return True

    def _note_hand_off(self, num_blocks: int, seconds: float) -> None:
        if isinstance(self.router, RoleRouter):
            self.router.hand_off.observe(num_blocks, seconds)

    def can_move(self, source: RoutedReplica) -> bool:
        """Whether there is a replica that could go on with what this one has."""
        return any(replica.takes_requests and replica.frontend.is_linked for replica in self._others_than(source))

    def _others_than(self, source: RoutedReplica) -> Iterable[RoutedReplica]:
        return (replica for replica in self._replicas.values() if replica is not source)

    def move(self, source: RoutedReplica, lost_at: float | None) -> int:
        """Move what a replica has to others; what is pinned to it, and what is on trial there, stays. Returns how many moved.

        lost_at: when a process of it died, in monotonic seconds: what moves is on trial then. None: nothing died.
        """
        entries = source.frontend.surrender(
            lambda entry: not entry.record.num_deaths and pin_of(entry.consumer) != source.number
        )
        self._rehome(source, entries, lost_at, is_trial=lost_at is not None)
        return len(entries)

    def move_lost(
        self,
        source: RoutedReplica,
        entries: dict[int, JournalEntry],
        lost_at: float,
        error: BaseException,
        *,
        has_run: bool = True,
    ) -> None:
        """The journal of a replica that is lost: what is pinned waits for its next life, all else goes elsewhere or fails.

        While the engine waits for machines that are away, all of it waits for the next life, unless another replica runs. has_run:
        one that did not has lost nothing, and nothing is suspected.
        """
        pinned = {rid: entry for rid, entry in entries.items() if pin_of(entry.consumer) == source.number}
        for rid in pinned:
            del entries[rid]
        source.frontend.adopt(pinned, lost_at)
        if self.waits and not any(one.takes_requests for one in self._others_than(source)):
            for entry in entries.values() if has_run else ():
                entry.record.suspect()
            source.frontend.adopt(entries, lost_at)
        elif entries and not self._candidates(source):
            source.frontend.fail(entries, error)
            self._show_sent(source)
        else:
            self._rehome(source, entries, lost_at, is_trial=True)

    def end_wait(self, back: RoutedReplica) -> None:
        """This replica runs, and the engine waits for none any more: what the others had goes on here."""
        if not self.waits or not back.takes_requests:
            return
        self.waits = False
        for source in self._others_than(back):
            if not source.frontend.is_linked:
                # What came meanwhile was in no step, and nothing can have died of it.
                came = source.frontend.surrender(
                    lambda entry: not entry.record.num_deaths and pin_of(entry.consumer) is None
                )
                self._rehome(source, came, None, is_trial=False)
                entries = source.frontend.surrender()
                self.move_lost(source, entries, now(), EngineDeadError("no other replica of the engine runs"))

    def give_up_wait(self, error: BaseException) -> None:
        """None came back in time: what all of them had fails, or goes on elsewhere."""
        self.waits = False
        for source in self._replicas.values():
            if source.is_lost:
                self.move_lost(source, source.frontend.surrender(), now(), error)

    def forget(self, number: int) -> None:
        """The KV of a replica is gone; routers that remember what they sent there are told."""
        forget = getattr(self.router, "forget", None)
        if forget is not None:
            forget(number)

    def move_rest(self, source: RoutedReplica) -> None:
        """What is left of a replica that does not come back: what is pinned fails, and what is on trial goes elsewhere."""
        left = source.frontend.surrender()
        pinned = {rid: entry for rid, entry in left.items() if pin_of(entry.consumer) == source.number}
        reason = f"data_parallel_rank={source.number}: this replica is lost for good; leave data_parallel_rank out to be moved"
        source.frontend.fail(pinned, ReplicaLostError(reason))
        self._show_sent(source)
        rest = {rid: entry for rid, entry in left.items() if rid not in pinned}
        if rest and not self._candidates(source):
            source.frontend.fail(rest, EngineDeadError("no other replica of the engine runs"))
            self._show_sent(source)
        else:
            self._rehome(source, rest, None, is_trial=any(entry.record.num_deaths for entry in rest.values()))

    def choose_trial(self, source: RoutedReplica) -> int | None:
        """The replica that takes the suspects of this one, from here on; None: there is no other one."""
        trial = self._trying(source) or self._trial_of(source)
        self.set_trial(None if trial is None else trial.number)
        return self._trial_replica

    def set_trial(self, number: int | None) -> None:
        """Suspects of all programs go to this replica for now, whether they have come there yet or not; None: anywhere."""
        self._trial_replica, self._trial_until = number, now() + TRIAL_S

    def is_on_trial(self, replica: RoutedReplica) -> bool:
        """What it dies of is among the suspects there, which this program or another one has sent."""
        return self._is_named(replica) or replica.frontend.has_suspects

    def _is_named(self, replica: RoutedReplica) -> bool:
        return replica.number == self._trial_replica and now() < self._trial_until

    def _trial_of(self, source: RoutedReplica) -> RoutedReplica | None:
        """The one whose trial goes on, though it recovers just now; else one that can begin."""
        going_on = self._named_trial(source) or self._trying(source)
        if going_on is not None:
            return going_on
        candidates = self._candidates(source)
        on_trial = [replica for replica in candidates if replica.frontend.has_suspects]
        return min(on_trial or candidates, key=lambda replica: replica.frontend.num_open, default=None)

    def _trying(self, source: RoutedReplica) -> RoutedReplica | None:
        """Another one that tries what may go anywhere, however long its own restart takes; what is pinned is tried where it is."""
        trying = [one for one in self._others_than(source) if one.takes_requests and self._tries(one)]
        return min(trying, key=lambda one: one.frontend.num_open, default=None)

    @staticmethod
    def _tries(replica: RoutedReplica) -> bool:
        entries = replica.frontend.journal().values()
        return any(entry.record.num_deaths and pin_of(entry.consumer) is None for entry in entries)

    def _named_trial(self, source: RoutedReplica) -> RoutedReplica | None:
        """Another one whose trial goes on."""
        if self._trial_replica is None or now() >= self._trial_until:
            return None
        named = self._replicas.get(self._trial_replica)
        return named if named is not None and named is not source and named.takes_requests else None

    def trial_after_fall(self, source: RoutedReplica, restart_s: float) -> int:
        """Where requests are tried that a process of this replica may have died of: here, or where they move.

        A trial that goes on is the trial of all replicas. Else they stay if the restart is sooner than computing elsewhere.

        restart_s: how long it may take until its processes run again.
        """
        trial = None if self._tries(source) else self._trying(source)
        if trial is None and not self.is_on_trial(source):
            trial = self._trial_of(source)
        if trial is not None and not self.is_on_trial(trial):
            is_sooner = self.can_move(source) and self._expected_move_s(source) < restart_s
            trial = trial if is_sooner else None
        trial = trial or source
        self.set_trial(trial.number)
        return trial.number

    def move_to_trial(self, source: RoutedReplica, group: str, lost_at: float) -> None:
        """The streams of a replica whose group of processes died at lost_at go on where its suspects are tried.

        What stays there is suspected as well: it is pinned, or this is the replica of the trial.
        """
        if source.is_lost:
            return
        # Suspects that are pinned to it are no reason for others to stay.
        is_there = self._is_named(source) or self._tries(source)
        is_there = is_there or not (self.can_move(source) or self._named_trial(source) is not None)
        num_moved = 0 if is_there else self.move(source, lost_at)
        for entry in source.frontend.journal().values():
            entry.record.suspect()
        if num_moved:
            logger.warning(
                "replica %d lost its %s: %d sequences moved", source.number, group, num_moved, extra={"event": "move"}
            )

    def _expected_move_s(self, source: RoutedReplica) -> float:
        """Until the least busy of the others has computed what this one had, behind what waits there. 0.0: nothing is known."""
        tokens = sum(entry.submit.prompt.size + len(entry.emitted) for entry in source.frontend.journal().values())
        others = [one for one in self._others_than(source) if one.takes_requests]
        waits = [Seconds.costs_s(view, tokens)[0] for view in views_of(others) if view.step_seconds is not None]
        return min(waits, default=0.0)

    def _rehome(
        self, source: RoutedReplica, entries: dict[int, JournalEntry], lost_at: float | None, is_trial: bool
    ) -> None:
        if not entries:
            return
        self._views_at = -math.inf  # the journals change
        candidates = self._candidates(source)
        by_target: dict[int, dict[int, JournalEntry]] = {}
        if is_trial:
            trial = self._trial_of(source)
            assert trial is not None, "callers have asked for candidates"
            by_target[trial.number] = entries
            for entry in entries.values():
                entry.record.suspect()
        else:
            requests: dict[int, dict[int, JournalEntry]] = {}  # the sequences of one share a record, and go together
            for rid, entry in entries.items():
                requests.setdefault(id(entry.record), {})[rid] = entry
            self._views_of(candidates)
            self._views_at = math.inf  # they alone know where the first of these go, until the journals have them
            try:
                for sequences in requests.values():
                    number = self._choose(moving_routable_of([*sequences.values()]), candidates)
                    by_target.setdefault(number, {}).update(sequences)
            finally:
                self._views_at = -math.inf
        for number, part in by_target.items():
            target = self._replicas[number]
            until = now() + SUSPECTS_PACED_S if is_trial and self._program else math.inf
            target.frontend.adopt_paced(part, partial(self._room_at, target), lost_at, until)
            self._show_sent(target)
        self._show_sent(source)
        self.num_moved += len(entries)
        logger.warning(
            "%d sequences of replica %d go on elsewhere: %s",
            len(entries),
            source.number,
            ", ".join(f"{len(part)} on replica {number}" for number, part in by_target.items()),
        )

    @staticmethod
    def _room_at(target: RoutedReplica) -> float:
        """How many tokens of what has moved there may be computed at a time."""
        frontend = target.frontend
        arriving = frontend.arriving
        others = [entry for rid, entry in frontend.journal().items() if rid not in arriving]
        (view,) = views_of([target])
        add_journal(view, load_of(frontend.held, target.number), -1)  # no step of now has them
        return room(view, others, now())
