"""A backend of somebody else's, as small as one can be: every token is followed by the next id. It has no weights and no cache."""

from __future__ import annotations

import numpy as np

from actorllm import clock
from actorllm.messages import I32, LateInputs, StepPlan, StepResult
from actorllm.model.inputs import PersistentBatch
from actorllm.model.runner import ModelRunner, StepHandle


class CountingRunner(ModelRunner[StepHandle[None], None]):
    name = "counting"
    switches = frozenset({"has_qkv_bias"})
    num_kv_heads = 1

    def load(self) -> None:
        """There is nothing to load."""

    def _check_room(self, num_bytes: int) -> None:
        """Nothing is kept."""

    def _cache_bytes(self) -> int:
        return 64 * self.block_bytes

    def allocate(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self.batch = self._empty_batch()

    def _empty_batch(self) -> PersistentBatch:
        return PersistentBatch(**self._batch_arguments(self._num_blocks))

    def _clear_unfinished(self) -> None:
        """Nothing is kept."""

    def _zero(self, block_ids: I32) -> None:
        """Nothing is kept."""

    def _copy(self, sources: I32, targets: I32) -> None:
        """Nothing is kept."""

    def check_itself(self) -> None:
        """It always works."""

    def _how(self, slots: I32, *, has_rules: bool, has_logprobs: bool) -> None:
        """All rows are sampled alike."""

    def execute(self, plan: StepPlan) -> StepHandle[None]:
        started = clock.now()
        self._apply(plan)
        inputs = self.batch.inputs(plan)
        handle = StepHandle(plan.step, inputs, self._sampling_rows(inputs), plan.late_slots, started)
        self.batch.advance(inputs)
        return handle

    def sample(self, handle: StepHandle[None], late: LateInputs | None = None) -> StepResult:
        inputs = handle.inputs
        tokens = (inputs.token_ids[inputs.result_tokens] + 1).astype(np.int32) % self.model_config.vocab_size
        self.batch.store(handle.sampling.slots, tokens)
        is_void = np.zeros(len(tokens), np.bool_)
        return self._result(handle, tokens, is_void, is_void, np.zeros(0, np.int32), [], None)
