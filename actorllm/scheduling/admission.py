"""`Admission`: how many requests and prompt tokens may wait, and which requests are refused for it.

Owns the counts of requests that have not started, by frontend: from their submission to their first slot, or to their end.
Only requests that really wait count against the limits. A request for which a slot is free, with no other before it, does not.
A prompt that comes while none waits is taken, however long it is. The limits are shared evenly by the frontends that have
something waiting. A frontend that floods the engine is refused at its share, and leaves the others theirs.

The sequences of one request are taken or refused together. A request that has been taken is never refused later, not even
after a preemption. Nor is it when it is handed over again with what it had emitted. A request that is held back before the
scheduler (`hold`) waits as well. Used by Scheduler; costs nothing per step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from actorllm.messages import OVERLOADED, Submit
from actorllm.scheduling.sequence import Sequence


@dataclass(slots=True)
class Queue:
    """What one frontend has waiting."""

    num_requests: int = 0
    num_tokens: int = 0
    """Of the prompts."""
    num_held_requests: int = 0
    num_held_tokens: int = 0
    """Of those that wait: what the caller of the scheduler holds back."""
    max_requests: int | None = None
    """A limit of its own, whatever the others do."""
    num_decided: int = 0
    """Further sequences of the request that was decided on last; they come next."""
    refusal: Refusal | None = None
    """What was decided."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a request was not taken, with the counts of the frontend it came from."""

    num_waiting_requests: int
    max_waiting_requests: int | None
    num_waiting_tokens: int
    max_waiting_tokens: int | None
    num_sequences: int
    """Of the request that was refused."""

    @property
    def message(self) -> str:
        found = [f"{self.num_waiting_requests} requests"]
        if self.max_waiting_requests is not None:
            found[0] += f" of at most {self.max_waiting_requests}"
        if self.max_waiting_tokens is not None:
            found.append(f"{self.num_waiting_tokens} prompt tokens of at most {self.max_waiting_tokens}")
        more = f", and this one has {self.num_sequences} sequences" if self.num_sequences > 1 else ""
        return f"the engine is overloaded: {' and '.join(found)} wait already{more}; try again later, or elsewhere"

    @property
    def details(self) -> dict[str, Any]:
        """What travels with the end of the request."""
        return {
            "kind": OVERLOADED,
            "num_waiting_requests": self.num_waiting_requests,
            "max_waiting_requests": self.max_waiting_requests,
            "num_waiting_tokens": self.num_waiting_tokens,
            "max_waiting_tokens": self.max_waiting_tokens,
        }


class Admission:
    """Which requests may wait. max_requests, max_tokens: None means no limit."""

    def __init__(self, max_requests: int | None = None, max_tokens: int | None = None) -> None:
        self.max_requests = max_requests
        self.max_tokens = max_tokens
        self.num_requests = 0
        """That wait, of all frontends."""
        self.num_held = 0
        """Those of them that are held back (`hold`)."""
        self.num_left = 0
        """Of those that waited when the last step was planned: not all of them were let in."""
        self.num_refused = 0
        self._queues: dict[int, Queue] = {}

    def limit_frontend(self, frontend: int, max_requests: int) -> None:
        """A frontend may have no more than so many waiting, whether there is a limit for all or not."""
        self._queue(frontend).max_requests = max_requests

    def forget_frontend(self, frontend: int) -> None:
        """It is gone, and its requests have ended."""
        self._queues.pop(frontend, None)

    def refusal(self, frontend: int, submit: Submit, num_free_slots: int) -> Refusal | None:
        """Why a request must not join those that wait; None: it may."""
        if submit.is_resumed or submit.output.size:
            return None
        queue = self._queues.get(frontend)
        if queue is not None and queue.num_decided and submit.sample_index:
            queue.num_decided -= 1
            refusal = queue.refusal
        else:
            refusal = self._decide(frontend, submit, num_free_slots)
            if submit.num_sequences > 1:
                queue = self._queue(frontend)
                queue.num_decided = submit.num_sequences - 1
                queue.refusal = refusal
        self.num_refused += refusal is not None
        return refusal

    def _decide(self, frontend: int, submit: Submit, num_free_slots: int) -> Refusal | None:
        queue = self._queue(frontend)
        max_requests, max_tokens = self._share(queue, self.max_requests), self._share(queue, self.max_tokens)
        if queue.max_requests is not None:
            max_requests = queue.max_requests if max_requests is None else min(queue.max_requests, max_requests)
        if max_requests is None and max_tokens is None:
            return None
        num_requests, num_tokens = submit.num_sequences, submit.num_sequences * submit.prompt.size
        num_startable = 0 if self.num_left else num_free_slots
        is_over = max_requests is not None and queue.num_requests + num_requests - num_startable > max_requests
        is_over |= max_tokens is not None and queue.num_tokens > 0 and queue.num_tokens + num_tokens > max_tokens
        if not is_over:
            return None
        return Refusal(queue.num_requests, max_requests, queue.num_tokens, max_tokens, num_requests)

    def _share(self, queue: Queue, limit: int | None) -> int | None:
        """Of a limit, what a frontend may have: as much as each of the others that have something waiting."""
        if limit is None or self.num_requests == queue.num_requests:
            return limit
        num_others = sum(other.num_requests > 0 for other in self._queues.values() if other is not queue)
        return limit // (1 + num_others)

    def _queue(self, frontend: int) -> Queue:
        queue = self._queues.get(frontend)
        if queue is None:
            queue = self._queues[frontend] = Queue()
        return queue

    # What becomes of requests

    def enter(self, sequence: Sequence) -> None:
        """A request was taken."""
        queue = self._queue(sequence.key[0])
        self.num_requests += 1
        queue.num_requests += 1
        queue.num_tokens += sequence.num_prompt

    def leave(self, sequence: Sequence) -> None:
        """It got its first slot, or ended without one."""
        queue = self._queues[sequence.key[0]]
        self.num_requests -= 1
        queue.num_requests -= 1
        queue.num_tokens -= sequence.submit.prompt.size
        if self.num_left:
            self.num_left = min(self.num_left, self.num_requests - self.num_held)

    def hold(self, frontend: int, submit: Submit, count: int = 1) -> None:
        """A request waits that is not in the scheduler's hands yet; count=-1: it does so no more."""
        queue = self._queue(frontend)
        num_tokens = count * submit.prompt.size
        self.num_held += count
        self.num_requests += count
        queue.num_requests += count
        queue.num_tokens += num_tokens
        queue.num_held_requests += count
        queue.num_held_tokens += num_tokens

    @property
    def num_tokens(self) -> int:
        """Of the prompts that wait, of all frontends."""
        return sum(queue.num_tokens for queue in self._queues.values())

    def check_integrity(self, waiting: list[Sequence]) -> None:
        """AssertionError unless these are the requests that have not started."""
        num_known = self.num_requests - self.num_held
        assert num_known == len(waiting), f"{num_known} requests counted, {len(waiting)} wait"
        assert self.num_held == sum(queue.num_held_requests for queue in self._queues.values())
        assert self.num_requests == sum(queue.num_requests for queue in self._queues.values())
        for frontend, queue in self._queues.items():
            own = [sequence for sequence in waiting if sequence.key[0] == frontend]
            counts = queue.num_requests - queue.num_held_requests, queue.num_tokens - queue.num_held_tokens
            assert counts == (len(own), sum(s.num_prompt for s in own)), frontend
