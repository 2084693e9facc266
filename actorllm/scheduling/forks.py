"""`Forks`: requests that take over the prompt of a sibling instead of computing it.

A request with n > 1 is several requests with one prompt. The first, the *leader*, goes through the policy like any other. Its
siblings follow it, unseen by the policy, until the step that computes the end of its prompt. A follower that then finds a slot
and blocks becomes a *fork*. It shares the full blocks, gets a copy of the block that the prompt ends in, and samples from the
leader's logits. A follower that does not fit waits from then on like any other request. So do all of them if the leader ends
before.

Until then a policy by keys keeps slots and blocks for them from requests behind the leader (`View.fork_room`).

A preempted leader keeps its followers: it comes back, and has its prompt still to compute. Owned by the
scheduler; `followers` has which request follows which.
"""

from __future__ import annotations

import numpy as np

from actorllm.scheduling.message_budget import MessageBudget
from actorllm.scheduling.plan import PlanBuilder
from actorllm.scheduling.policy import View
from actorllm.scheduling.request_table import RequestTable
from actorllm.scheduling.sequence import Sequence, State


class Forks:
    """Makes requests follow their leader, and forks of them when the prompt they share is computed.

    spare: tokens that a row needs room for beyond the one that a step samples.
    """

    def __init__(
        self,
        view: View,
        table: RequestTable,
        builder: PlanBuilder,
        payload: MessageBudget,
        spare: int,
    ) -> None:
        self.num_forks = 0
        self._view = view
        self._table = table
        self._builder = builder
        self._message_budget = payload
        self._spare = spare

    def wait_or_follow(self, sequence: Sequence) -> None:
        """A request waits from now on: for a slot, or for a sibling."""
        leader = None if sequence.submit.fork_of is None else self.leader_of(sequence)
        if leader is None:
            self._table.wait(sequence)
        else:
            self._table.follow(sequence, leader)

    def leader_of(self, sequence: Sequence) -> Sequence | None:
        """The request that will compute the prompt of a new one as well as its own; None: the new request itself."""
        submit, table = sequence.submit, self._table
        leader = table.alive.get((sequence.key[0], submit.fork_of or 0))
        if leader is None or leader is sequence or not hasattr(self._table.policy, "may_fork"):
            return None
        if submit.had_slot:
            return None  # a pause waits for it: it follows no request that may not start
        if table.followers.has_any(sequence):
            return None  # it was blocked when they came
        if leader.state not in (State.BLOCKED, State.WAITING) and leader not in table.prefilling:
            return None  # its prompt is computed, or it follows another itself
        if sequence.known.size > sequence.num_prompt or leader.known.size > leader.num_prompt:
            return None
        other = leader.submit
        if submit.pooling is not None or other.pooling is not None or sequence.wants_prompt_logprobs:
            return None  # there is no row of logits to share, or the prompt itself has something to tell
        is_same = submit.adapter == other.adapter and submit.cache_salt == other.cache_salt
        for mine, others in ((submit.prompt, other.prompt), (submit.prompt_embeds, other.prompt_embeds)):
            is_same = is_same and (mine is others or np.array_equal(mine, others))
        return leader if is_same else None

    def room_of(self, leader: Sequence) -> tuple[int, int]:
        """Slots and blocks that the followers of this request take."""
        count = self._table.followers.count(leader)
        if not count:
            return 0, 0
        # What lies behind the full blocks of the prompt, each has for itself.
        kv = self._view.kv
        num_blocks = kv.blocks_for(leader.num_prompt + 1 + self._spare) - leader.num_prompt // kv.block_size
        return count, count * num_blocks

    def fork(self, completed: list[int]) -> list[Sequence]:
        """A follower of a prompt that ends in this step gets a slot if it fits, or waits for one. completed: the prompts' slots.

        Returns the forks.
        """
        forks: list[Sequence] = []
        for source in completed:
            leader: Sequence = self._view.batch.sequences[source]
            followers = self._table.followers.take(leader)
            if followers:
                forks += self._fork_one(leader, followers)
        self.num_forks += len(forks)
        return forks

    def _fork_one(self, leader: Sequence, followers: list[Sequence]) -> list[Sequence]:
        num_prompt, kv, view = leader.num_prompt, self._view.kv, self._view
        num_slots, num_free = self._room(followers[-1])
        forks: list[Sequence] = []
        for fork in followers:
            num_blocks = kv.blocks_for(min(num_prompt + 1 + self._spare, fork.limit + self._spare))
            taken = num_blocks - num_prompt // kv.block_size
            fits = len(forks) < num_slots and taken <= num_free
            fits = fits and self._message_budget.has_row_room(fork) and self._message_budget.has_plan_room(fork)
            if not fits or not view.may_start(fork) or not self._table.policy.may_fork(fork, view):
                self._table.wait(fork)
                continue
            num_free -= taken
            self._message_budget.add_to_plan(fork)
            self._table.start_fork(fork, leader)
            self._builder.fork(fork, num_blocks, kv.fork(leader.slot, num_prompt, fork.slot, num_blocks), leader.slot)
            forks.append(fork)
            self._table.policy.on_fork(fork, view)
        return forks

    def _room(self, last: Sequence) -> tuple[int, int]:
        """Slots and blocks to which no request has a better claim than these forks; `last` is the one that came last.

        Requests that come before it and wait are left theirs, and so are preempted ones, which will wait again.
        """
        view, preempted = self._view, self._table.preempted
        num_slots = view.batch.num_free_slots - len(preempted)
        num_blocks = view.kv.num_free - view.limits.headroom_blocks
        num_blocks -= sum(view.admission_blocks(other) for other in preempted)
        for other in self._table.policy.ahead_of(last, view):
            if num_slots <= 0 or num_blocks <= 0:
                break
            num_slots -= 1
            num_blocks -= view.admission_blocks(other)
        return num_slots, num_blocks
