"""`PoolingStream`: one pooling request as its caller sees it. A `RequestStream` in all but its output, which is one
`PoolingRequestOutput`. That class owns how it waits, is aborted, times out and keeps the engine alive.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from actorllm.actors.frontend import Delta
from actorllm.client.stream import Completion, Mailbox, RequestStream
from actorllm.errors import RequestFailedError
from actorllm.types.outputs import RequestOutput
from actorllm.types.pooling_outputs import PoolingAborted, PoolingOutput, PoolingRequestOutput, Vector, shaped
from actorllm.types.pooling_params import Pooling

NO_VECTOR: Vector = np.zeros(0, np.float32)
NO_VECTOR.flags.writeable = False


class VectorStream(RequestStream):
    """Keeps the vector that comes with the end."""

    vector: Vector | None = None

    def _add_pending(self, pending: deque[tuple[int, Delta]]) -> dict[int, Completion]:
        for _, delta in list(pending):
            if delta.vector is not None:
                self.vector = delta.vector
        return super()._add_pending(pending)


class PoolingStream:
    """Asynchronous iterator over the one output of a pooling request; also an async context manager."""

    def __init__(self, outputs: VectorStream, pooling: Pooling) -> None:
        self._outputs = outputs
        self._pooling = pooling
        self.last_output: RequestOutput | None = None
        """What it would have given if it were a request for text: its metrics, and why it has ended."""

    @property
    def request_stream(self) -> RequestStream:
        """The same request for callers that only abort it, or ask whether it has ended."""
        return self._outputs

    @property
    def request_id(self) -> str:
        """The id of the request."""
        return self._outputs.request_id

    @property
    def prompt_token_ids(self) -> list[int]:
        """Known once there is an output."""
        return self._outputs.prompt_token_ids

    @property
    def has_ended(self) -> bool:
        """Whether its output, or its error, is there to be taken or was taken."""
        return self._outputs.has_ended

    @property
    def num_open(self) -> int:
        """1 until then."""
        return int(not self.has_ended)

    @property
    def mailbox(self) -> Mailbox:
        """For callers that take its output otherwise than by waiting for it."""
        return self._outputs.mailbox

    def __aiter__(self) -> PoolingStream:
        return self

    async def __anext__(self) -> PoolingRequestOutput[PoolingOutput]:
        return self._pooled(await self._outputs.__anext__())

    def take(self) -> PoolingRequestOutput[PoolingOutput] | None:
        """The output; None when there is none (yet, or any more).

        Raises:
            RequestError, EngineError: what the request failed of.
        """
        output = self._outputs.take()
        return None if output is None else self._pooled(output)

    def _pooled(self, output: RequestOutput) -> PoolingRequestOutput[PoolingOutput]:
        self.last_output = output
        vector, error = self._outputs.vector, None
        if vector is None:
            end = output.outputs[0]
            if end.finish_reason != "abort":
                raise RequestFailedError("the request ended without a vector")
            reason = "its deadline has passed" if end.stop_reason is not None else "it was aborted"
            error = PoolingAborted(
                str(end.stop_reason or "abort"), f"the request ended without a vector: {reason}", True
            )
        return PoolingRequestOutput(
            output.request_id,
            PoolingOutput(NO_VECTOR if vector is None else shaped(vector, self._pooling, output.prompt_token_ids)),
            output.prompt_token_ids,
            output.num_cached_tokens,
            finished=True,
            error=error,
            metrics=output.metrics,
        )

    def failed(self, error: Exception) -> PoolingRequestOutput[PoolingOutput]:
        """The output of a request that has raised an error, for callers that are not to be raised at.

        Arguments:
            error: what it has raised.
        """
        told = PoolingAborted("error", str(error))
        return PoolingRequestOutput(
            self.request_id, PoolingOutput(NO_VECTOR), self.prompt_token_ids, 0, finished=True, error=told
        )

    def abort(self) -> None:
        """End the request where it is. Idempotent, from any thread."""
        self._outputs.abort()

    async def aclose(self) -> None:
        """End the request; nothing comes out of this stream."""
        await self._outputs.aclose()

    async def __aenter__(self) -> PoolingStream:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.aclose()
