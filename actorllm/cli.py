"""The `actorllm` command. Each subcommand is one function; bad input ends with one line on stderr and exit status 2."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, Parameter

from actorllm import __version__
from actorllm.errors import (
    ActorLLMError,
    ConfigError,
    EngineError,
    InvalidPromptError,
    RequestFailedError,
    TransportError,
)

app = App(name="actorllm", version=__version__, help="An LLM engine to embed in async Python, on the command line.")


@app.command
def generate(
    prompt: str,
    /,
    *,
    model: str = "storyteller",
    max_tokens: int = 128,
    min_tokens: int = 0,
    temperature: float | None = None,
    top_p: float | None = None,
    top_k: int = 0,
    min_p: float = 0.0,
    seed: int | None = None,
    stop: Annotated[list[str] | None, Parameter(consume_multiple=False)] = None,
    ignore_eos: bool = False,
    dtype: str = "auto",
    max_model_len: int | None = None,
    topology: str = "process",
    num_threads: int | None = None,
    stats: bool = False,
    timeline: Path | None = None,
) -> None:
    """Complete PROMPT and stream the text to standard output.

    Parameters
    ----------
    prompt
        The text to go on from.
    model
        A bundled model, a folder, or a Hugging Face id.
    temperature
        0 is greedy. Default: what the model's author recommends, else 1.
    top_p
        Default: what the model's author recommends, else 1.
    stop
        A string that ends the text; may be given several times.
    stats
        Print time to first token and tokens per second to standard error.
    timeline
        Write a Chrome trace of scheduler and worker to this file (open it in Perfetto).
    """
    began = time.monotonic()
    _check(prompt, timeline)
    arguments = {"dtype": dtype, "max_model_len": max_model_len, "topology": topology, "num_threads": num_threads}
    engine = _engine(model, arguments)
    params = _sampling_params(
        engine,
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        seed=seed,
        stop=stop,
        ignore_eos=ignore_eos,
    )
    try:
        if timeline is not None:
            engine.start()
            engine.ask_scheduler("start_timeline").result()
        submitted = time.monotonic()
        first, num_tokens = _stream(engine, prompt, params)
        ended = time.monotonic()
        if timeline is not None:
            _write_timeline(timeline, engine.ask_scheduler("take_timeline").result())
    finally:
        engine.shutdown()
    if stats:
        decode_s = ended - first
        rate = f"{(num_tokens - 1) / decode_s:.0f} tokens/s" if num_tokens > 1 and decode_s > 0 else "no rate"
        print(
            f"{num_tokens} tokens; first after {first - submitted:.3f} s ({first - began:.3f} s from the start of the "
            f"engine), then {rate}",
            file=sys.stderr,
        )


def _check(prompt: str, timeline: Path | None) -> None:
    """What would else fail after the work was done, or half-way through the output."""
    from actorllm.request import is_text

    if not is_text(prompt):
        raise InvalidPromptError("the prompt is not valid Unicode; this terminal may use another encoding")
    if timeline is not None:
        try:
            timeline.open("ab").close()
        except OSError as error:
            raise ConfigError(f"the timeline {str(timeline)!r} cannot be written: {error.strerror}") from error


def _stream(engine: Any, prompt: str, params: Any) -> tuple[float, int]:
    """Print the text as it comes. Returns when the first token came, and how many there were."""
    from actorllm.actors.engine_thread import ThreadHost

    host = ThreadHost()
    stream = engine.submit(prompt, params, host=host)
    first: float | None = None
    num_tokens = 0
    print(prompt, end="", flush=True)
    while True:
        output = stream.take()
        if output is None:
            host.run_pending(None)
            continue
        if first is None:
            first = time.monotonic()
        num_tokens += len(output.outputs[0].token_ids)
        print(output.outputs[0].text, end="", flush=True)
        if output.finished:
            print()
            return first, num_tokens


def _engine(model: str, arguments: dict[str, Any]) -> Any:
    from actorllm.config import EngineConfig
    from actorllm.engine import Engine

    return Engine(EngineConfig.from_arguments(model, **arguments))


def _sampling_params(engine: Any, *, temperature: float | None, top_p: float | None, **given: Any) -> Any:
    """What was asked for, else what the model's generation_config.json recommends."""
    import orjson

    from actorllm.request import RequestOutputKind, SamplingParams

    recommended: dict[str, Any] = {}
    file = Path(engine.config.model.path) / "generation_config.json"
    if file.is_file():
        recommended = orjson.loads(file.read_bytes())
    if temperature is None:
        temperature = float(recommended.get("temperature") or 1.0) if recommended.get("do_sample", True) else 0.0
    if top_p is None:
        top_p = float(recommended.get("top_p") or 1.0)
    return SamplingParams(temperature=temperature, top_p=top_p, output_kind=RequestOutputKind.DELTA, **given)


def _write_timeline(path: Path, events: list[dict[str, Any]]) -> None:
    import orjson

    path.write_bytes(orjson.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))


@app.command
def info(model: str = "storyteller", /) -> None:
    """Say what MODEL is and whether this engine can serve it, without loading its weights."""
    from actorllm.config import EngineConfig, read_model_folder
    from actorllm.model.registry import decoder_config

    config = EngineConfig.from_arguments(model)
    path, hf = read_model_folder(model)
    text = hf.get("text_config") or hf
    decoder_config(config.model.architecture, hf)  # raises what the worker would
    size = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    rows = {
        "model": config.model.name,
        "folder": path,
        "architecture": config.model.architecture,
        "layers": text.get("num_hidden_layers"),
        "hidden size": text.get("hidden_size"),
        "heads": f"{text.get('num_attention_heads')} query, {text.get('num_key_value_heads')} key/value",
        "vocabulary": config.model.vocab_size,
        "longest sequence": config.model.max_model_len,
        "end of text": ", ".join(map(str, config.model.eos_token_ids)) or "none",
        "dtype": config.model.dtype,
        "weights": f"{size / 1e6:.1f} MB" if size else "none in the folder",
    }
    for name, value in rows.items():
        print(f"{name:>17}  {value}")


@app.command
def ps(*, json: bool = False) -> None:
    """List the running engines that were given a name, which `AsyncLLM.attach(name)` joins.

    Parameters
    ----------
    json
        Print a JSON list instead of a table.
    """
    from dataclasses import asdict

    import orjson

    from actorllm.actors.rendezvous import running_engines

    engines = running_engines()
    if json:
        print(orjson.dumps([asdict(engine) for engine in engines], option=orjson.OPT_INDENT_2).decode())
        return
    rows: list[tuple[str, ...]] = [
        ("NAME", "PID", "MODEL", "STATE", "UPTIME", "VERSION", "FRONTENDS", "RUNNING", "WAITING")
    ]
    for engine in engines:
        uptime = None if engine.uptime_s is None else _duration(engine.uptime_s)
        counts = (engine.num_frontends, engine.num_running, engine.num_waiting)
        values = (engine.name, engine.pid, engine.model, engine.state, uptime, engine.version, *counts)
        rows.append(tuple("-" if value in (None, "") else str(value) for value in values))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        print("  ".join(value.ljust(width) for value, width in zip(row, widths, strict=True)).rstrip())


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point: exit status 0, 2 for bad input, 1 when the engine failed, 130 after Ctrl-C."""
    try:
        app(arguments, result_action="return_value", exit_on_error=True)
    except ActorLLMError as error:
        print(f"actorllm: {type(error).__name__}: {error}", file=sys.stderr)
        return 1 if isinstance(error, EngineError | TransportError | RequestFailedError) else 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        return 0
    return 0


if __name__ == "__main__":
    sys.exit(main())
