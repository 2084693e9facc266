"""`actorllm calibrate`: fit a step-time model to an engine's own steps, and say how good it is. Called by the command line."""

from __future__ import annotations

import math
from pathlib import Path

from actorllm.cli.options import EngineFlags, check_writable
from actorllm.errors import ConfigError


def calibrate(
    *,
    engine_options: EngineFlags = EngineFlags(),  # noqa: B008 - frozen
    output: Path | None = None,
    recording: Path | None = None,
    duration: float = 30.0,
    plot: Path | None = None,
    name: str | None = None,
    seed: int = 0,
) -> None:
    """Fit a model of what steps take, for the simulator and for policies (--step-model).

    The engine runs for some seconds at all batch sizes that it can hold; or the steps of a run that was recorded before
    (record="FILE") are read. What is printed is the error on steps that the model was not fitted to.

    Parameters
    ----------
    output
        Write the model to this file, as JSON.
    recording
        Read the steps of this file, and start no engine.
    duration
        Seconds for which the engine runs.
    plot
        Write the parity plot to this file: .svg or .html.
    name
        Of the model.
    seed
        Of the lengths of the requests.
    """
    from actorllm.scheduling.cost_model import to_json
    from actorllm.slo.live.calibrate import calibrate_engine, calibrate_recording
    from actorllm.slo.parity import parity_svg, parity_text
    from actorllm.slo.step_fit import errors_by_size, told_by_size

    if plot is not None and plot.suffix not in (".svg", ".html"):
        raise ConfigError(f"plot={str(plot)!r} must end in .svg or .html")
    check_writable(output=output, plot=plot)
    if recording is not None:
        given = engine_options.changed()
        if given:
            raise ConfigError(f"a recording has its own engine: {', '.join(given)} cannot be given with --recording")
        found = calibrate_recording(recording, name)
    else:
        import anyio

        async def run() -> None:
            nonlocal found
            found = await calibrate_engine(
                engine_options.model, duration, seed=seed, name=name, **engine_options.arguments()
            )

        anyio.run(run)
    fit = found.fit
    print(parity_text(fit))
    print()
    rows: dict[str, object] = {
        "model": fit.model.name,
        "steps": f"{fit.num_steps}, of them {fit.measured.size} held out",
        "MAPE": f"{fit.mape:.1%} on those held out",
        "bias": f"{fit.bias:+.1%}",
        "between steps": f"{fit.model.gap_s * 1e3:.3f} ms; {fit.model.launch_s * 1e3:.3f} ms to an idle worker",
        "on the way": f"{fit.model.submit_s * 1e3:.3f} ms to the scheduler, {fit.model.deliver_s * 1e3:.3f} ms to the client",
        "regimes": "; ".join(
            "all steps"
            if r.max_tokens == math.inf and len(fit.model.regimes) == 1
            else f"up to {r.max_tokens:g} tokens"
            for r in fit.model.regimes
        ),
    }
    if math.isfinite(found.repeatability):
        rows["noise"] = f"{found.repeatability:.1%} between equal decode steps in a row; no model is better than that"
    for label, value in rows.items():
        print(f"{label:>13}  {value}")
    # The mean hides kinds that are few: decode steps of large batches, steps with prompts.
    print(f"\n{'held-out steps':>28}  {'STEPS':>7}  {'ERROR':>7}  {'BIAS':>7}")
    for size, num, error, bias in told_by_size(errors_by_size(fit.features, fit.measured, fit.predicted)):
        print(f"{size:>28}  {num:>7}  {error:>7}  {bias:>7}")
    for warning in fit.warnings:
        print(f"{'warning':>13}  {warning}")
    if output is not None:
        output.write_text(to_json(fit.model) + "\n")
    if plot is not None:
        svg = parity_svg(fit)
        page = f'<!doctype html><meta charset="utf-8"><title>{fit.model.name}</title>\n{svg}'
        plot.write_text(page if plot.suffix == ".html" else svg)
