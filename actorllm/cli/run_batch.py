"""`actorllm run-batch`: a file of requests to a file of responses, through one engine in this process.

Owns the two files; the requests in flight are `batch_run`'s. A run that was interrupted goes on where it stopped, because lines
whose custom_id has a response are left out. A bad line has an error as its response and disturbs no other. Lines that failed for
no fault of their own (status 500 and above) are tried again by the next run. It appends their response behind the old one.
Called by the command line.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import IO, Annotated

import orjson
from cyclopts import Parameter

from actorllm.cli.options import see_own_folder
from actorllm.cli.serve import ServedEngineOptions
from actorllm.client.engine import Engine
from actorllm.errors import ActorLLMError, ConfigError

SERVER_ERROR = 500
"""The status of a response from which on the line is not to blame."""


def run_batch(
    input_file: Annotated[Path, Parameter(name=["--input-file", "-i"])],
    output_file: Annotated[Path, Parameter(name=["--output-file", "-o"])],
    /,
    *,
    engine_options: ServedEngineOptions = ServedEngineOptions(),  # noqa: B008 - frozen
    served_model_name: Annotated[list[str] | None, Parameter(consume_multiple=True)] = None,
    max_concurrency: int = 512,
    chat_template: str | None = None,
    chat_template_content_format: str = "auto",
    response_role: str = "assistant",
    tool_call_parser: str | None = None,
    enable_auto_tool_choice: bool | None = None,
    lora_modules: Annotated[list[str] | None, Parameter(consume_multiple=True)] = None,
) -> None:
    """Answer every line of INPUT-FILE, in the OpenAI batch format, with a line of OUTPUT-FILE (needs the extra actorllm[serve]).

    Started again with the same files it goes on with the lines that have no response yet, and tries again those that
    were turned away or that the engine failed (status 503 and 500): the last response of a custom_id counts.

    Parameters
    ----------
    input_file
        Lines with custom_id, method, url and body. An engine that generates text takes /v1/chat/completions and
        /v1/completions; one with --runner pooling /v1/embeddings, /score, /rerank, /classify and /pooling, as far as its
        model can. A body is what the server takes there, without a stream.
    output_file
        Is appended to.
    served_model_name
        What the bodies call the model; default: the name it is loaded by.
    max_concurrency
        Requests in flight at once. The engine makes the batches; this bounds memory.
    chat_template, chat_template_content_format, response_role, tool_call_parser, enable_auto_tool_choice, lora_modules
        As for `actorllm serve`.
    """
    try:
        from actorllm.cli.batch_format import BatchReader
        from actorllm.cli.batch_run import BatchRun
        from actorllm.server.answer_options import AnswerOptions
        from actorllm.server.sampling import Defaults
        from actorllm.server.served_models import ServedModels
    except ModuleNotFoundError as error:
        raise ConfigError(f"run-batch needs more packages ({error.name}): pip install 'actorllm[serve]'") from error
    from tqdm import tqdm

    if max_concurrency < 1:
        raise ConfigError(f"max_concurrency={max_concurrency} must be at least 1")
    classes = (tool_call_parser, engine_options.reasoning_parser, engine_options.io_processor_plugin)
    if any(":" in name for name in classes if name is not None):
        see_own_folder()
    answers = AnswerOptions.of(
        chat_template=chat_template,
        chat_template_content_format=chat_template_content_format,
        response_role=response_role,
    )
    try:
        with input_file.open("rb") as source, _open_output(output_file) as sink:
            if os.path.samestat(os.fstat(source.fileno()), os.fstat(sink.fileno())):
                raise ConfigError(f"{str(input_file)!r} is the input and the output")
            done = _done(sink)
            total = sum(1 for line in source if line.strip())
            source.seek(0)
            engine = engine_options.make_engine()
            model = engine.config.model
            try:
                # The file is as trusted as the command line, so its templates are, too.
                defaults = Defaults.of(model, answers, trusts_chat_templates=True)
                defaults = defaults.with_templates(model.tokenizer, tool_call_parser)
                names = ServedModels(
                    served_model_name or [engine_options.model],
                    lora_modules,
                    adapts=engine.config.lora is not None,
                )
                reader = BatchReader(model, names, defaults, _decoder(engine), lambda: engine.needed_plugin)
                with tqdm(total=total, desc="Requests", dynamic_ncols=True) as progress:
                    num_failed = BatchRun(engine, reader, sink, done, max_concurrency).run(source, progress)
            finally:
                engine.shutdown()
            if num_failed:
                print(f"{num_failed} of {total} requests failed; see `error` in their lines", file=sys.stderr)
    except ActorLLMError:
        raise  # some of them are OSErrors too
    except OSError as error:
        raise ConfigError(f"{error.filename or output_file}: {error.strerror}") from error


def _decoder(engine: Engine) -> Callable[[list[int]], str]:
    def decode(ids: list[int]) -> str:
        return engine.prompts.tokenizer.decode(ids) if engine.config.model.tokenizer is not None else ""

    return decode


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
