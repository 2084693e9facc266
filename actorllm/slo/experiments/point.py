"""`Scenario`, `Variant` and `Point`: one simulated run of an experiment, told in full by values that go into JSON.

    scenario   what all runs have in common: workload, classes, step times, engine
    variant    what is compared: a policy, its knobs, how many tokens a step may hold, an admission policy
    point      a variant at one rate, with one seed and objectives scaled by one factor

So a point can be handed to another process. Its key is a hash over this, the bytes of the files that it names and those of
a policy of the user's own. The key says whether a result that is there already is the result of this point. The same seed
gives every variant and every rate the same requests: the same window of the trace, the same lengths, the same classes.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from actorllm.errors import ConfigError, nearest_name
from actorllm.scheduling.admission_policy import ADMISSIONS, AdmissionGate, load_admission
from actorllm.scheduling.cost_model import PRESETS, StepModel, load_model
from actorllm.scheduling.loading import load_policy
from actorllm.scheduling.policy import KeyPolicy, PlanPolicy, policy_path
from actorllm.scheduling.router import ROUTERS, VIEW_AGE_S
from actorllm.scheduling.scheduler import Scheduler
from actorllm.scheduling.step_packing import KeyPlanner
from actorllm.slo.journal import Journal
from actorllm.slo.sessions import SESSION_WORKLOADS
from actorllm.slo.simulator import EngineShape, SimulatedRun, simulate
from actorllm.slo.tiers import TierShape
from actorllm.slo.traces import FORMATS, SAMPLE, Trace, TraceReport, load_trace
from actorllm.slo.workload import (
    Workload,
    assign_classes,
    assign_tenants,
    bursty_arrivals,
    constant_arrivals,
    diurnal_arrivals,
    gamma_arrivals,
    parse_mix,
    poisson_arrivals,
    seed_stream,
    synthetic,
)
from actorllm.types.objective import RequestClass

FORMAT = 2
"""Of a point's key: changes when the same values come to mean something else."""

MIX = "ls:0.5:ttft=0.5+p/4000,tpot=0.05 be:0.5:e2e=120"
ARRIVALS = ("trace", "poisson", "gamma", "bursty", "diurnal", "constant")
SHAPE = EngineShape(num_blocks=25_000, max_num_batched_tokens=512, enable_prefix_caching=False)
MODULES = (
    *(
        "closed_loop",
        "metrics",
        "objectives",
        "residual_memory",
        "sessions",
        "simulator",
        "stages",
        "tiers",
        "timeline",
    ),
    *("traces", "turns", "unattainable", "workload", "experiments/record", "experiments/stationarity"),
)
"""Of `slo/`, those that the figures of a point depend on."""
DRAWN = ("synthetic", *SESSION_WORKLOADS)
"""Workloads that are drawn by the seed, and are no trace."""
LEFT_OUT = "requests left out:"
"""How the warning of requests begins that are too long for the model."""
NO_PROMISES = "no request is promised anything:"
"""Likewise, of a workload without objectives."""
Knob = bool | int | float | str


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """What all points of an experiment have in common."""

    workload: str = "sample"
    """`sample` (bundled), `synthetic` (single turns), `sessions` and `agents` (which wait for answers), or the path of a trace."""
    trace_format: str | None = None
    """As in `load_trace`; None: seen from the file."""
    block_tokens: int | None = None
    """For how many tokens a hash id of the trace stands, likewise."""
    num_requests: int = 2000
    """A trace is repeated as often as need be. Seeds have parts of it that are apart while there are such (`Point.window`)."""
    arrivals: str = "trace"
    """`trace`: its own, stretched to the rate; or poisson, gamma:CV, bursty, diurnal[:SWING], constant."""
    mix: str | None = MIX
    """Classes and objectives, as `workload.parse_mix` reads them; None: those of the trace."""
    tenants: tuple[float, ...] = ()
    """Shares of the tenants; none: there are no tenants."""
    model: str = "a100-llama-3-8b"
    """Step times: a preset, or a file that `actorllm calibrate` wrote."""
    shape: EngineShape = SHAPE
    num_replicas: int = 1
    router: str = "round-robin"
    view_interval_s: float = VIEW_AGE_S
    """How old the router's views may get, as in an engine; 0: they are exact."""
    max_concurrency: int | None = None
    """Requests under way at a time; None: any number."""

    def __post_init__(self) -> None:
        if self.max_concurrency is not None and self.max_concurrency < 1:
            raise ConfigError(f"max_concurrency={self.max_concurrency} must be at least 1")
        if self.num_requests < 1:
            raise ConfigError(f"num_requests={self.num_requests} must be at least 1")
        if self.num_replicas < 1:
            raise ConfigError(f"num_replicas={self.num_replicas} must be at least 1")
        if not (math.isfinite(self.view_interval_s) and self.view_interval_s >= 0):
            raise ConfigError(f"view_interval={self.view_interval_s} must be a number of seconds, 0 or more")
        # Of arrivals, gamma needs a number behind the colon and diurnal may have one; a bad one is told now.
        kind, _, cv = self.arrivals.partition(":")
        if kind not in ARRIVALS:
            raise ConfigError(f"arrivals={self.arrivals!r} is not known{nearest_name(kind, ARRIVALS)}")
        if kind != "diurnal" and (kind == "gamma") != bool(cv):
            raise ConfigError(f"arrivals={self.arrivals!r}: gamma needs its coefficient of variation, as in gamma:2")
        if cv:
            _arrivals(self.arrivals, 1, 0)
        # Workloads that are drawn have no arrivals of their own.
        if kind == "trace" and self.workload in DRAWN:
            object.__setattr__(self, "arrivals", "poisson")
        if self.trace_format is not None and self.trace_format not in FORMATS:
            known = nearest_name(self.trace_format, FORMATS)
            raise ConfigError(f"trace format {self.trace_format!r} is not known{known}; {', '.join(FORMATS)}")
        if self.router not in ROUTERS:
            raise ConfigError(f"router={self.router!r} is not known{nearest_name(self.router, ROUTERS)}")
        if self.mix is not None:
            parse_mix(self.mix)

    def check_files(self) -> None:
        """Raises ConfigError if what it names is not there. Only simulations need it: results are read without."""
        if self.workload not in ("sample", *DRAWN) and not Path(self.workload).exists():
            known = ", ".join(("sample", *DRAWN))
            raise ConfigError(f"workload={self.workload!r} is none of {known}, and not the path of a trace")
        if self.model not in PRESETS:
            load_model(self.model)

    def to_dict(self) -> dict[str, Any]:
        """Without what is not used: the results of earlier versions stay those of the same scenario."""
        values = asdict(self)
        if self.num_replicas == 1 and self.view_interval_s == VIEW_AGE_S:  # nothing is routed: written as it was
            values["view_interval_s"] = 0.0
        if self.max_concurrency is None:
            del values["max_concurrency"]
        if not self.shape.stages:
            del values["shape"]["stages"], values["shape"]["hop_s"]
        if not self.shape.tiers:
            del values["shape"]["tiers"]
        return values

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> Scenario:
        values = _known(cls, given)
        if values["num_replicas"] == 1 and values["view_interval_s"] == 0.0:
            del values["view_interval_s"]
        shape = _known(EngineShape, values["shape"])
        tiers = tuple(TierShape(**_known(TierShape, one)) for one in shape.get("tiers", ()))
        values["shape"] = EngineShape(**shape | {"stages": tuple(shape.get("stages", ())), "tiers": tiers})
        values["tenants"] = tuple(values["tenants"])
        return cls(**values)

    @property
    def digest(self) -> str:
        """Of its values and of the files that they name."""
        named = [self.model] if self.model not in PRESETS and Path(self.model).exists() else []
        named += [self.workload] if self.workload not in ("sample", *DRAWN) else []
        values = {"format": FORMAT, "files": [_file_digest(name) for name in named]} | self.to_dict()
        if ":" in self.model:
            values["model_source"] = _own_source(self.model)
        return _hash(values)

    def trace_report(self) -> TraceReport | None:
        """What was read of the trace, and which of its rows were left out; None for a workload that is no trace."""
        return None if self.workload in DRAWN else self.trace().report

    def trace(self) -> Trace:
        """Raises ConfigError naming what is wrong with it."""
        return _trace(str(SAMPLE) if self.workload == "sample" else self.workload, self.trace_format, self.block_tokens)

    def describe(self, num_there: int | None = None) -> str:
        """In a line, for people. num_there: so many requests there were, of those that were asked for; None: all."""
        left = "" if num_there in (None, self.num_requests) else f"{num_there} of "
        more = f", {self.num_replicas} replicas behind {self.router}" if self.num_replicas > 1 else ""
        more += f", {self.max_concurrency} at a time" if self.max_concurrency is not None else ""
        return f"{left}{self.num_requests} requests of {Path(self.workload).name}, {self.arrivals} arrivals, {self.model}{more}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A policy with what is changed of it. `parse` reads `policy,knob=value,...@tokens+admission`."""

    policy: str
    knobs: tuple[tuple[str, Knob], ...] = ()
    """Class attributes of the policy. `step_time=model` hands the scenario's step-time model to its constructor."""
    tokens: int | None = None
    """max_num_batched_tokens instead of the scenario's: the chunk size of policies that have no dynamic one."""
    admission: str | None = None
    """The admission policy, as `admission_policy=` of the engine."""
    label: str = ""
    """What it is called in tables; if not given, as it is written."""

    def __post_init__(self) -> None:
        if not self.label:
            object.__setattr__(self, "label", self.text)
        if self.tokens is not None and self.tokens < 1:
            raise ConfigError(f"variant {self.label!r}: {self.tokens} tokens per step must be at least 1")
        self.build_policy(None)  # what is wrong with it is told before anything runs
        if self.admission is not None:
            load_admission(self.admission)

    @property
    def text(self) -> str:
        knobs = "".join(f",{name}={value}" for name, value in self.knobs)
        tokens = "" if self.tokens is None else f"@{self.tokens}"
        return f"{self.policy}{knobs}{tokens}" + ("" if self.admission is None else f"+{self.admission}")

    @classmethod
    def parse(cls, text: str, label: str = "") -> Variant:
        """`fcfs@512`, `qoserve,anchor=first,alpha=0.0005@2048`, `edf+past-future`, `my_module:MyPolicy`."""
        rest, plus, admission = text.partition("+")
        policy_and_knobs, at, tokens = rest.partition("@")
        policy, *settings = policy_and_knobs.split(",")
        if at and not tokens.isdigit():
            raise ConfigError(f"variant {text!r}: {tokens!r} is no number of tokens")
        knobs: list[tuple[str, Knob]] = []
        for setting in settings:
            name, equals, value = setting.partition("=")
            if not equals:
                raise ConfigError(f"variant {text!r}: {setting!r} must be knob=value")
            knobs.append((name, _typed(policy, name, value)))
        return cls(
            policy=policy,
            knobs=tuple(knobs),
            tokens=int(tokens) if at else None,
            admission=admission if plus else None,
            label=label,
        )

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> Variant:
        values = _known(cls, given)
        values["knobs"] = tuple((name, value) for name, value in values.get("knobs", ()))
        return cls(**values)

    @classmethod
    def of_results(cls, given: Mapping[str, Any]) -> Variant:
        """As a results file has it. Its policy may not be there any more, which is an error only when it is built."""
        values = _known(cls, given)
        values["knobs"] = tuple((name, value) for name, value in values["knobs"])
        variant = object.__new__(cls)
        for name, value in values.items():
            object.__setattr__(variant, name, value)
        return variant

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def build_policy(self, model: StepModel | None) -> PlanPolicy:
        """A fresh one. Raises ConfigError naming what is wrong with it."""
        if not self.knobs:
            return load_policy(self.policy)
        cls = _class_of(self.policy)
        arguments: dict[str, Any] = {}
        changed: dict[str, Knob] = {}
        for name, value in self.knobs:
            if name == "step_time" and value == "model":
                arguments["step_time"] = model
            else:
                _knob(self.policy, cls, name)
                changed[name] = value
        policy = type(cls.__name__, (cls,), changed)(**arguments)
        return KeyPlanner(policy) if isinstance(policy, KeyPolicy) else policy

    def build_gated(self, model: StepModel | None) -> PlanPolicy:
        """The policy behind its admission policy, if it has one, as an engine has them."""
        policy = self.build_policy(model)
        return policy if self.admission is None else AdmissionGate(policy, load_admission(self.admission))

    @property
    def digest(self) -> str:
        """Of its values (not of its label), and of the source of a policy of the user's own."""
        path = policy_path(self.policy)
        values = {name: value for name, value in self.to_dict().items() if name != "label"}
        values |= {"path": path, "source": _own_source(path)}
        if self.admission is not None:
            values["admission_source"] = _own_source(ADMISSIONS.path(self.admission))
        return _hash(values)


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One run."""

    scenario: Scenario
    variant: Variant
    rate: float
    """Requests per second, of all replicas together."""
    seed: int = 0
    scale: float = 1.0
    """Every objective so many times as loose; the policy sees the scaled ones."""

    def __post_init__(self) -> None:
        if not self.rate > 0 or not self.scale > 0:
            raise ConfigError(f"rate={self.rate} and scale={self.scale} must be positive")
        if self.seed < 0:
            raise ConfigError(f"seed={self.seed} must be 0 or more")

    @property
    def key(self) -> str:
        """Equal for equal results."""
        return _hash([self.scenario.digest, self.variant.digest, float(self.rate), self.seed, float(self.scale)])

    def to_dict(self) -> dict[str, Any]:
        return {
            "scenario": self.scenario.to_dict(),
            "variant": self.variant.to_dict(),
            "rate": self.rate,
            "seed": self.seed,
            "scale": self.scale,
        }

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> Point:
        values = _known(cls, given)
        values["scenario"] = Scenario.from_dict(values["scenario"])
        values["variant"] = Variant.from_dict(values["variant"])
        return cls(**values)

    def __str__(self) -> str:
        scale = "" if self.scale == 1 else f", objectives x {self.scale:g}"
        return f"{self.variant.label} at {self.rate:.3g} requests/s, seed {self.seed}{scale}"

    @property
    def shape(self) -> EngineShape:
        changes: dict[str, Any] = {}
        if self.variant.tokens is not None:
            changes["max_num_batched_tokens"] = self.variant.tokens
        if self.variant.admission is not None:
            changes["admission"] = self.variant.admission
        return replace(self.scenario.shape, **changes)

    @property
    def window(self) -> tuple[int, int] | None:
        """At which request of the trace it begins, and how many the trace has; None without a trace.

        A trace that has n times the requests of a run gives the seeds 0 to n - 1 parts that do not overlap, spread over
        it. Further seeds begin anywhere, and after the end of a trace it begins again.
        """
        if self.scenario.workload in DRAWN:
            return None
        size, num = len(self.scenario.trace().workload), self.scenario.num_requests
        num_apart = size // num
        if self.seed < num_apart:
            return self.seed * (size // num_apart), size
        return int(seed_stream(self.seed, "window").integers(size)), size

    def workload(self) -> Workload:
        """Its requests: of the same seed the same ones, whatever the variant and the rate."""
        scenario, seed = self.scenario, self.seed
        num = scenario.num_requests
        if scenario.workload == "synthetic":
            workload = synthetic(num, 1.0, seed=seed)
        elif scenario.workload in SESSION_WORKLOADS:
            workload = SESSION_WORKLOADS[scenario.workload](num, 1.0, seed=seed)
        else:
            trace = scenario.trace().workload
            first, _ = self.window or (0, 0)
            workload = trace.repeated(first + num).select(np.arange(first, first + num))
            workload = replace(workload, arrival=workload.arrival - workload.arrival[0], name=trace.name)
        if scenario.arrivals != "trace":
            workload = _arriving(workload, scenario.arrivals, seed)
        workload = workload.fitting(scenario.shape.max_model_len)
        if not len(workload):
            raise ConfigError(
                f"no request of {scenario.workload!r} fits into max_model_len={scenario.shape.max_model_len}"
            )
        if len(workload) > 1:
            workload = workload.at_rate(self.rate)
        if scenario.mix is not None:
            workload = assign_classes(workload, parse_mix(scenario.mix), seed)
        if scenario.tenants:
            workload = assign_tenants(workload, scenario.tenants, seed)
        if self.scale != 1:
            own = workload.own_promises
            workload = replace(
                workload,
                classes=tuple(_scaled(kind, self.scale) for kind in workload.classes),
                own_promises=None if own is None else own.scaled(self.scale),
            )
        return workload

    def run(self, make_scheduler: Callable[[int, PlanPolicy], Scheduler] | None = None, **more: Any) -> SimulatedRun:
        """Simulate it; the same point gives the same run. make_scheduler, more: as in `simulate`."""
        scenario = self.scenario
        model = load_model(scenario.model)
        workload = self.workload()
        run = simulate(
            workload,
            self.shape,
            model,
            policy=_Build(self.variant, model),
            num_replicas=scenario.num_replicas,
            router=scenario.router,
            view_interval_s=scenario.view_interval_s,
            seed=self.seed,
            make_scheduler=make_scheduler,
            max_concurrency=scenario.max_concurrency,
            **more,
        )
        if left_out := scenario.num_requests - len(workload):
            told = f"{LEFT_OUT} {left_out} of {scenario.num_requests} are longer than {scenario.shape.max_model_len} tokens"
            run = replace(run, warnings=(f"{told} (max_model_len)", *run.warnings))
        if not workload.promises.made.any():
            told = f"{NO_PROMISES} each that ends counts as kept, at any rate; give classes with objectives (mix)"
            run = replace(run, warnings=(told, *run.warnings))
        return run


def watched_run(point: Point, watched: Iterable[int] = (), **more: Any) -> tuple[SimulatedRun, Journal]:
    """The run of a point, and what its schedulers decided; watched: requests of which is kept what they waited for."""
    journal = Journal(frozenset((0, row) for row in watched))
    has_prefixes = point.scenario.shape.enable_prefix_caching and point.workload().has_shared_prompts
    maker = journal.scheduler_maker(replace(point.shape, enable_prefix_caching=has_prefixes))
    return point.run(maker, **more), journal


class _Build:
    """Builds a variant's policy; what it is called in errors and warnings."""

    def __init__(self, variant: Variant, model: StepModel) -> None:
        self._variant = variant
        self._model = model

    def __call__(self) -> PlanPolicy:
        return self._variant.build_policy(self._model)

    def __repr__(self) -> str:
        return repr(self._variant.label)


def _scaled(kind: RequestClass, factor: float) -> RequestClass:
    return kind if kind.slo is None else replace(kind, slo=kind.slo.scaled(factor))


@lru_cache(maxsize=4)
def _trace(name: str, format: str | None, block_tokens: int | None) -> Trace:
    return load_trace(name, format, block_tokens=block_tokens)


def _arriving(workload: Workload, text: str, seed: int) -> Workload:
    """The same requests with other arrivals; of sessions, those of their first requests."""
    if workload.turns is None:
        return workload.arriving(_arrivals(text, len(workload), seed))
    begins = workload.turns.begins
    arrival = workload.arrival.copy()
    arrival[begins] = _arrivals(text, int(begins.sum()), seed)
    return workload.arriving(arrival)


def _arrivals(text: str, num: int, seed: int) -> Any:
    kind, _, cv = text.partition(":")
    match kind:
        case "poisson":
            return poisson_arrivals(num, 1.0, seed)
        case "gamma":
            return gamma_arrivals(num, 1.0, _float("arrivals", cv), seed)
        case "bursty":
            return bursty_arrivals(num, 1.0, seed=seed)
        case "diurnal":
            swing = {"swing": _float("arrivals", cv)} if cv else {}
            return diurnal_arrivals(num, 1.0, seed=seed, **swing)
        case _:
            return constant_arrivals(num, 1.0)


# Knobs -------------------------------------------------------------------------------------------------------------------


def _class_of(policy: str) -> type[Any]:
    found = load_policy(policy)
    return type(found.policy) if isinstance(found, KeyPlanner) else type(found)


def _knob(policy: str, cls: type[Any], name: str) -> Any:
    known = [n for n in dir(cls) if not n.startswith("_") and isinstance(getattr(cls, n), bool | int | float | str)]
    if name not in known:
        there = ", ".join(n for n in known if n != "name") or "none"
        raise ConfigError(f"policy {policy!r} has no knob {name!r}{nearest_name(name, known)}; it has {there}")
    return getattr(cls, name)


def _typed(policy: str, name: str, text: str) -> Knob:
    """A value as the class attribute of that name has it."""
    if name == "step_time":
        if text != "model":
            raise ConfigError(f"policy {policy!r}: step_time={text!r} must be model: the scenario's step-time model")
        return text
    old = _knob(policy, _class_of(policy), name)
    if isinstance(old, bool):
        words = {"1": True, "true": True, "on": True, "0": False, "false": False, "off": False}
        if text.lower() not in words:
            raise ConfigError(f"policy {policy!r}: {name}={text!r} must be on or off")
        return words[text.lower()]
    if isinstance(old, int) and text.lstrip("-").isdigit():
        return int(text)
    return _float(f"policy {policy!r}: {name}", text) if isinstance(old, int | float) else text


def _float(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"{name}={text!r} must be a number") from None


# Hashes ------------------------------------------------------------------------------------------------------------------


def _known(cls: type[Any], given: Mapping[str, Any]) -> dict[str, Any]:
    names = [f.name for f in fields(cls)]
    for name in given:
        if name not in names:
            raise ConfigError(f"{cls.__name__}: {name!r} is not known{nearest_name(name, names)}")
    return dict(given)


def _hash(values: Any) -> str:
    text = json.dumps(values, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@lru_cache
def _file_digest(name: str) -> str:
    path = Path(name)
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def _own_source(path: str) -> str | None:
    """Of the module of a class that is not built in."""
    module = path.partition(":")[0] if ":" in path else ""
    return None if not module or module.startswith("actorllm.") else _source_digest(module)


@lru_cache
def _source_digest(module: str) -> str | None:
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return None
    return _file_digest(spec.origin) if spec is not None and spec.origin and Path(spec.origin).is_file() else None


@lru_cache
def code_digest() -> str:
    """Of the code that a result depends on: scheduler, policies, KV tables and simulator."""
    package = Path(__file__).parents[2]
    digest = hashlib.sha256()
    folders = [sorted((package / folder).rglob("*.py")) for folder in ("scheduling", "kvcache")]
    own = [package / "types" / "objective.py", *(package / "slo" / f"{name}.py" for name in MODULES)]
    for file in [file for folder in folders for file in folder] + own:
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]
