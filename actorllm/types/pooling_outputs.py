"""What pooling requests give: vLLM's output types, field by field, and what is done to a vector on its way there.

A worker returns float32 vectors as they are pooled. Shortening, scaling to length 1 and cosines are done here, by the receiver
of the vectors. torch is imported only when a tensor is asked for. Called by `stream`, the front doors and the server.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from actorllm.errors import InvalidParameterError
from actorllm.types.request_metrics import RequestMetrics

if TYPE_CHECKING:
    import torch

    from actorllm.types.pooling_params import Pooling

Vector: TypeAlias = NDArray[np.float32]

SMALLEST_LENGTH = 1e-12
"""A shorter vector is scaled as if it had this length, as in torch's `normalize`."""


@dataclass(frozen=True, slots=True)
class PoolingAborted:
    """Why a pooling request gave no vector although nothing failed: it was aborted, or its deadline has passed."""

    code: str
    message: str
    retryable: bool = False


class PoolingOutput:
    """The vector of one request.

    data: as a torch tensor, float32 [size]; empty when there is none (`PoolingRequestOutput.error`). array: the same for numpy.
    """

    __slots__ = ("array",)

    def __init__(self, data: torch.Tensor | Vector) -> None:
        self.array: Vector = data if isinstance(data, np.ndarray) else data.float().numpy()

    @property
    def data(self) -> torch.Tensor:
        """The vector as a torch tensor, which shares its memory with `array`; the first use imports torch."""
        import torch

        return torch.from_numpy(self.array)

    def __repr__(self) -> str:
        return f"PoolingOutput(data={self.array})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PoolingOutput) and np.array_equal(self.array, other.array)

    __hash__ = None  # type: ignore[assignment]


@dataclass(slots=True)
class EmbeddingOutput:
    """A vector as a list of floats."""

    embedding: list[float]

    @staticmethod
    def from_base(pooling_output: PoolingOutput) -> EmbeddingOutput:
        """From an output with a tensor.

        Arguments:
            pooling_output: as `encode` gives it.
        """
        return EmbeddingOutput(pooling_output.array.tolist())

    @property
    def hidden_size(self) -> int:
        """How many numbers it has."""
        return len(self.embedding)

    def __repr__(self) -> str:
        return f"EmbeddingOutput(hidden_size={self.hidden_size})"


@dataclass(slots=True)
class ClassificationOutput:
    """The scores of a prompt's labels, as probabilities unless that was not wanted."""

    probs: list[float]

    @staticmethod
    def from_base(pooling_output: PoolingOutput) -> ClassificationOutput:
        """From an output with a tensor.

        Arguments:
            pooling_output: as `encode` gives it.
        """
        return ClassificationOutput(pooling_output.array.tolist())

    @property
    def num_classes(self) -> int:
        """How many labels there are."""
        return len(self.probs)

    def __repr__(self) -> str:
        return f"ClassificationOutput(num_classes={self.num_classes})"


@dataclass(slots=True)
class ScoringOutput:
    """How alike two texts are: the cosine of their vectors, or what a cross-encoder says of them."""

    score: float

    @staticmethod
    def from_base(pooling_output: PoolingOutput) -> ScoringOutput:
        """From an output with a tensor.

        Arguments:
            pooling_output: as `encode` gives it.

        Raises ValueError, as in vLLM, unless it holds one number.
        """
        if pooling_output.array.size != 1:
            raise ValueError("pooled_data should be a scalar score")
        return ScoringOutput(float(pooling_output.array.reshape(())))


O = TypeVar("O", PoolingOutput, EmbeddingOutput, ClassificationOutput, ScoringOutput)  # noqa: E741


@dataclass(slots=True)
class PoolingRequestOutput(Generic[O]):
    """What a pooling request has given. metrics: ours, as in `RequestOutput`; its first and last token are the vector."""

    request_id: str
    outputs: O
    prompt_token_ids: list[int]
    num_cached_tokens: int
    finished: bool
    error: PoolingAborted | None = field(default=None, kw_only=True)
    metrics: RequestMetrics | None = field(default=None, kw_only=True)

    def _fields(self) -> dict[str, Any]:
        names = ("request_id", "prompt_token_ids", "num_cached_tokens", "finished", "error", "metrics")
        return {name: getattr(self, name) for name in names}


@dataclass(slots=True)
class EmbeddingRequestOutput(PoolingRequestOutput[EmbeddingOutput]):
    """The same with a list of floats; an empty one with `error`."""

    @staticmethod
    def from_base(request_output: PoolingRequestOutput[PoolingOutput]) -> EmbeddingRequestOutput:
        """From an output with a tensor.

        Arguments:
            request_output: as `encode` gives it.
        """
        return EmbeddingRequestOutput(
            outputs=EmbeddingOutput.from_base(request_output.outputs), **request_output._fields()
        )


@dataclass(slots=True)
class ClassificationRequestOutput(PoolingRequestOutput[ClassificationOutput]):
    """The same with a list of probabilities; an empty one with `error`."""

    @staticmethod
    def from_base(request_output: PoolingRequestOutput[PoolingOutput]) -> ClassificationRequestOutput:
        """From an output with a tensor.

        Arguments:
            request_output: as `encode` gives it.
        """
        return ClassificationRequestOutput(
            outputs=ClassificationOutput.from_base(request_output.outputs), **request_output._fields()
        )


@dataclass(slots=True)
class ScoringRequestOutput(PoolingRequestOutput[ScoringOutput]):
    """The same with a score; 0.0 with `error`."""

    @staticmethod
    def from_base(request_output: PoolingRequestOutput[PoolingOutput]) -> ScoringRequestOutput:
        """From an output with a tensor.

        Arguments:
            request_output: as `encode` gives it.

        Raises ValueError, as in vLLM, unless it holds one number.
        """
        outputs = ScoringOutput(0.0)
        if request_output.error is None:
            outputs = ScoringOutput.from_base(request_output.outputs)
        return ScoringRequestOutput(outputs=outputs, **request_output._fields())


def shaped(vector: Vector, pooling: Pooling, token_ids: Sequence[int] = ()) -> Vector:
    """A pooled vector as the request wants it, or of every token one, [num_tokens, size]; another array.

    token_ids: of the prompt, where the vectors of one token are wanted.
    """
    if pooling.is_of_tokens:
        vector = vector.reshape(-1, pooling.size)
        if pooling.returned_ids:
            vector = vector[:, pooling.returned_ids]
        if pooling.step_tag_id is not None:
            vector = vector[np.asarray(token_ids, np.int64) == pooling.step_tag_id]
        if not vector.size:
            return vector.copy()
    if pooling.dimensions is not None:
        vector = vector[..., : pooling.dimensions]
    match pooling.activation:
        case "length":
            if vector.ndim == 1:
                return np.asarray(vector / max(float(np.linalg.norm(vector)), SMALLEST_LENGTH), np.float32)
            lengths = np.linalg.norm(vector, axis=-1, keepdims=True)
            return np.asarray(vector / np.maximum(lengths, SMALLEST_LENGTH), np.float32)
        case "softmax" if vector.shape[-1] > 1:
            powers = np.exp(vector - vector.max(-1, keepdims=True))
            return np.asarray(powers / powers.sum(-1, keepdims=True), np.float32)
        case "softmax" | "sigmoid":
            return np.asarray(
                np.where(vector >= 0, 1, np.exp(-np.abs(vector))) / (1 + np.exp(-np.abs(vector))), np.float32
            )
    return vector.copy()


def cosine(one: Vector, other: Vector) -> float:
    lengths = max(float(np.linalg.norm(one)), SMALLEST_LENGTH) * max(float(np.linalg.norm(other)), SMALLEST_LENGTH)
    return float(np.dot(one, other)) / lengths


def max_similarity(one: Vector, other: Vector) -> float:
    """Of two texts with a vector per token: for each token of the one the most similar of the other, summed (MaxSim)."""
    return float((one @ other.T).max(1).sum())


def paired(num_first: int, num_second: int) -> list[tuple[int, int]]:
    """Which texts are compared: one with all of the others, or each with its own. Raises InvalidParameterError."""
    if not num_first or not num_second:
        raise InvalidParameterError("there is nothing to compare: each side needs at least one text")
    if num_first not in (1, num_second):
        raise InvalidParameterError(
            f"{num_first} texts cannot be compared with {num_second}: give one text on the first side, or as many on both"
        )
    return [(0 if num_first == 1 else i, i) for i in range(num_second)]


def scored(
    first: Sequence[PoolingRequestOutput[PoolingOutput]],
    second: Sequence[PoolingRequestOutput[PoolingOutput]],
    separator: int | None,
    compare: Callable[[Vector, Vector], float] = cosine,
) -> list[ScoringRequestOutput]:
    """What `compare` says of pairs. separator: the padding token, which stands between the ids of two texts as in vLLM."""
    between = [] if separator is None else [separator]
    outputs = []
    for i, j in paired(len(first), len(second)):
        one, other = first[i], second[j]
        failed = one if one.error is not None else other
        outputs.append(
            ScoringRequestOutput(
                f"{one.request_id}_{other.request_id}",
                ScoringOutput(0.0 if failed.error is not None else compare(one.outputs.array, other.outputs.array)),
                [*one.prompt_token_ids, *between, *other.prompt_token_ids],
                one.num_cached_tokens + other.num_cached_tokens,
                finished=True,
                error=failed.error,
                metrics=failed.metrics,
            )
        )
    return outputs
