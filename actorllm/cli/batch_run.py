"""`BatchRun`: the lines of a batch file through an engine of this process, so many at a time.

Owns which requests are in flight. Every line that is written is whole, in the order of completion. Called by `run_batch`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import IO, Any, TypeAlias

from actorllm.actors.engine_thread import ThreadHost
from actorllm.cli.batch_format import (
    BatchReader,
    BatchRequest,
    custom_id_of,
    error_line,
    refusal_of_error,
    repeated,
    success_line,
)
from actorllm.client.engine import Engine
from actorllm.client.pooling_stream import PoolingStream
from actorllm.client.stream import RequestStream
from actorllm.errors import RequestError
from actorllm.server.envelope import ApiError
from actorllm.server.vectors.asking import PooledAsked

Stream: TypeAlias = RequestStream | PoolingStream

MAX_WARNINGS = 100
"""Different ones; further ones are not printed."""


class BatchRun:
    """One run over the input."""

    def __init__(
        self, engine: Engine, reader: BatchReader, sink: IO[bytes], done: set[str], max_concurrency: int
    ) -> None:
        self._engine = engine
        self._reader = reader
        self._sink = sink
        self._done = done
        self._max_concurrency = max_concurrency
        self._host = ThreadHost()
        self._in_flight: dict[int, tuple[BatchRequest, list[Stream]]] = {}
        self._num_failed = 0
        self._warned: set[str] = set()

    def run(self, source: IO[bytes], progress: Any) -> int:
        """Returns how many requests failed in this run. progress: is told of every line that is done, or was before."""
        lines = self._lines(source)
        while True:
            while len(self._in_flight) < self._max_concurrency and (taken := next(lines, None)) is not None:
                if not self._start(*taken):
                    progress.update()
            if not self._in_flight:
                return self._num_failed
            ended = [n for n, (_, streams) in self._in_flight.items() if all(stream.has_ended for stream in streams)]
            for number in ended:
                self._finish(number, *self._in_flight.pop(number))
                progress.update()
            if ended:
                self._sink.flush()
            else:
                self._host.run_pending(None)

    def _lines(self, source: IO[bytes]) -> Iterator[tuple[int, bytes, str | None, bool]]:
        """`(number, line, custom_id if it has one, whether it had one before)`."""
        seen: set[str] = set()
        for number, line in enumerate(source, 1):
            if line.strip():
                custom_id = custom_id_of(line)
                yield number, line, custom_id, custom_id in seen
                if custom_id is not None:
                    seen.add(custom_id)

    def _start(self, number: int, line: bytes, custom_id: str | None, is_repeated: bool) -> bool:
        """Whether the line is in flight now; else it is done."""
        if custom_id in self._done and not is_repeated:
            return False
        body = None
        try:
            if is_repeated:
                raise repeated(custom_id)
            request = self._reader.read(line)
            body = request.body
            streams = self._submitted(request)
        except (RequestError, ApiError) as error:
            self._fail(number, None if is_repeated else custom_id, refusal_of_error(error, body))
            return False
        self._warn(number, request)
        self._in_flight[number] = request, streams
        return True

    def _submitted(self, request: BatchRequest) -> list[Stream]:
        asked, streams = request.asked, []
        submit: Any
        params: Sequence[Any]
        if isinstance(asked, PooledAsked):
            submit, params = self._engine.encode, asked.params
        else:
            submit, params = self._engine.submit, [asked.params] * len(asked.prompts)
        try:
            for prompt, how in zip(asked.prompts, params, strict=True):
                stream: Stream = submit(prompt, how, host=self._host, **asked.extras.arguments)
                streams.append(stream)
        except BaseException:
            for stream in streams:
                stream.abort()
            raise
        return streams

    def _warn(self, number: int, request: BatchRequest) -> None:
        """What has no effect is told once, and not for each of a million lines."""
        for warning in request.asked.extras.warnings:
            if warning not in self._warned and len(self._warned) < MAX_WARNINGS:
                self._warned.add(warning)
                print(f"line {number}: {warning}", file=sys.stderr)

    def _finish(self, number: int, request: BatchRequest, streams: list[Stream]) -> None:
        try:
            outputs = [output for stream in streams if (output := stream.take()) is not None]
            made = success_line(request, outputs)
        except (RequestError, ApiError) as error:
            self._fail(number, request.custom_id, refusal_of_error(error, request.body))
        else:
            self._sink.write(made)

    def _fail(self, number: int, custom_id: str | None, error: ApiError) -> None:
        """A line without an id of its own is called by its error when the run goes on another time."""
        error.message = f"line {number}: {error.message}"
        if custom_id is None and error.tree()["error"]["message"] in self._done:
            return
        self._num_failed += 1
        self._sink.write(error_line(custom_id, error))
        self._sink.flush()
