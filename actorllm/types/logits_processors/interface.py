"""The classes that logits processors are derived from, with vLLM's names and calls.

A `LogitsProcessor` sees the logits of a whole batch, [num_requests, vocab_size] in float32, and is told of changes of the batch by
`update_state`. An `AdapterLogitsProcessor` makes a function for each request instead, which sees one row. Either is built once per
worker. What it knows of a request must follow from parameters, prompt and output. After a preemption a request is added again
with the output that it has; so it is in a worker that replaces a dead one.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from actorllm.types.params import SamplingParams

if TYPE_CHECKING:
    import torch

State = TypeVar("State")

RemovedRequest: TypeAlias = int
AddedRequest: TypeAlias = tuple[int, SamplingParams, list[int] | None, list[int]]
"""Index, parameters, prompt (None: it has embeddings), and the list of output tokens, which grows as they are sampled."""

RequestLogitsProcessor: TypeAlias = "Callable[..., torch.Tensor]"
"""(output_ids, logits) or (prompt_ids, output_ids, logits): the logits of one row, which it may change in place."""


class MoveDirectionality(Enum):
    """How two places of a batch change."""

    UNIDIRECTIONAL = auto()
    """The request of the first goes to the second."""
    SWAP = auto()
    """The two requests change places."""


MovedRequest: TypeAlias = tuple[int, int, MoveDirectionality]


@dataclass(frozen=True)
class BatchUpdate:
    """How a batch has changed. The removed come first, then the added, then the moved."""

    batch_size: int
    """Requests that it has now."""
    removed: Sequence[RemovedRequest]
    added: Sequence[AddedRequest]
    """They may take the place of another request."""
    moved: Sequence[MovedRequest]


class LogitsProcessor(ABC):
    """Changes the logits of a batch."""

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Called with the parameters of every request, in the application's process.

        Arguments:
            sampling_params: of the request.

        Raises:
            ValueError: the request is refused with this text.
        """
        return

    @abstractmethod
    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        """vllm_config: has model_config, scheduler_config, cache_config and parallel_config (`model.processors`)."""

    @abstractmethod
    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """The changed logits, perhaps the given tensor changed in place.

        Arguments:
            logits: float32 [num_requests, vocab_size], in the order of the batch.
        """

    @abstractmethod
    def is_argmax_invariant(self) -> bool:
        """Whether the most likely token stays the most likely one: greedy requests are then left out."""

    @abstractmethod
    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Called before each `apply`.

        Arguments:
            batch_update: None where the batch has not changed; output tokens may have come.
        """


def process_dict_updates(
    req_entries: dict[int, State],
    batch_update: BatchUpdate | None,
    new_state: Callable[[SamplingParams, list[int] | None, list[int]], State | None],
) -> bool:
    """Keep a state by index up to date.

    Arguments:
        req_entries: state by index, changed in place.
        batch_update: as `LogitsProcessor.update_state` got it.
        new_state: the state of an added request, from parameters, prompt and output; None: it has none.

    Returns:
        Whether anything has changed.
    """
    if batch_update is None:
        return False
    before = dict(req_entries)
    for index in batch_update.removed:
        req_entries.pop(index, None)
    for index, params, prompt, output in batch_update.added:
        req_entries.pop(index, None)
        state = new_state(params, prompt, output)
        if state is not None:
            req_entries[index] = state
    for source, target, direction in batch_update.moved:
        first, second = req_entries.pop(source, None), req_entries.pop(target, None)
        if first is not None:
            req_entries[target] = first
        if second is not None and direction is MoveDirectionality.SWAP:
            req_entries[source] = second
    return before.keys() != req_entries.keys() or any(before[index] is not req_entries[index] for index in before)


class AdapterLogitsProcessor(LogitsProcessor):
    """Makes a function for each request, which changes that request's logits."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        """A subclass that has a constructor of its own calls this one."""
        self.req_info: dict[int, Callable[[torch.Tensor], torch.Tensor]] = {}
        """By index."""

    @abstractmethod
    def new_req_logits_processor(self, params: SamplingParams) -> RequestLogitsProcessor | None:
        """The function of a new request, or None.

        Arguments:
            params: of the request.
        """

    def _new_state(
        self, params: SamplingParams, prompt: list[int] | None, output: list[int]
    ) -> Callable[[torch.Tensor], torch.Tensor] | None:
        change = self.new_req_logits_processor(params)
        if change is None:
            return None
        wants_prompt = len(inspect.signature(change).parameters) == 3
        if wants_prompt and prompt is None:
            raise ValueError("it wants the token ids of the prompt, which has embeddings")
        given = (prompt, output) if wants_prompt else (output,)
        return lambda logits: change(*given, logits)

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        process_dict_updates(self.req_info, batch_update, self._new_state)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        for index, change in self.req_info.items():
            row = logits[index]
            changed = change(row)
            if changed is not row:
                logits[index] = changed
        return logits
