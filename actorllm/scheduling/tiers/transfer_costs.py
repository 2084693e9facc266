"""`TransferCosts`: whether it takes longer to load blocks from a tier or to compute them, as learnt from what was observed."""

from __future__ import annotations

from actorllm.scheduling.telemetry.statistics import TransferCostStatistics

DECAY = 0.9
"""What an observation counts for after another one."""
DECLINES_PER_TRIAL = 64
"""So many loads that seem too slow are not made; then one is tried, since a disk may have become faster."""
MIN_PREFILL_SHARE = 0.5
"""Steps whose tokens are prompt tokens to at least this part tell what a prompt token takes."""


class LearntRate:
    """Seconds for one of something, over the latest observations."""

    __slots__ = ("_number", "_seconds")

    def __init__(self) -> None:
        self._seconds = self._number = 0.0

    def observe(self, seconds: float, number: float) -> None:
        self._seconds = DECAY * self._seconds + seconds
        self._number = DECAY * self._number + number

    @property
    def value(self) -> float | None:
        """None: nothing was observed."""
        return self._seconds / self._number if self._number else None


class TransferCosts:
    """See the module docstring."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._load, self._overhead, self._compute = LearntRate(), LearntRate(), LearntRate()
        self._num_declined = 0

    def observe_step(self, num_prefill_tokens: int, num_tokens: int, seconds: float) -> None:
        """A step took so long."""
        if num_prefill_tokens >= MIN_PREFILL_SHARE * num_tokens:
            self._compute.observe(seconds, num_tokens)

    def observe_load(self, num_blocks: int, seconds: float, elapsed: float) -> None:
        """seconds: of reading. elapsed: from the decision to the answer."""
        self._load.observe(seconds, num_blocks)
        self._overhead.observe(max(0.0, elapsed - seconds), 1.0)

    def load_s(self, num_blocks: int) -> float | None:
        """Predicted; None: nothing is known yet."""
        if self._load.value is None or self._overhead.value is None:
            return None
        return self._overhead.value + num_blocks * self._load.value

    def compute_s(self, num_blocks: int) -> float | None:
        """Predicted, from below: attention makes later tokens dearer. None: nothing is known yet."""
        rate = self._compute.value
        return None if rate is None else num_blocks * self._block_size * rate

    def is_load_faster(self, num_blocks: int) -> bool:
        """Or not known to be slower. One that is declined too often is tried."""
        load, compute = self.load_s(num_blocks), self.compute_s(num_blocks)
        if load is None or compute is None or load < compute:
            return True
        self._num_declined += 1
        return self._num_declined % DECLINES_PER_TRIAL == 0

    def statistics(self) -> TransferCostStatistics:
        return TransferCostStatistics(self._load.value, self._overhead.value, self._compute.value)
