"""Past-Future (LightLLM, ASPLOS 2025): admit as many as will fit, by how long answers have been lately.

The past is the lengths of the last `window` answers. The rest of a running request's answer is drawn from those that were
longer than what it has emitted. The future is a series of ends, and memory peaks before each of them. At such a peak the k
longest requests hold all their tokens, and k times the rest of the shortest of them. The next request starts if the highest
peak stays below `share` of the KV cache in each of `num_draws` draws. Until there is a past, every request is expected to use
its whole `max_tokens`. A request that was aborted or failed counts with its rest, by the same draw. Otherwise clients without
patience would make all answers look short (Efron 1967).

Draws are no random numbers: each request has its own place in the distribution, made of its number, so that runs repeat.
"""

from __future__ import annotations

from collections import deque

import numpy as np
from numpy.typing import NDArray

from actorllm.scheduling.admission_policy import AdmissionPolicy
from actorllm.scheduling.policy import Admit, View
from actorllm.scheduling.sequence import Sequence

GOLDEN_RATIO = 0.6180339887498949
"""Multiples of it, without their integer parts, cover the unit interval as evenly as can be."""

MIN_PAST = 16


class PastFuture(AdmissionPolicy):
    """Knobs are class attributes, to be changed in a subclass."""

    name = "past-future"
    window = 1000
    num_draws = 5
    share = 0.95

    def __init__(self) -> None:
        self._lengths: deque[int] = deque(maxlen=self.window)
        self._past: NDArray[np.int64] | None = None
        """The same in order; None: to be made again."""

    def admit(self, sequence: Sequence, joining: list[Sequence], leaving: list[Sequence], view: View) -> Admit:
        running = [s for s in view.running() if s not in leaving]
        if not running and not joining:
            return Admit.ADMIT  # a request that was taken at all fits alone
        kv, batch = view.kv, view.batch
        everybody = [*running, *joining, sequence]
        slots = np.array([s.slot for s in running], np.intp)
        waiting = [*joining, sequence]
        known = np.concatenate((batch.num_known[slots], [s.known.size for s in waiting])).astype(np.int64)
        prompt = np.array([s.num_prompt for s in everybody])
        most = np.array([s.limit for s in everybody]) - prompt
        number = np.array([s.arrival_index for s in everybody])
        held = int(kv.num_blocks[slots].sum())  # of which those that are shared are counted more than once
        shared = max(0, held + sum(kv.num_blocks.item(s.slot) for s in leaving) - kv.pool.num_blocks + kv.num_free)
        shared += sum(s.num_needed_blocks - view.admission_blocks(s) for s in waiting)
        tokens = known + kv.block_size // 2  # of its last block, a request uses half
        room = self.share * kv.pool.num_blocks * kv.block_size + shared * kv.block_size
        for draw in range(self.num_draws):
            place = (number + draw / self.num_draws) * GOLDEN_RATIO % 1.0
            if peak(tokens, self._still_to_say(known - prompt, most, place)) > room:
                return Admit.WAIT
        return Admit.ADMIT

    def _still_to_say(
        self, said: NDArray[np.int64], most: NDArray[np.int64], place: NDArray[np.float64]
    ) -> NDArray[np.int64]:
        """Tokens until the end of each request, drawn from the answers that were longer than what it has said."""
        if len(self._lengths) < MIN_PAST:
            return most - said
        if self._past is None:
            self._past = np.sort(np.array(self._lengths, np.int64))
        past = self._past
        first = np.searchsorted(past, said, side="right")
        drawn = past[np.minimum(first + (place * (past.size - first)).astype(np.int64), past.size - 1)]
        length = np.where(first < past.size, np.minimum(drawn, most), most)
        return np.maximum(length - said, 1)

    def on_arrival(self, sequence: Sequence, view: View) -> None:
        sequence.policy_state.pop(self.name, None)

    def on_admit(self, sequence: Sequence, view: View) -> None:
        sequence.policy_state[self.name] = sequence.slot

    def on_end(self, sequence: Sequence, view: View) -> None:
        slot = sequence.policy_state.pop(self.name, None)
        if isinstance(slot, int):
            length = view.batch.num_known.item(slot) - sequence.num_prompt
            if sequence.finish_reason in ("abort", "error"):
                most, place = sequence.limit - sequence.num_prompt, sequence.arrival_index * GOLDEN_RATIO % 1.0
                length += int(self._still_to_say(np.array([length]), np.array([most]), np.array([place])).item())
            self._lengths.append(length)
            self._past = None


def peak(tokens: NDArray[np.int64], to_come: NDArray[np.int64]) -> int:
    """Most tokens that there will ever be at once of requests that have so many, and get one each until they end."""
    order = np.argsort(-to_come, kind="stable")
    at_ends = np.cumsum(tokens[order]) + to_come[order] * np.arange(1, tokens.size + 1)
    return int(at_ends.max(initial=0))
