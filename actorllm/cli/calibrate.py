"""`actorllm calibrate`: fit a step-time model to an engine's own steps, and say how good it is. Called by the command line."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from actorllm.cli.options import EngineFlags, check_writable
from actorllm.errors import ConfigError

if TYPE_CHECKING:
    from actorllm.scheduling.cost_model import LinearModel, Regime
    from actorllm.slo.kernel_profiles import KernelProfile
    from actorllm.slo.step_fit import StepError


def calibrate(
    *,
    engine_options: EngineFlags = EngineFlags(),  # noqa: B008 - frozen
    output: Path | None = None,
    recording: Path | None = None,
    run: str | None = None,
    num_blocks: int | None = None,
    profile: Path | None = None,
    layers: int | None = None,
    profile_tp: int | None = None,
    overhead: float = 0.0,
    model_config: Path | None = None,
    profile_engine: str | None = None,
    profile_dtype: str | None = None,
    gpu: str | None = None,
    duration: float = 30.0,
    plot: Path | None = None,
    name: str | None = None,
    seed: int = 0,
) -> None:
    """Fit a model of what steps take, for the simulator and for policies (--step-model).

    The engine runs for some seconds at all batch sizes that it can hold; or the steps of a run that was recorded before
    (record="FILE") are read; or only the times of requests, which another engine was measured by. What is printed is the error on
    what the model was not fitted to.

    Parameters
    ----------
    output
        Write the model to this file, as JSON.
    recording
        Read the steps of this file, and start no engine.
    run
        Read when requests came and went, and start no engine: JSON of `vllm bench serve --save-result --save-detailed`, a report of
        guidellm, or lines of LLMServingSim. The limits and the policy of that engine may be given, too.
    num_blocks
        KV blocks of the engine of that run.
    profile
        Read measured steps from this CSV file, and start no engine. The model has a table for each kind of step. Or read measured
        kernels from a CSV file or a folder of them; the model adds them up.
    layers
        Of the model whose kernels were measured.
    profile_tp
        GPUs that share a kernel, where the profile has several numbers of them.
    overhead
        Seconds of every step that are in no kernel of the profile.
    model_config
        config.json of the model whose step is added up, or its folder. For profiles that have kernels by shape, such as the folder
        of a GPU of AIConfigurator.
    profile_engine
        The engine whose kernels are read, where such a profile has several: vllm (the default), sglang, trtllm.
    profile_dtype
        Of the products of such a profile: bfloat16 (the default), fp8.
    gpu
        Its data sheet has the bandwidth for norms, rotary embeddings and activations, which such a profile lacks.
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
    from actorllm.slo.kernel_profiles import is_kernel_profile
    from actorllm.slo.kernel_shapes import is_shape_profile
    from actorllm.slo.live.calibrate import calibrate_engine, calibrate_recording
    from actorllm.slo.parity import parity_svg, parity_text
    from actorllm.slo.step_fit import errors_by_size

    # What cannot be written is said before anything runs.
    if plot is not None and plot.suffix not in (".svg", ".html"):
        raise ConfigError(f"plot={str(plot)!r} must end in .svg or .html")
    # So is what belongs to a run of another engine only.
    if run is not None:
        if recording is not None or profile is not None or plot is not None:
            raise ConfigError(f"run={run!r} is read on its own: leave out recording, profile and plot")
        check_writable(output=output)
        _of_run(run, num_blocks, engine_options, name, output)
        return
    if num_blocks is not None:
        raise ConfigError(f"num-blocks={num_blocks} is of the engine of a run: give --run, too")
    # A profile needs no engine and has a model of another kind, so it goes its own way.
    if profile is not None:
        if recording is not None or plot is not None or engine_options.changed():
            raise ConfigError(
                f"profile={str(profile)!r} is read on its own: leave out recording, plot and options of an engine"
            )
        check_writable(output=output)
        # Which of the options a profile takes depends on what it has: steps, kernels by name, or kernels by shape.
        of_shapes = {
            "model-config": model_config,
            "profile-engine": profile_engine,
            "profile-dtype": profile_dtype,
            "gpu": gpu,
        }
        given = [name for name, value in of_shapes.items() if value is not None]
        if is_shape_profile(profile):
            options = {"engine": profile_engine or "vllm", "dtype": profile_dtype or "bfloat16", "gpu": gpu}
            _of_shapes(profile, name, output, layers, profile_tp or 1, overhead, model_config, options)
        elif given:
            raise ConfigError(f"profile={str(profile)!r} has no kernels by shape: leave out {', '.join(given)}")
        elif is_kernel_profile(profile):
            _of_kernels(profile, name, output, layers, profile_tp, overhead)
        elif layers is not None or profile_tp is not None or overhead:
            raise ConfigError(f"profile={str(profile)!r} has steps: layers, profile-tp and overhead are of kernels")
        else:
            _of_profile(profile, name, output)
        return
    # Everything else is fitted to steps of an engine, which has no kernels.
    of_kernels = (layers, profile_tp, model_config, profile_engine, profile_dtype, gpu)
    if overhead or any(value is not None for value in of_kernels):
        raise ConfigError("layers, gpu, model-config, overhead and profile-... are of kernels: give --profile, too")
    check_writable(output=output, plot=plot)
    # Steps of a run that was recorded, or of an engine that runs for it now.
    if recording is not None:
        given = engine_options.changed()
        if given:
            raise ConfigError(f"a recording has its own engine: {', '.join(given)} cannot be given with --recording")
        found = calibrate_recording(recording, name)
    else:
        import anyio

        async def calibrated() -> None:
            nonlocal found
            found = await calibrate_engine(
                engine_options.model, duration, seed=seed, name=name, **engine_options.arguments()
            )

        anyio.run(calibrated)
    # What is told of both is the error on steps that the model was not fitted to.
    fit = found.fit
    # As text here; the plot and the model go to files below.
    print(parity_text(fit))
    print()
    rows: dict[str, object] = {
        "model": fit.model.name,
        "steps": f"{fit.num_steps}, of them {fit.measured.size} held out",
        "MAPE": f"{fit.mape:.1%} on those held out",
        "bias": f"{fit.bias:+.1%}",
        "between steps": f"{fit.model.gap_s * 1e3:.3f} ms; {fit.model.launch_s * 1e3:.3f} ms to an idle worker",
        "on the way": f"{fit.model.submit_s * 1e3:.3f} ms to the scheduler, {fit.model.deliver_s * 1e3:.3f} ms to the client",
        "regimes": _told_of_regimes(fit.model),
    }
    if math.isfinite(found.repeatability):
        rows["noise"] = f"{found.repeatability:.1%} between equal decode steps in a row; no model is better than that"
    for label, value in rows.items():
        print(f"{label:>13}  {value}")
    _print_errors(errors_by_size(fit.features, fit.measured, fit.predicted))
    # What the steps could not tell, such as the cost of prompts in a run without any.
    for warning in fit.warnings:
        print(f"{'warning':>13}  {warning}")
    # Files come last: what is printed holds even if a disk is full.
    if output is not None:
        output.write_text(to_json(fit.model) + "\n")
    if plot is not None:
        svg = parity_svg(fit)
        page = f'<!doctype html><meta charset="utf-8"><title>{fit.model.name}</title>\n{svg}'
        plot.write_text(page if plot.suffix == ".html" else svg)


def _told_of_regimes(model: LinearModel) -> str:
    """For which steps there are coefficients of their own."""

    def told(regimes: tuple[Regime, ...]) -> str:
        return "all" if len(regimes) == 1 else "; ".join(f"up to {r.max_tokens:g} tokens" for r in regimes)

    if not model.decode_regimes:
        return f"{told(model.regimes)} steps" if len(model.regimes) == 1 else told(model.regimes)
    return f"with prompts: {told(model.regimes)}; without: {told(model.decode_regimes)}"


def _number(name: str, value: Any) -> int:
    try:
        return int(value)
    except ValueError:
        raise ConfigError(f"{name}={value!r} must be a number of tokens for a run of another engine") from None


LIMITS = ("block_size", "max_num_seqs", "max_num_batched_tokens", "max_model_len")
"""Of the options of an engine, those that say what a run of another one was limited by."""


def _of_run(
    run: str, num_blocks: int | None, engine_options: EngineFlags, name: str | None, output: Path | None
) -> None:
    import numpy as np

    from actorllm.scheduling.cost_model import FEATURES, to_json
    from actorllm.slo import calibration
    from actorllm.slo.measured_runs import read_run
    from actorllm.slo.simulator import EngineShape

    # The engine as far as one knows it.
    given = engine_options.arguments()
    policy = given.get("scheduling_policy", "fcfs")
    limits: dict[str, Any] = {limit: _number(limit, given[limit]) for limit in LIMITS if limit in given}
    if others := [one for one in engine_options.changed() if one not in (*LIMITS, "scheduling_policy")]:
        raise ConfigError(f"run={run!r} is of another engine: {', '.join(others)} cannot be given with it")
    if num_blocks is None:
        raise ConfigError(f"run={run!r}: say how many KV blocks its engine had, with --num-blocks")
    shape = EngineShape(num_blocks=num_blocks, **limits)
    if num_blocks * shape.block_size < shape.max_model_len:
        raise ConfigError(
            f"{num_blocks} blocks of {shape.block_size} hold less than max_model_len={shape.max_model_len}"
        )
    # Every fifth request is not fitted to, and tells the error.
    measured = read_run(run)
    measured.check_fits(shape.max_model_len)
    start = calibration.guess(measured.workload, measured.timeline, name or Path(run).stem)
    is_fitted = np.arange(len(measured.workload)) % 5 != 4
    found = calibration.fit_to_run(
        measured.workload, measured.timeline, shape, start, is_fitted, policy=policy, max_runs=calibration.MAX_RUNS
    )
    skipped = f", {measured.num_skipped} left out" if measured.num_skipped else ""
    print(f"{'model':>16}  {found.model.name}")
    print(f"{'requests':>16}  {is_fitted.size}, of them {int((~is_fitted).sum())} held out{skipped}")
    print(f"{'simulations':>16}  {found.num_runs}")
    (regime,) = found.model.regimes
    for feature, seconds in zip(FEATURES, regime.coefficients, strict=True):
        if seconds:
            print(f"{feature.replace('_', ' '):>16}  {seconds * 1e6:,.4g} us")
    print(f"\n{'mean':>16}  {'FITTED':>9}  {'HELD OUT':>9}")
    for latency, off in found.seen.items():
        unseen = found.unseen.get(latency)
        print(f"{latency:>16}  {off:>+9.1%}  {'-' if unseen is None else f'{unseen:+.1%}':>9}")
    if output is not None:
        output.write_text(to_json(found.model) + "\n")


def _of_profile(profile: Path, name: str | None, output: Path | None) -> None:
    from actorllm.scheduling.cost_model import to_json
    from actorllm.slo.profiles import fit_profile, read_profile

    steps = read_profile(profile)
    found = fit_profile(steps, name or profile.stem)
    skipped = f", {steps.num_skipped} without tokens or a duration left out" if steps.num_skipped else ""
    rows = {
        "model": found.model.name,
        "steps": f"{found.num_steps}{skipped}",
        "MAPE": f"{found.mape:.1%} by cross-validation",
        "bias": f"{found.bias:+.1%}",
    }
    for kind in ("decode", "prompt"):
        table = getattr(found.model, kind)
        told = "no table: too few steps" if table is None else f"{len(table.sizes)} x {len(table.columns)} nodes"
        rows[kind] = told
    for label, value in rows.items():
        print(f"{label:>13}  {value}")
    _print_errors(found.errors)
    if output is not None:
        output.write_text(to_json(found.model) + "\n")


def _of_kernels(
    profile: Path, name: str | None, output: Path | None, layers: int | None, tp: int | None, overhead: float
) -> None:
    from actorllm.slo.kernel_profiles import read_kernels

    if layers is None:
        raise ConfigError(f"profile={str(profile)!r} has kernels of one layer: say how many --layers the model has")
    _told_of_kernels(read_kernels(profile, tp=tp), layers, name or profile.stem, output, overhead)


def _of_shapes(
    profile: Path,
    name: str | None,
    output: Path | None,
    layers: int | None,
    tp: int,
    overhead: float,
    config: Path | None,
    options: dict[str, Any],
) -> None:
    """options: further arguments of `read_shapes`."""
    from actorllm.slo.data_sheets import read_config
    from actorllm.slo.kernel_shapes import read_shapes

    if layers is not None:
        raise ConfigError(f"profile={str(profile)!r} has kernels by shape: model-config says how many layers")
    if config is None:
        raise ConfigError(f"profile={str(profile)!r} has kernels by shape: name a model's --model-config")
    shapes = read_shapes(profile, read_config(config), tp=tp, **options)
    for file in shapes.files:
        print(f"{'read':>13}  {file.relative_to(profile)}")
    if options["gpu"] is None:
        print(f"{'warning':>13}  norms, rotary embeddings and activations cost nothing without --gpu")
    _told_of_kernels(shapes.profile, shapes.layers, name or profile.stem, output, overhead)


def _told_of_kernels(kernels: KernelProfile, layers: int, name: str, output: Path | None, overhead: float) -> None:
    from actorllm.scheduling.cost_model import to_json
    from actorllm.slo.kernel_profiles import fit_kernels

    found = fit_kernels(kernels, layers, name, fixed_s=overhead)
    print(f"{'model':>13}  {found.model.name}")
    print(f"{'kernels':>13}  {', '.join((*kernels.tokens, *kernels.rows))}; {len(kernels.attention)} of attention")
    for part in found.missing:
        print(f"{'warning':>13}  the profile has no kernel of {part}: it costs nothing in the model")
    print(f"{'error':>13}  on steps: unknown; hold the model against a run with `actorllm predict`")
    print(f"\n{'interpolated':>28}  {'NODES':>7}  {'ERROR':>7}")
    for part, num, error in found.errors:
        print(f"{part:>28}  {num:>7}  {'-' if math.isnan(error) else f'{error:.1%}':>7}")
    if output is not None:
        output.write_text(to_json(found.model) + "\n")


def _print_errors(errors: Sequence[StepError]) -> None:
    """The mean hides kinds that are few: decode steps of large batches, steps with prompts."""
    from actorllm.slo.step_fit import told_by_size

    print(f"\n{'held-out steps':>28}  {'STEPS':>7}  {'ERROR':>7}  {'BIAS':>7}")
    for size, num, error, bias in told_by_size(errors):
        print(f"{size:>28}  {num:>7}  {error:>7}  {bias:>7}")
