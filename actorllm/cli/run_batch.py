"""`actorllm run-batch`: a file of requests to a file of responses, through one engine in this process.

Owns the two files and which requests are in flight. Every line that is written is whole, in the order of completion. A run that
was interrupted goes on where it stopped, because lines whose custom_id has a response are left out. A bad line has an
error as its response and disturbs no other. Lines that failed for no fault of their own (status 500 and above) are tried again
by the next run. It appends their response behind the old one. Called by the command line.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Annotated, Any

import orjson
from cyclopts import Parameter

from actorllm.actors.engine_thread import ThreadHost
from actorllm.cli.batch_format import BatchRequest, custom_id_of, error_line, parse_line, success_line
from actorllm.cli.options import SeededEngineFlags
from actorllm.client.engine import Engine
from actorllm.client.stream import RequestStream
from actorllm.errors import ActorLLMError, ConfigError, InvalidParameterError, RequestError

SERVER_ERROR = 500
"""The status of a response from which on the line is not to blame."""


def run_batch(
    input_file: Annotated[Path, Parameter(name=["--input-file", "-i"])],
    output_file: Annotated[Path, Parameter(name=["--output-file", "-o"])],
    /,
    *,
    engine_options: SeededEngineFlags = SeededEngineFlags(),  # noqa: B008 - frozen
    served_model_name: str | None = None,
    max_concurrency: int = 512,
) -> None:
    """Answer every line of INPUT-FILE, in the OpenAI batch format, with a line of OUTPUT-FILE.

    Started again with the same files it goes on with the lines that have no response yet, and tries again those that
    were turned away or that the engine failed (status 503 and 500): the last response of a custom_id counts.

    Parameters
    ----------
    input_file
        Lines with custom_id, method, url (/v1/chat/completions or /v1/completions) and body.
    output_file
        Is appended to.
    served_model_name
        What the bodies call the model; default: the name it is loaded by.
    max_concurrency
        Requests in flight at once. The engine makes the batches; this bounds memory.
    """
    from tqdm import tqdm

    if max_concurrency < 1:
        raise ConfigError(f"max_concurrency={max_concurrency} must be at least 1")
    try:
        with input_file.open("rb") as source, _open_output(output_file) as sink:
            if os.path.samestat(os.fstat(source.fileno()), os.fstat(sink.fileno())):
                raise ConfigError(f"{str(input_file)!r} is the input and the output")
            done = _done(sink)
            total = sum(1 for line in source if line.strip())
            source.seek(0)
            engine = engine_options.make_engine()
            name = served_model_name or engine_options.model
            try:
                with tqdm(total=total, desc="Requests", dynamic_ncols=True) as progress:
                    num_failed = _Run(engine, name, sink, done, max_concurrency).run(source, progress)
            finally:
                engine.shutdown()
            if num_failed:
                print(f"{num_failed} of {total} requests failed; see `error` in their lines", file=sys.stderr)
    except ActorLLMError:
        raise  # some of them are OSErrors too
    except OSError as error:
        raise ConfigError(f"{error.filename or output_file}: {error.strerror}") from error


def _open_output(path: Path) -> IO[bytes]:
    return path.open("r+b" if path.exists() else "w+b")


def _done(sink: IO[bytes]) -> set[str]:
    """The ids (of lines without one: the errors) that have a response, but for those that another try may answer.

    Half a line at the end is cut off.
    """
    done: set[str] = set()
    end = 0
    for number, line in enumerate(sink, 1):
        if not line.endswith(b"\n"):
            break
        end += len(line)
        if not line.strip():
            continue
        try:
            tree = orjson.loads(line)
            found = tree["custom_id"]
            told = found if found is not None else tree["error"]["error"]["message"]
            if tree["response"]["status_code"] < SERVER_ERROR:
                done.add(told)
        except (orjson.JSONDecodeError, KeyError, TypeError) as error:
            raise ConfigError(
                f"line {number} of the output is no response of a batch; give a file that does not exist yet"
            ) from error
    sink.truncate(end)
    sink.seek(end)
    return done


class _Run:
    """One run over the input."""

    def __init__(self, engine: Engine, model: str, sink: IO[bytes], done: set[str], max_concurrency: int) -> None:
        self._engine = engine
        self._model = model
        self._sink = sink
        self._done = done
        self._max_concurrency = max_concurrency
        self._host = ThreadHost()
        self._in_flight: dict[int, tuple[BatchRequest, list[RequestStream]]] = {}
        self._num_failed = 0

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
        try:
            if is_repeated:
                raise InvalidParameterError(f"custom_id={custom_id!r:.80} occurs in an earlier line too")
            request = parse_line(line, self._engine.config.model.sampling_defaults, self._model)
            streams = [
                self._engine.submit(
                    prompt,
                    request.params,
                    host=self._host,
                    priority=request.priority,
                    tokenization_kwargs=request.tokenization,
                )
                for prompt in request.prompts
            ]
        except RequestError as error:
            self._fail(number, None if is_repeated else custom_id, error)
            return False
        self._in_flight[number] = request, streams
        return True

    def _finish(self, number: int, request: BatchRequest, streams: list[RequestStream]) -> None:
        try:
            outputs = [stream.take() for stream in streams]
        except RequestError as error:
            self._fail(number, request.custom_id, error)
        else:
            whole = [output for output in outputs if output is not None]
            self._sink.write(success_line(request, whole, self._model, self._decode))

    def _decode(self, ids: list[int]) -> str:
        return self._engine.prompts.tokenizer.decode(ids)

    def _fail(self, number: int, custom_id: str | None, error: RequestError) -> None:
        """A line without an id of its own is called by its error when the run goes on another time."""
        message = f"line {number}: {error}"
        if custom_id is None and message in self._done:
            return
        self._num_failed += 1
        self._sink.write(error_line(custom_id, error, message))
        self._sink.flush()
