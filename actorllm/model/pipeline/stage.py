"""`Stage`: a rank's place among the stages of a pipeline, and what it exchanges with the stages beside it.

Every rank gets every plan, so each knows how many tokens a step has. Hidden states travel without a word about their size, as
[num_tokens, hidden_size] in the type of the model. They go point to point, from each rank to that of its number in the next stage.
The last stage samples. It sends the tokens to the first one, which needs them as inputs of later steps.

A plan says up to which step all tokens were known to the scheduler (`StepPlan.lane`). The first stage takes those of all steps
up to there before it applies the plan. They have been sent already, and every rank of the stage takes the same. The stages
between the two need no tokens, only how many there are.

What is sent stays alive until it has arrived. No more steps are in flight than there are stages, so what was sent that many
steps ago is there already. gloo says so only to a `wait`, which then returns at once. A rank that
leaves a step while others wait for it cannot go on (`ModelRunner.is_torn`). Owned by the runner, and used on its thread.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch

from actorllm import clock
from actorllm.config import EngineConfig
from actorllm.messages import I32
from actorllm.model.pipeline.part import LayerPart

MAX_TAG = 1 << 30
"""Messages of steps are told apart by their number, which torch.distributed takes up to 2**31."""


class Stage:
    """Without arguments: the only one."""

    def __init__(self, config: EngineConfig | None = None, rank: int = 0) -> None:
        """rank: of all ranks of the engine."""
        layers = () if config is None else config.stages
        size = 1 if config is None else config.tensor_size
        self.index = rank // size if layers else 0
        self.part = LayerPart.of(layers, self.index)
        self.is_first, self.is_last = self.part.is_first, self.part.is_last
        self.received_at = 0.0
        """When the states of the last step were here, in monotonic seconds: what was waited before is not this stage's work."""
        self._size, self._rank, self._num_ranks = size, rank, size * max(1, len(layers))
        self._most_sent = len(layers)
        """Steps in flight, at most."""
        self.is_alone = not layers
        self._sent: deque[tuple[Any, torch.Tensor]] = deque()
        self._expected: deque[tuple[int, I32]] = deque()
        """Steps whose tokens have not come yet, with the slots that they are of. On the first stage only."""

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Steps of this rank's own: nothing is exchanged with other stages. Made-up states stand for those of the one before."""
        before, self.is_alone = self.is_alone, True
        try:
            yield
        finally:
            self.is_alone = before

    def receive(self, step: int, num_tokens: int, hidden_size: int, dtype: torch.dtype) -> torch.Tensor:
        """The hidden states that the stage before has computed, [num_tokens, hidden_size]."""
        if self.is_alone:
            made_up = torch.arange(num_tokens * hidden_size).remainder_(13).sub_(6).view(num_tokens, hidden_size)
            return made_up.to(dtype).mul_(0.1)
        import torch.distributed as dist

        states = torch.empty(num_tokens, hidden_size, dtype=dtype)
        dist.recv(states.view(torch.uint8), self._rank - self._size, tag=step % MAX_TAG)
        self.received_at = clock.now()
        return states

    def send(self, step: int, states: torch.Tensor) -> None:
        """To the next stage; the caller changes them no more."""
        if not self.is_alone:
            self._send(states.contiguous().view(torch.uint8), self._rank + self._size, step)

    def tell(self, step: int, tokens: I32) -> None:
        """Of the last stage: what it has sampled, to the first one."""
        if not self.is_alone and tokens.size:
            self._send(torch.from_numpy(tokens.copy()), self._rank % self._size, step)

    def expect(self, step: int, slots: I32) -> None:
        """Of the first stage: the last one will sample a token for each of these."""
        if not self.is_alone and self.is_first and slots.size:
            self._expected.append((step, slots))

    def take(self, known: int) -> Iterator[tuple[I32, I32]]:
        """Slots and tokens of all steps up to this one that have not been taken yet, step by step."""
        if self.is_alone:
            return
        import torch.distributed as dist

        while self._expected and self._expected[0][0] <= known:
            step, slots = self._expected.popleft()
            tokens = torch.empty(len(slots), dtype=torch.int32)
            last = self._num_ranks - self._size + self._rank
            dist.recv(tokens, last, tag=step % MAX_TAG)
            yield slots, tokens.numpy()

    def drain(self) -> None:
        """Take what is still to come, and drop it: the requests are forgotten, and the last stage computes all that was planned."""
        if self._expected:
            for _ in self.take(self._expected[-1][0]):
                pass

    def _send(self, tensor: torch.Tensor, to: int, step: int) -> None:
        import torch.distributed as dist

        while len(self._sent) >= self._most_sent:
            self._sent.popleft()[0].wait()  # `is_completed` of gloo is False until then
        self._sent.append((dist.isend(tensor, to, tag=step % MAX_TAG), tensor))
