"""How long a step takes, from what is in it: features, models, and fitting one to the engine's own steps.

    p                prompt tokens                          d       decode rows
    decode_context   tokens that the decode rows attend to, summed
    prefill_context  tokens computed before the chunks of this step, summed over the chunks
    prefill_pairs    (query, key) pairs within the attention of the chunks

`LinearModel` is a sum of these with coefficients for small and for large steps. There are two regimes because a small step
waits for the weights and a large one for the arithmetic units (QoServe, ASPLOS 2026). Steps without prompts may have
coefficients of their own. What the sum cannot explain is kept as quantiles of measured / predicted, from which simulated steps
draw. `TableModel` (`step_tables`) has a table for each kind of step. `KernelModel` (`kernel_model`) adds kernels that were
measured on their own. `RooflineModel` is for machines without measurements. A model of the user's own is named as 'module:Class'.
Everything is seconds. Pure; the simulator, policies and `fit` use it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from statistics import NormalDist
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from actorllm.errors import ConfigError, nearest_name
from actorllm.messages import F64
from actorllm.scheduling.kernel_model import Curve, KernelModel, Surface
from actorllm.scheduling.registry import Registry
from actorllm.scheduling.step_tables import KindTable, TableModel

FEATURES = ("constant", "p", "d", "decode_context", "prefill_context", "prefill_pairs")

MIN_STEPS = 100
"""A calibration needs so many steps; a regime of its own half of them."""

NUM_QUANTILES = 41

MIN_DIFFERENT = 3
"""So many different numbers of decode rows it takes to tell what a row costs."""
MIN_GAIN = 0.002
"""By how much the mean error of a kind of step must become smaller for coefficients of its own."""


class StepModel(Protocol):
    """Seconds of a step."""

    @property
    def name(self) -> str: ...

    @property
    def gap_s(self) -> float:
        """From the end of a step to the start of the next one when that one is there already."""
        ...

    @property
    def launch_s(self) -> float:
        """From planning a step to its start on an idle worker."""
        ...

    @property
    def submit_s(self) -> float:
        """From the client to the scheduler."""
        ...

    @property
    def deliver_s(self) -> float:
        """From the end of a step to the client."""
        ...

    @property
    def residuals(self) -> tuple[float, ...]:
        """Measured / predicted at evenly spaced quantiles from 0 to 1; empty: steps take what is predicted."""
        ...

    def seconds(
        self, p: float, d: float, decode_context: float, prefill_context: float = 0.0, prefill_pairs: float = 0.0
    ) -> float: ...

    def decode_run(self, d: int, context: int, steps: int) -> F64:
        """Of so many steps in a row with the same d decode rows, each of which adds d to the context: [steps]."""
        ...


@dataclass(frozen=True, slots=True)
class StepDetail:
    """What is in a step, for a model with `seconds_of(detail)`. The simulator asks that in the place of `seconds`."""

    p: int
    d: int
    decode_context: float
    prefill_context: float
    prefill_pairs: float
    num_prompts: int
    """Whose chunks are in the step."""
    longest_context: int
    """Tokens that the longest decode row attends to; decode_context / d is the mean of all."""


@dataclass(frozen=True, slots=True)
class Regime:
    """Coefficients of FEATURES for steps of at most max_tokens tokens (prompt tokens and decode rows together)."""

    max_tokens: float
    coefficients: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.coefficients) != len(FEATURES) or not all(math.isfinite(c) for c in self.coefficients):
            raise ConfigError(f"a regime needs {len(FEATURES)} finite coefficients: {', '.join(FEATURES)}")


@dataclass(frozen=True, slots=True)
class LinearModel:
    """See the module docstring."""

    regimes: tuple[Regime, ...]
    """By max_tokens; the last one is for all larger steps, too."""
    name: str = "linear"
    floor_s: float = 1e-6
    """No step takes less."""
    gap_s: float = 0.0
    launch_s: float = 0.0
    residuals: tuple[float, ...] = ()
    submit_s: float = 0.0
    deliver_s: float = 0.0
    residual_memory: float = 0.0
    """How alike the residuals of two steps in a row are: the correlation of their normal scores, 0 to less than 1."""
    decode_regimes: tuple[Regime, ...] = ()
    """Of steps without prompts, by max_tokens; none: regimes says what they take, too."""

    def __post_init__(self) -> None:
        if not 0 <= self.residual_memory < 1:
            raise ConfigError(f"step-time model: residual_memory={self.residual_memory!r} must be from 0 to below 1")

    def seconds(
        self, p: float, d: float, decode_context: float, prefill_context: float = 0.0, prefill_pairs: float = 0.0
    ) -> float:
        for regime in self.regimes if p or not self.decode_regimes else self.decode_regimes:
            if p + d <= regime.max_tokens:
                break
        c0, c1, c2, c3, c4, c5 = regime.coefficients
        found = c0 + c1 * p + c2 * d + c3 * decode_context + c4 * prefill_context + c5 * prefill_pairs
        return found if found > self.floor_s else self.floor_s

    def decode_run(self, d: int, context: int, steps: int) -> F64:
        for regime in self.decode_regimes or self.regimes:
            if d <= regime.max_tokens:
                break
        c0, _, c2, c3, _, _ = regime.coefficients
        contexts: F64 = (context + d * np.arange(steps)).astype(np.float64)
        found: F64 = np.maximum(
            (c0 + c2 * d) + c3 * contexts, self.floor_s
        )  # in the order of `seconds`: equal to the bit
        return found


@dataclass(frozen=True, slots=True)
class RooflineModel:
    """What the data sheet allows: a step takes as long as its arithmetic or its memory traffic, whichever is more.

    Once for the linear layers (the weights are read once) and once for attention (the KV of every context is).
    """

    name: str
    flops: float
    """Of the machine per second, as far as it is reached."""
    bytes_per_s: float
    weight_bytes: float
    flops_per_token: float
    kv_bytes_per_token: float
    flops_per_pair: float
    """Of attention, for one query and one key in all layers and heads."""
    fixed_s: float = 0.0
    gap_s: float = 0.0
    launch_s: float = 0.0
    residuals: tuple[float, ...] = ()
    submit_s: float = 0.0
    deliver_s: float = 0.0
    reduce_s_per_token: float = 0.0
    """Of the all-reduces of a step, for each of its tokens: nothing on one device. What they take in any case is in fixed_s."""

    def seconds(
        self, p: float, d: float, decode_context: float, prefill_context: float = 0.0, prefill_pairs: float = 0.0
    ) -> float:
        linear = max((p + d) * self.flops_per_token / self.flops, self.weight_bytes / self.bytes_per_s)
        pairs = (decode_context + prefill_pairs) * self.flops_per_pair / self.flops
        read = (decode_context + prefill_context + p) * self.kv_bytes_per_token / self.bytes_per_s
        found = self.fixed_s + linear + max(pairs, read)
        return found + (p + d) * self.reduce_s_per_token if self.reduce_s_per_token else found

    def decode_run(self, d: int, context: int, steps: int) -> F64:
        return np.array([self.seconds(0, d, context + d * step) for step in range(steps)])


def _a100() -> LinearModel:
    """Coefficients published with QoServe (Llama-3-8B on one A100); they count all tokens, and both kinds again."""

    def regime(max_tokens: float, c: Sequence[float]) -> Regime:
        constant, all_tokens, prompt, decode, decode_context, prefill_context = c
        return Regime(
            max_tokens, (constant, all_tokens + prompt, all_tokens + decode, decode_context, prefill_context, 0.0)
        )

    small = (0.014936, 5.882475e-05, 2.247956e-05, 3.634519e-05, 1.111258e-07, 7.554773e-07)
    large = (0.005004, 2.719050e-05, 6.863043e-05, -4.143993e-05, 1.663409e-07, 2.727223e-06)
    return LinearModel((regime(512, small), regime(math.inf, large)), "a100-llama-3-8b")


def _h200() -> RooflineModel:
    """Llama-3-8B in bfloat16: 32 layers, 32 query and 8 KV heads of 128; 60 % of the arithmetic, 80 % of the memory."""
    parameters = 7.5e9  # all but the embedding of the input, of which a step reads a few rows
    return RooflineModel(
        "h200-llama-3-8b-roofline",
        flops=0.6 * 989e12,
        bytes_per_s=0.8 * 4.8e12,
        weight_bytes=2 * parameters,
        flops_per_token=2 * parameters,
        kv_bytes_per_token=2 * 32 * 8 * 128 * 2,
        flops_per_pair=4 * 32 * 32 * 128,
        fixed_s=5e-4,
    )


AnyModel: TypeAlias = LinearModel | RooflineModel | TableModel | KernelModel
KINDS: dict[str, type[AnyModel]] = {
    "linear": LinearModel,
    "roofline": RooflineModel,
    "table": TableModel,
    "kernels": KernelModel,
}
"""What a JSON file calls them."""


def _of_file(name: str) -> AnyModel:
    return from_json((_FOLDER / f"{name}.json").read_text())


def _linear(name: str) -> LinearModel:
    constant, prompt, decode = _LINEAR["microseconds"][name]
    regime = Regime(math.inf, (constant * 1e-6, prompt * 1e-6, decode * 1e-6, 0.0, 0.0, 0.0))
    return LinearModel((regime,), name)


def _of_kernels(name: str) -> AnyModel:
    return from_json(json.dumps({"kind": "kernels"} | json.loads((_FOLDER / "kernel_models.json").read_text())[name]))


_FOLDER = Path(__file__).parent / "presets"
_LINEAR = json.loads((_FOLDER / "linear.json").read_text())
"""Published coefficients: a step, a prompt token and a decode row. Only those are here that no data sheet contradicts."""
_KERNELS = json.loads((_FOLDER / "kernels.json").read_text())
"""Steps that are added up from published kernels (`bench/presets.py`). The models are long, and in a file of their own."""

PRESETS: dict[str, Callable[[], AnyModel]] = {
    "a100-llama-3-8b": _a100,
    "h200-llama-3-8b-roofline": _h200,
    "rtxpro6000-llama-3.1-8b": partial(_of_file, "rtxpro6000-llama-3.1-8b"),
    "rtx4090-llama-3.1-8b": partial(_of_file, "rtx4090-llama-3.1-8b"),
    **{name: partial(_linear, name) for name in _LINEAR["microseconds"]},
    **{name: partial(_of_kernels, name) for name in _KERNELS["errors"]},
}
"""Published or computed, none of them measured here."""

SOURCES = {
    "a100-llama-3-8b": ("github.com/microsoft/sarathi-serve, branch niyama_asplos2026", "not published"),
    "h200-llama-3-8b-roofline": (
        "the data sheet of the H200, 60 % of its arithmetic and 80 % of its memory",
        "unknown",
    ),
    "rtxpro6000-llama-3.1-8b": (
        "github.com/casys-kaist/LLMServingSim, profiler/perf/RTXPRO6000/meta-llama/Llama-3.1-8B/bf16/tp1/step.csv",
        "1.5 % of 95 steps, by cross-validation",
    ),
    "rtx4090-llama-3.1-8b": (
        "github.com/casys-kaist/LLMServingSim, profiler/perf/RTX4090/meta-llama/Llama-3.1-8B/bf16/tp1, kernels",
        "of a vLLM 0.19 run that it was not fitted to: TTFT 4.6 %, TPOT 3.0 %",
    ),
    **dict.fromkeys(_LINEAR["microseconds"], (_LINEAR["address"], _LINEAR["error"])),
    **{name: (_KERNELS["address"], error) for name, error in _KERNELS["errors"].items()},
}
"""Of each preset: the address of its numbers, and the mean error of the model on them."""


def preset(name: str) -> AnyModel:
    """Raises ConfigError naming the nearest preset."""
    if name not in PRESETS:
        raise ConfigError(
            f"there is no step-time preset {name!r}{nearest_name(name, PRESETS)}; there are {', '.join(PRESETS)}"
        )
    return PRESETS[name]()


# JSON --------------------------------------------------------------------------------------------------------------------


def to_json(model: AnyModel) -> str:
    given = asdict(model)
    for regime in (*given.get("regimes", ()), *given.get("decode_regimes", ())):
        if regime["max_tokens"] == math.inf:
            regime["max_tokens"] = None
    if not given.get("decode_regimes", True):
        del given["decode_regimes"]
    kind = next(name for name, cls in KINDS.items() if isinstance(model, cls))
    return json.dumps({"kind": kind} | given, indent=1)


REGIMES = frozenset(("regimes", "decode_regimes"))
"""What in the JSON of a linear model is a list of regimes."""


def from_json(text: str) -> AnyModel:
    """Raises ConfigError naming what is wrong with it."""
    try:
        given = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"a step-time model must be JSON: {error}") from error
    if not isinstance(given, dict) or given.get("kind") not in KINDS:
        kinds = ", ".join(map(repr, KINDS))
        raise ConfigError(f"a step-time model must be a JSON object whose kind is one of {kinds}")
    cls = KINDS[given.pop("kind")]
    known = [f.name for f in fields(cls)]
    for name in given:
        if name not in known:
            raise ConfigError(f"step-time model: {name!r} is not known{nearest_name(name, known)}")
    try:
        # JSON has no infinity: the last regime has null for it.
        for name in REGIMES & given.keys():
            given[name] = tuple(
                Regime(math.inf if r["max_tokens"] is None else float(r["max_tokens"]), tuple(r["coefficients"]))
                for r in given[name]
            )
        if "regimes" in given and not given["regimes"]:
            raise ConfigError("step-time model: at least one regime is needed")
        parts = PARTS.get(cls, {})
        for name, read in parts.items():
            if given.get(name) is not None:
                given[name] = read(given[name])
        given["residuals"] = tuple(map(float, given.get("residuals", ())))
        for name in known:
            is_number = name not in ("name", "residuals", *REGIMES, *parts)
            if is_number and not math.isfinite(given.get(name, 0.0)):
                raise ConfigError(f"step-time model: {name}={given[name]!r} must be a number of seconds")
        model: AnyModel = cls(**given)
        return model
    except (TypeError, KeyError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"step-time model: {type(error).__name__}: {error}") from error


def _numbers(given: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(_numbers(value) if isinstance(value, list) else float(value) for value in given)


def _part(cls: Callable[..., Any]) -> Callable[[Mapping[str, Any]], Any]:
    return lambda given: cls(**{name: _numbers(row) for name, row in given.items()})


PARTS: dict[type[AnyModel], dict[str, Callable[[Any], Any]]] = {
    TableModel: {"decode": _part(KindTable), "prompt": _part(KindTable)},
    KernelModel: {
        "tokens": _part(Curve),
        "logits": _part(Curve),
        "decode": _part(Surface),
        "mixed": _part(Surface),
        "prompt": _numbers,
    },
}
"""Of a kind of model: what in its JSON is more than a number."""


def load_model(name: str) -> AnyModel:
    """A preset by name, a file that `to_json` wrote, or a class of the user's own as 'module:Class', built without arguments.

    Raises ConfigError naming what is wrong.
    """
    if ":" in name and not Path(name).exists():
        model = Registry("step-time model", {}).build(name)
        missing = [part for part in STEP_MODEL_PARTS if not hasattr(model, part)]
        if missing:
            raise ConfigError(f"step-time model {name!r} has no {missing[0]!r}; it needs {', '.join(STEP_MODEL_PARTS)}")
        own: AnyModel = model
        return own
    if name in PRESETS or not Path(name).exists():
        return preset(name)
    return from_json(Path(name).read_text())


STEP_MODEL_PARTS = (*("name", "seconds", "decode_run", "residuals", "gap_s", "launch_s", "submit_s", "deliver_s"),)
"""What the simulator asks of a `StepModel`."""


# Fitting -----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class MeasuredSteps:
    """Steps that were measured, one row each, in the order in which they ran. Times in seconds of one clock."""

    p: F64
    d: F64
    decode_context: F64
    prefill_context: F64
    prefill_pairs: F64
    launched: F64
    """When the step was planned."""
    started: F64
    ended: F64

    def __len__(self) -> int:
        return self.p.size

    @classmethod
    def of(cls, rows: Sequence[Mapping[str, float]]) -> MeasuredSteps:
        """From rows with these names; a missing one is an error that names it."""
        names = [f.name for f in fields(cls)]
        for name in names:
            if any(name not in row for row in rows):
                raise ConfigError(f"a row of the step log has no {name!r}; it needs {', '.join(names)}")
        return cls(*(np.array([row[name] for row in rows], float) for name in names))

    def features(self) -> F64:
        """[num_steps, len(FEATURES)]"""
        columns = (np.ones(len(self)), self.p, self.d, self.decode_context, self.prefill_context, self.prefill_pairs)
        return np.stack(columns, axis=1)


@dataclass(frozen=True, slots=True, eq=False)
class Fit:
    """A fitted model, and how well it predicts steps that it was not fitted to."""

    model: LinearModel
    mape: float
    """Mean absolute error relative to the measurement, on the held-out steps."""
    bias: float
    """Sum of predictions / sum of measurements - 1, on the held-out steps."""
    measured: F64
    """Seconds of the held-out steps, and what is predicted for them: the parity plot."""
    predicted: F64
    features: F64
    """[num_held_out, 6] of the same steps."""
    num_steps: int
    warnings: tuple[str, ...]


def fit(log: MeasuredSteps, name: str = "calibrated", *, hold_out: int = 5) -> Fit:
    """Fit a LinearModel to measured steps; every hold_out-th of them is kept apart to judge it by.

    hold_out: 0: none is kept apart, and the errors are those of the steps that it was fitted to.

    Raises ConfigError when there are too few steps to tell anything.
    """
    taken = log.ended - log.started
    usable = np.isfinite(taken) & (taken > 0) & (log.p + log.d > 0)
    num = int(usable.sum())
    if num < MIN_STEPS:
        raise ConfigError(
            f"a calibration needs at least {MIN_STEPS} steps and got {num}"
            f"{f' ({len(log) - num} without a duration left out)' if num < len(log) else ''}; "
            f"let the engine run for longer, at several batch sizes"
        )
    features, taken = log.features()[usable], taken[usable]
    is_held = np.arange(num) % hold_out == hold_out - 1 if hold_out else np.zeros(num, np.bool_)
    train, train_taken = features[~is_held], taken[~is_held]
    bare = fit_coefficients(train, train_taken, name)
    gap, launch = _overheads(log)
    model = replace(
        bare,
        gap_s=gap,
        launch_s=launch,
        residuals=_residuals(train_taken, predict(bare, train)),
        residual_memory=residual_memory(taken / predict(bare, features)),
    )
    if not hold_out:
        is_held = ~is_held
    measured, predicted = taken[is_held], predict(model, features[is_held])
    return Fit(
        model,
        float((np.abs(predicted - measured) / measured).mean()),
        float(predicted.sum() / measured.sum() - 1),
        measured,
        predicted,
        features[is_held],
        num,
        tuple(_unseen(train)),
    )


def fit_coefficients(features: F64, taken: F64, name: str = "fitted") -> LinearModel:
    """Of steps with these features ([num_steps, 6]) and seconds, however few they are; without overheads and residuals.

    Steps without prompts get coefficients of their own where one sum is wrong for a kind of step. That is so if the error of
    either kind becomes smaller by a tenth, and by MIN_GAIN. There must be enough steps of both kinds, and they must differ.
    """
    regimes, _ = _two_regimes(features, taken)
    shared = LinearModel(regimes, name, floor_s=float(taken.min()) / 2)
    has_prompt = features[:, 1] > 0
    kinds = (has_prompt, ~has_prompt)
    is_known = np.unique(features[~has_prompt, 2]).size >= MIN_DIFFERENT
    if not is_known or min(int(rows.sum()) for rows in kinds) < MIN_STEPS // 2:
        return shared
    off = np.abs(predict(shared, features) / taken - 1)
    (prompt, prompt_error), (decode, decode_error) = (_two_regimes(features[rows], taken[rows]) for rows in kinds)
    for rows, error in zip(kinds, (prompt_error, decode_error), strict=True):
        before = float(off[rows].sum())
        if error < 0.9 * before and before - error > MIN_GAIN * int(rows.sum()):
            return replace(shared, regimes=prompt, decode_regimes=decode)
    return shared


def _residuals(taken: F64, predicted: F64) -> tuple[float, ...]:
    """Quantiles of measured / predicted. The highest one is set so that steps which are drawn take as long in sum as the
    measured ones did: a few that took ten times as long would otherwise count for all between them and the next quantile."""
    quantiles = np.quantile(taken / predicted, np.linspace(0, 1, NUM_QUANTILES))
    wanted = float(taken.sum() / predicted.sum()) * (NUM_QUANTILES - 1)
    highest = 2 * (wanted - quantiles[0] / 2 - quantiles[1:-1].sum())
    quantiles[-1] = max(highest, quantiles[-2])
    return tuple(quantiles.tolist())


def residual_memory(ratios: F64) -> float:
    """Of measured / predicted in the order of the steps: the correlation of the normal scores of neighbours; 0 if by chance."""
    num = ratios.size
    score = NormalDist().inv_cdf
    ranks = np.argsort(np.argsort(ratios, kind="stable"), kind="stable")
    z = np.array([score((rank + 0.5) / num) for rank in ranks.tolist()])
    found = float((z[1:] * z[:-1]).sum() / (z * z).sum())
    return min(found, 0.99) if found > 3 / math.sqrt(num) else 0.0


def _unseen(features: F64) -> list[str]:
    p, d = features[:, 1], features[:, 2]
    found = []
    if not p.any():
        found.append("no step had prompt tokens: what they cost is not known")
    elif np.unique(p).size < MIN_DIFFERENT:
        found.append("prompt tokens came in fewer than 3 different numbers: what they cost is hardly known")
    if np.unique(d).size < MIN_DIFFERENT:
        found.append("decode rows came in fewer than 3 different numbers: what they cost is hardly known")
    return found


def predict(model: StepModel, features: F64) -> F64:
    return np.array([model.seconds(*row[1:]) for row in features.tolist()])


def _two_regimes(features: F64, taken: F64) -> tuple[tuple[Regime, ...], float]:
    """One regime, or two split where it helps most, if that makes the error at least a tenth smaller; and that error, summed."""
    num_tokens = features[:, 1] + features[:, 2]
    coefficients, error = _least_relative(features, taken)
    best: tuple[Regime, ...] = (Regime(math.inf, coefficients),)
    limit, least = 0.9 * error, error
    for split in np.unique(np.quantile(num_tokens, np.linspace(0.1, 0.9, 17))).tolist():
        small = num_tokens <= split
        if min(int(small.sum()), int((~small).sum())) < MIN_STEPS // 2:
            continue
        low, low_error = _least_relative(features[small], taken[small])
        high, high_error = _least_relative(features[~small], taken[~small])
        if low_error + high_error < limit:
            limit = least = low_error + high_error
            best = (Regime(split, low), Regime(math.inf, high))
    return best, least


def _least_relative(features: F64, taken: F64) -> tuple[tuple[float, ...], float]:
    """Coefficients, none negative, with the least relative error; and the sum of its absolute values.

    Relative, because a millisecond matters more for a short step; none negative, because more work never takes less time,
    and a negative one goes wrong outside of what was measured. Outliers (a host that was busy) count for less.
    """
    weights = np.ones(taken.size)
    for _ in range(3):
        solution = nonnegative_least_squares(features * (weights / taken)[:, None], weights)
        relative = np.abs(features @ solution / taken - 1)
        typical = float(np.median(relative)) or 1e-12
        weights = np.sqrt(np.minimum(1.0, 4 * typical / np.maximum(relative, 1e-12)))
    return tuple(solution.tolist()), float(relative.sum())


def nonnegative_least_squares(a: F64, b: F64) -> F64:
    """The x >= 0 with the least |a @ x - b| (Lawson and Hanson 1974, with columns scaled to the same length)."""
    scale = np.sqrt((a**2).sum(axis=0))
    scale[scale == 0] = 1.0
    a = a / scale
    x = np.zeros(a.shape[1])
    is_free = np.zeros(a.shape[1], np.bool_)
    tolerance = 1e-10 * float(np.abs(a.T @ b).max(initial=1e-300))
    for _ in range(10 * a.shape[1]):
        gradient = a.T @ (b - a @ x)
        gradient[is_free] = -np.inf
        if float(gradient.max(initial=-np.inf)) <= tolerance:
            break
        is_free[int(gradient.argmax())] = True
        while True:
            trial = np.zeros_like(x)
            trial[is_free] = np.linalg.lstsq(a[:, is_free], b, rcond=None)[0]
            if (trial[is_free] > 0).all():
                break
            blocked = is_free & (trial <= 0)
            step = float((x[blocked] / (x[blocked] - trial[blocked])).min()) if x[blocked].any() else 0.0
            x = x + step * (trial - x)
            is_free &= x > 1e-12
            x[~is_free] = 0.0
            if not is_free.any():
                break
        x = np.where(is_free, trial, 0.0)
    solution: F64 = x / scale
    return solution


def _overheads(log: MeasuredSteps) -> tuple[float, float]:
    """Medians of the gap between steps that were waiting already, and of the start of a step on an idle worker."""
    if len(log) < 2:
        return 0.0, 0.0
    was_waiting = log.launched[1:] < log.ended[:-1]
    gaps = (log.started[1:] - log.ended[:-1])[was_waiting]
    starts = (log.started[1:] - log.launched[1:])[~was_waiting]
    return _positive_median(gaps), _positive_median(starts)


def _positive_median(values: NDArray[np.float64]) -> float:
    return max(0.0, float(np.median(values))) if values.size else 0.0
