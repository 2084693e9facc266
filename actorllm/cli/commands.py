"""The commands by name. `generate`, `info` and `ps` are here, the others in modules of their own. Needs the extra `cli`."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any, Literal

from cyclopts import App

from actorllm import __version__
from actorllm.cli.options import EngineFlags, GenerationRun, SamplingOptions
from actorllm.errors import ConfigError, InvalidPromptError

app = App(name="actorllm", version=__version__, help="An LLM engine to embed in async Python, on the command line.")
app.command("actorllm.cli.chat:chat")
app.command("actorllm.cli.serve:serve")
app.command("actorllm.cli.run_batch:run_batch")
app.command("actorllm.cli.bench:bench", name="bench")
app.command("actorllm.cli.roofline:roofline")
app.command("actorllm.cli.predict:predict")
app.command("actorllm.cli.laboratory:simulate")
app.command("actorllm.cli.laboratory:sweep")
app.command("actorllm.cli.leaderboard:leaderboard")
app.command("actorllm.cli.laboratory:report")
app.command("actorllm.cli.laboratory:explain")
app.command("actorllm.cli.calibrate:calibrate")
app.command("actorllm.cli.trace:trace", name="trace")
app.command("actorllm.cli.replay:replay")
app.command("actorllm.cli.policy:policy", name="policy")
app.command("actorllm.cli.node:node")
app.command("actorllm.cli.doctor:doctor", name="doctor")


@app.command
def generate(
    prompt: str,
    /,
    *,
    engine_options: EngineFlags = EngineFlags(),  # noqa: B008 - frozen
    sampling: SamplingOptions = SamplingOptions(),  # noqa: B008 - frozen
    stats: bool = False,
    timeline: Path | None = None,
) -> None:
    """Complete PROMPT and stream the text to standard output.

    There are 128 tokens at most, unless the model's author or --max-tokens says otherwise.

    Parameters
    ----------
    prompt
        The text to go on from.
    stats
        Print time to first token and tokens per second to standard error.
    timeline
        Write a Chrome trace of scheduler and worker to this file (open it in Perfetto).
    """
    began = time.monotonic()
    _check(prompt, timeline)
    engine = engine_options.make_engine()
    params = sampling.params(engine, 128, output_kind=_delta())
    try:
        if timeline is not None:
            engine.start()
            engine.ask_scheduler("start_timeline").result()
        answer = GenerationRun(engine, prompt, params)
        print(prompt, end="", flush=True)
        for output in answer:
            print(output.outputs[0].text, end="", flush=True)
        print()
        figures = answer.figures(began)
        if timeline is not None:
            _write_timeline(timeline, engine.ask_scheduler("take_timeline").result())
    finally:
        engine.shutdown()
    if stats:
        print(figures, file=sys.stderr)


def _delta() -> Any:
    from actorllm.types.params import RequestOutputKind

    return RequestOutputKind.DELTA


def _check(prompt: str, timeline: Path | None) -> None:
    """What would else fail after the work was done, or half-way through the output."""
    from actorllm.types.params import is_text

    if not is_text(prompt):
        raise InvalidPromptError("the prompt is not valid Unicode; this terminal may use another encoding")
    if timeline is not None:
        try:
            timeline.open("ab").close()
        except OSError as error:
            raise ConfigError(f"the timeline {str(timeline)!r} cannot be written: {error.strerror}") from error


def _write_timeline(path: Path, events: list[dict[str, Any]]) -> None:
    import orjson

    path.write_bytes(orjson.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))


@app.command
def info(
    model: str = "storyteller",
    /,
    *,
    quantization: Literal["int8", "int4", "int4-g64", "int4-g128", "compressed-tensors", "gptq", "awq", "fp8", "gguf"]
    | None = None,
    kv_cache_dtype: Literal["auto", "int8"] = "auto",
    device: bool = False,
) -> None:
    """Say what MODEL is, whether this engine can serve it and in which way, without loading its weights.

    Of quantized weights the first layer is read.

    Parameters
    ----------
    quantization
        As for an engine: say what the weights become.
    kv_cache_dtype
        As for an engine: say what a token takes in the KV cache.
    device
        Say also what the checks of this machine's GPU have found, for all models; `actorllm doctor` runs them.
    """
    from actorllm.config import EngineConfig, read_model_folder
    from actorllm.model import backends
    from actorllm.model.families.decoder_config import DecoderConfig
    from actorllm.model.quantization.description import described, described_cache, described_changes, weight_files
    from actorllm.model.registry import model_plan, way_of

    path, hf = read_model_folder(model)
    length: int | None = None
    try:
        config = EngineConfig.from_arguments(model, quantization=quantization, kv_cache_dtype=kv_cache_dtype)
        length = config.model.max_model_len
    except ConfigError:  # no length is said: what is wrong with the model beside that comes first
        config = EngineConfig.from_arguments(
            model, quantization=quantization, kv_cache_dtype=kv_cache_dtype, max_model_len=1
        )
    backend = backends.load(config.device)
    plan = model_plan(config.model, hf, backend)  # raises what the worker would
    size = sum(file.stat().st_size for file in weight_files(path, hf))
    heads = f"{plan.num_heads} query, {plan.num_kv_heads} key/value"
    if isinstance(plan, DecoderConfig) and plan.latent is not None:
        heads = f"{plan.num_heads} query, over one latent of {plan.latent.width} numbers"
    if isinstance(plan, DecoderConfig) and plan.recurrent is not None:
        states = f"{len(plan.recurrent_layers)} recurrent layers"
        heads = f"{heads}, in {len(plan.attention_layers)} layers; {states}" if plan.attention_layers else states
    rows = {
        "model": config.model.name,
        "folder": path,
        "architecture": config.model.architecture,
        "runs through": way_of(plan, config.model, hf, backend),
        "layers": plan.num_layers,
        "hidden size": plan.hidden_size,
        "heads": heads,
        "vocabulary": config.model.vocab_size,
        "longest sequence": length or "not said by the model; set max_model_len",
        "end of text": ", ".join(map(str, config.model.eos_token_ids)) or "none",
        "dtype": config.model.dtype,
        "weights": f"{size / 1e6:.1f} MB" if size else "none in the folder",
    }
    rows |= described(plan, config.model)
    if size and (changes := described_changes(plan, config.model)):
        rows["change of weights"] = changes
    if config.model.pooler is None:
        rows["KV cache"] = described_cache(plan, config)
    if (pooler := config.model.pooler) is not None:
        scaled = ", scaled to length 1" if pooler.use_activation else ""
        rows["vectors"] = f"{pooler.embedding_size} numbers, pooled by {pooler.pooling_type}{scaled}"
    if device:
        from actorllm.cli.doctor import remembered_checks

        rows |= remembered_checks()
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

    from actorllm.attach.rendezvous import running_engines

    engines = running_engines()
    if json:
        print(orjson.dumps([asdict(engine) for engine in engines], option=orjson.OPT_INDENT_2).decode())
        return
    rows: list[tuple[str, ...]] = [
        ("NAME", "PID", "MODEL", "STATE", "UPTIME", "VERSION", "REPLICAS", "FRONTENDS", "RUNNING", "WAITING")
    ]
    for engine in engines:
        uptime = None if engine.uptime_s is None else _duration(engine.uptime_s)
        counts = (engine.num_replicas, engine.num_frontends, engine.num_running, engine.num_waiting)
        values = (engine.name, engine.pid, engine.model, engine.state, uptime, engine.version, *counts)
        rows.append(tuple("-" if value in (None, "") else str(value) for value in values))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        print("  ".join(value.ljust(width) for value, width in zip(row, widths, strict=True)).rstrip())


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}"
