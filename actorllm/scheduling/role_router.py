"""`RoleRouter`: whether a prompt is computed where it decodes, or by a replica of another role that hands it off. Pure.

Decided for each request by predicted seconds, those of all requests together. Where a prompt is computed beside decode rows, each
of these rows waits for it. A hand-off spares them that, and costs the copy of the KV. So it pays for long prompts beside many
rows. A prompt that is short, or whose beginning a decoding replica has, is computed where it decodes.

Which replica of a role it is says the router of the engine. The engine and the simulator run the same object.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from actorllm.scheduling.router import HASH_BYTES, ReplicaView, Routable, Router, Seconds

DECAY = 0.9
"""What an observed hand-off counts for after another one."""


class LearntHandOff:
    """What a hand-off takes, over the latest ones: a fixed part, and seconds for each block. Both are unknown at first: 0."""

    def __init__(self) -> None:
        self._weight = self._blocks = self._squares = self._seconds = self._products = 0.0

    def observe(self, num_blocks: int, seconds: float) -> None:
        """From the offer to the first token of the replica that goes on."""
        for name, value in (
            ("_weight", 1.0),
            ("_blocks", num_blocks),
            ("_squares", num_blocks * num_blocks),
            ("_seconds", seconds),
            ("_products", num_blocks * seconds),
        ):
            setattr(self, name, DECAY * getattr(self, name) + value)

    def seconds(self, num_blocks: int) -> float:
        """Predicted, by the line through what was observed."""
        if not self._weight:
            return 0.0
        mean_blocks, mean = self._blocks / self._weight, self._seconds / self._weight
        spread = self._squares / self._weight - mean_blocks**2
        slope = 0.0 if spread < 1e-9 else max(0.0, (self._products / self._weight - mean_blocks * mean) / spread)
        return max(0.0, mean + slope * (num_blocks - mean_blocks))


class RoleRouter:
    """See the module docstring."""

    def __init__(self, router: Router) -> None:
        """router: of replicas of one role."""
        self._router = router
        self.hand_off = LearntHandOff()
        self.num_decided = [0, 0]
        """Requests that a decoding replica computes from their first token, and those that are handed off."""

    def route(self, request: Routable, views: Sequence[ReplicaView]) -> int:
        """Where a request begins. At a replica that computes prompts it is to be handed off, if any other one is there."""
        prefill = [view for view in views if view.role == "prefill"]
        decode = [view for view in views if view.role != "prefill"]
        if not prefill or not decode:
            return self._router.route(request, views)
        is_handed_off = self.pays(request, prefill, decode)
        self.num_decided[is_handed_off] += 1
        return self._router.route(request, prefill if is_handed_off else decode)

    def route_on(self, request: Routable, views: Sequence[ReplicaView]) -> int:
        """Where a request goes that another replica has computed the prompt of. views: of those that decode."""
        size = views[0].block_size
        left = replace(request, num_prompt=1 + request.num_prompt % size, block_hashes=b"")
        return self._router.route(left, views)

    def forget(self, number: int) -> None:
        """A replica lost its cache."""
        forget = getattr(self._router, "forget", None)
        if forget is not None:
            forget(number)

    def pays(self, request: Routable, prefill: Sequence[ReplicaView], decode: Sequence[ReplicaView]) -> bool:
        """Whether all requests together wait for less if this one is handed off."""
        num_blocks = request.num_prompt // decode[0].block_size
        if (
            not num_blocks or len(request.block_hashes) // HASH_BYTES < num_blocks
        ):  # nothing could be told from other blocks
            return False
        has_times = None not in [view.step_seconds for view in (*prefill, *decode)]
        here = min(self._cost(request, view, has_times) for view in decode)
        away = min(self._cost(request, view, has_times) for view in prefill)
        return away + (self.hand_off.seconds(num_blocks) if has_times else 0.0) < here

    @staticmethod
    def _cost(request: Routable, view: ReplicaView, has_times: bool) -> float:
        """Seconds that this request waits here, and that rows which decode here and later requests wait for it; or tokens."""
        num_found = 0 if view.find is None else view.find(request.block_hashes)
        num_new = max(1, request.num_prompt - num_found * view.block_size)
        if has_times:
            wait, work = Seconds.costs_s(view, num_new)
        else:
            wait, work = view.num_waiting_tokens + num_new + Seconds.row_tokens * view.num_running, float(num_new)
        return wait + (view.num_running + Seconds.later) * work
