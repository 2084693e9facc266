"""How vectors, labels and scores become the JSON of an answer. Pure; made by `asking`."""

from __future__ import annotations

import base64
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, TypeAlias

import orjson

from actorllm.client.scoring import TextScoring
from actorllm.server.envelope import ApiError
from actorllm.server.random_names import random_name
from actorllm.server.shape import PromptState, metrics_of
from actorllm.server.vectors.bodies import (
    ClassifyRequest,
    EmbeddingRequest,
    Pooled,
    PoolingRequest,
    RerankRequest,
)
from actorllm.types.objective import SLO
from actorllm.types.pooling_outputs import PoolingOutput, PoolingRequestOutput

Outputs: TypeAlias = Sequence[PoolingRequestOutput[PoolingOutput]]


def checked_outputs(outputs: Outputs) -> Outputs:
    """The same. Raises ApiError if one of them has no vector."""
    for output in outputs:
        if output.error is not None:
            raise ApiError(503, output.error.message)
    return outputs


class PooledShape(ABC):
    """One request for vectors, whose answer is one JSON object. model, slo: set before the answer begins."""

    model = ""
    slo: SLO | None = None

    def __init__(self, body: Pooled, prefix: str) -> None:
        self.id = f"{prefix}-{body.request_id or random_name()}"
        self._body = body
        self._created = int(time.time())

    def body_of(self, outputs: Sequence[PoolingRequestOutput[PoolingOutput]]) -> bytes:
        """outputs: of each text, in their order. Raises ApiError if one of them has no vector."""
        checked_outputs(outputs)
        num_tokens = sum(len(output.prompt_token_ids) for output in outputs)
        tree = self._tree(outputs, {"prompt_tokens": num_tokens, "total_tokens": num_tokens})
        if self._body.return_metrics:
            tree["metrics"] = [
                metrics_of(PromptState(output.prompt_token_ids, metrics=output.metrics), self.slo) for output in outputs
            ]
        return orjson.dumps(tree, option=orjson.OPT_SERIALIZE_NUMPY)

    @abstractmethod
    def _tree(
        self, outputs: Sequence[PoolingRequestOutput[PoolingOutput]], usage: dict[str, Any]
    ) -> dict[str, Any]: ...

    def _head(self, usage: dict[str, Any]) -> dict[str, Any]:
        usage = {**usage, "completion_tokens": 0, "prompt_tokens_details": None}
        return {"id": self.id, "object": "list", "created": self._created, "model": self.model, "usage": usage}


class EmbeddingShape(PooledShape):
    def _tree(self, outputs: Sequence[PoolingRequestOutput[PoolingOutput]], usage: dict[str, Any]) -> dict[str, Any]:
        in_base64 = isinstance(self._body, EmbeddingRequest) and self._body.encoding_format == "base64"
        data = []
        for index, output in enumerate(outputs):
            vector = output.outputs.array
            shown: Any = base64.b64encode(vector.astype("<f4").tobytes()).decode() if in_base64 else vector
            data.append({"index": index, "object": "embedding", "embedding": shown})
        return {**self._head(usage), "data": data}


class ClassifyShape(PooledShape):
    def __init__(self, body: ClassifyRequest, prefix: str, labels: Sequence[str]) -> None:
        super().__init__(body, prefix)
        self._labels = labels

    def _tree(self, outputs: Sequence[PoolingRequestOutput[PoolingOutput]], usage: dict[str, Any]) -> dict[str, Any]:
        data = []
        for index, output in enumerate(outputs):
            probs = output.outputs.array
            label = self._labels[int(probs.argmax())]
            data.append({"index": index, "label": label, "probs": probs, "num_classes": probs.size})
        return {**self._head(usage), "data": data}


class PoolingShape(PooledShape):
    def _tree(self, outputs: Sequence[PoolingRequestOutput[PoolingOutput]], usage: dict[str, Any]) -> dict[str, Any]:
        in_base64 = isinstance(self._body, PoolingRequest) and self._body.encoding_format == "base64"
        data = []
        for index, output in enumerate(outputs):
            vector = output.outputs.array
            shown: Any = base64.b64encode(vector.astype("<f4").tobytes()).decode() if in_base64 else vector
            data.append({"index": index, "object": "pooling", "data": shown})
        return {**self._head(usage), "data": data}


class ScoreShape(PooledShape):
    def __init__(self, body: Pooled, prefix: str, scoring: TextScoring) -> None:
        super().__init__(body, prefix)
        self._scoring = scoring

    def _scores(self, outputs: Sequence[PoolingRequestOutput[PoolingOutput]]) -> list[float]:
        return [output.outputs.score for output in self._scoring.outputs(outputs, None)]

    def _tree(self, outputs: Sequence[PoolingRequestOutput[PoolingOutput]], usage: dict[str, Any]) -> dict[str, Any]:
        data = [{"index": i, "object": "score", "score": value} for i, value in enumerate(self._scores(outputs))]
        return {**self._head(usage), "data": data}


class RerankShape(ScoreShape):
    def __init__(self, body: RerankRequest, prefix: str, scoring: TextScoring, documents: list[str]) -> None:
        super().__init__(body, prefix, scoring)
        self._most = body.top_n or len(documents)
        self._shows_documents = body.return_documents is not False
        self._documents = documents

    def _tree(self, outputs: Sequence[PoolingRequestOutput[PoolingOutput]], usage: dict[str, Any]) -> dict[str, Any]:
        results = []
        best_first = sorted(enumerate(self._scores(outputs)), key=lambda entry: -entry[1])
        for index, value in best_first[: self._most]:
            result: dict[str, Any] = {"index": index, "relevance_score": value}
            if self._shows_documents:
                result["document"] = {"text": self._documents[index], "multi_modal": None}
            results.append(result)
        return {"id": self.id, "model": self.model, "usage": usage, "results": results}
