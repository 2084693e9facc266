"""What the products of a model are computed as: a scheme for decode rows, and perhaps another for rows of prompts.

The fastest is found out when an engine starts for the first time. Products of one size are measured for all models, so that the
processor decides and not the model. The resolved configuration keeps it (`ModelConfig.scheme`), and recordings say it. A worker
that takes another's place computes the same bits. Processors are told apart by what they take, not by names of instructions.

A scheme is "int8", "int4", "bfloat16", "float16" or "float32". Two are written "int4+int8": of decode rows, and of prompts.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from actorllm import __version__
from actorllm.config import EngineConfig, ModelConfig
from actorllm.errors import UnsupportedModelError
from actorllm.model import memory
from actorllm.model.cpu.layers import PairedLinear, WidenedLinear, linear, paired, widens
from actorllm.model.cpu.measured_once import measured_once
from actorllm.model.cpu.thread_count import set_own_num_threads
from actorllm.model.families.decoder_config import DecoderConfig
from actorllm.model.linear import Form, Linear, LinearWeight
from actorllm.model.linear.by_kind import ByKindLinear, RowKinds
from actorllm.model.linear.dense import Dense
from actorllm.model.linear.side_by_side import SideBySide, SideBySideLinear
from actorllm.model.parallel import Ranks
from actorllm.model.quantization import rounding_of
from actorllm.model.quantization.description import gguf_kinds
from actorllm.model.quantization.grouped import nearest
from actorllm.model.quantization.int4 import Int4, Int4Weights
from actorllm.model.quantization.int8 import Int8
from actorllm.model.quantization.onednn import is_exact
from actorllm.model.registry import Plan
from actorllm.types.processor import processor_name
from actorllm.types.quantization import GGUF, INT8, PLAIN, ROUNDING

NUM_BYTES = {"int4": 0.625, "int8": 1, "bfloat16": 2, "float16": 2, "float32": 4}
"""Of a weight."""

ROWS = (1, 64)
"""Of a decode step, and of part of a prompt."""

SHAPE = (2048, 1024)
"""Outputs and inputs of the weight that is measured."""

ROUNDS = 5

EVICTED_BYTES = 64 << 20
"""Read before a product of one row: in a decode step, weights come from memory and not from a cache."""

MIN_GAIN = 1.25
"""Times as fast: what takes more memory than what was asked for must be."""

MIN_LOSS = 1.1
"""Times as slow: what was asked for and is not used must be, for one row and for prompts. Times vary by less."""

SMALL_BYTES, MOST_LOST = 32 << 20, 2.5
"""Of a model of at most so many bytes in float32, a step of one row is mostly no products: they may take so many times as long
there, if products of many rows gain."""

TWIN_SHARE, PLAIN_SHARE = 0.25, 0.5
"""Of the available memory that the second form of weights, and one that is larger than what was asked for, may take."""

LONGEST_NAME = 32
"""Characters of a scheme."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Scheme:
    """See the module docstring."""

    decode: str
    prompt: str

    def __str__(self) -> str:
        return self.decode if self.decode == self.prompt else f"{self.decode}+{self.prompt}"

    @classmethod
    def parse(cls, text: str) -> Scheme:
        decode, _, prompt = text.partition("+")
        return cls(decode, prompt or decode)

    @property
    def is_twin(self) -> bool:
        """Whether each weight is kept twice."""
        return self.decode != self.prompt

    def leaves_out(self, model: ModelConfig) -> bool:
        """Whether the model is not rounded, although that was asked for."""
        return model.quantization in ROUNDING and self.decode in PLAIN


def choose(config: EngineConfig, plan: Plan, dtype: torch.dtype, ranks: Ranks | None = None) -> Scheme | None:
    """What the configuration says, or what is fastest here; the log says why. None: there is no choice.

    Of tensor parallel ranks on one machine the first one finds out for all, and of replicas on one machine as well. Stages, and
    what is elsewhere, would each find out for themselves, and perhaps differ: they compute what was asked for. Raises
    UnsupportedModelError where a second form is asked for that the model cannot have.
    """
    model, ranks = config.model, ranks or Ranks()
    if model.quantization_twin:
        _check_twin(model, plan)
    if model.scheme is not None:
        return _checked(Scheme.parse(model.scheme), model, plan)
    is_elsewhere = config.is_launched or config.rank_nodes or config.num_machines
    if config.stages or (config.world_size > 1 and is_elsewhere) or (_is_shared(config) and config.nodes):
        return None
    return _told(None if ranks.rank else _fastest_here(config, plan, dtype), ranks)


def _told(found: Scheme | None, ranks: Ranks) -> Scheme | None:
    """What the first rank has found."""
    name = ("" if found is None else str(found)).encode().ljust(LONGEST_NAME)
    told = ranks.agree(np.frombuffer(name, np.uint8).astype(np.int32)).astype(np.uint8).tobytes().decode().strip()
    return Scheme.parse(told) if told else None


def _fastest_here(config: EngineConfig, plan: Plan, dtype: torch.dtype) -> Scheme | None:
    """What is fastest among what this model may be computed as; None: there is no choice."""
    model = config.model
    form, is_fused = rounding_of(model), isinstance(plan, DecoderConfig)
    if model.quantization == GGUF and any(kind.startswith("int4") for kind in gguf_kinds(model).values()):
        form = Int4Weights()
    is_rounded = model.quantization in ROUNDING
    may_twin = _has_two_forms(plan) and model.pooler is None
    may_twin = may_twin and not config.batch_invariant and model.quantization_twin is not False
    if model.quantization is None:
        # With codes in the cache bits are fixed as well: else those of a block would depend on its steps.
        has_fixed_bits = config.batch_invariant or config.cache.dtype == INT8
        if not is_fused or has_fixed_bits or dtype != torch.bfloat16 or widens(dtype):
            return None
    elif not is_rounded and not (may_twin and isinstance(form, Int4Weights)):
        return None
    before = torch.get_num_threads()
    set_own_num_threads(1)  # what others compute disturbs one thread least
    try:
        found, told = _measured_for(config, dtype, form, may_twin=may_twin, is_small=_is_small(plan))
    finally:
        set_own_num_threads(before)
    if not is_rounded and model.quantization is not None:  # the weights of a checkpoint stay as they are
        found = Scheme("int4", found.prompt if found.prompt == "int8" else "int4")
    found = _within_memory(found, config, _number_of_weights(plan))
    is_left_out = found.leaves_out(model)
    logger.log(
        logging.WARNING if is_left_out else logging.INFO,
        "products are computed as %s (%s)%s",
        found,
        told,
        f"; quantization={model.quantization!r} would be slower or wrong, and is not used" if is_left_out else "",
    )
    return found


def _checked(scheme: Scheme, model: ModelConfig, plan: Plan) -> Scheme:
    """What the configuration asks for, or was told by another start. Raises UnsupportedModelError where it cannot be computed."""
    told, kinds = f"compute_scheme={str(scheme)!r}", {scheme.decode, scheme.prompt}
    if kinds & {"int8", "int4"} and model.quantization in ROUNDING and not is_exact():
        raise UnsupportedModelError(
            f"{told}: this processor has no VNNI, and its sums of 8 bits are not exact; leave it out"
        )
    if scheme.is_twin and not _has_two_forms(plan):
        what = "with experts" if isinstance(plan, DecoderConfig) else "that run through transformers"
        raise UnsupportedModelError(
            f"{told} is not supported for models {what} yet ({model.architecture}); use one scheme"
        )
    if (
        model.quantization is None
        and "float32" in kinds
        and model.dtype == "bfloat16"
        and not isinstance(plan, DecoderConfig)
    ):
        raise UnsupportedModelError(
            f"{told}: models that run through transformers are computed in their own type ({model.architecture}); "
            f"use dtype='float32', or leave it out"
        )
    return scheme


def _has_two_forms(plan: Plan) -> bool:
    """Whether rows of prompts may have other products than decode rows: with experts, rows of both kinds meet in one."""
    return isinstance(plan, DecoderConfig) and plan.experts is None


def _check_twin(model: ModelConfig, plan: Plan) -> None:
    """Raises UnsupportedModelError for a second form of weights that have one."""
    if not _has_two_forms(plan):
        what = "have experts" if isinstance(plan, DecoderConfig) else "run through transformers"
        raise UnsupportedModelError(
            f"quantization_twin=True is not supported for models that {what} yet ({model.architecture}): their layers have one "
            f"form; leave it out"
        )


def _is_small(plan: Plan) -> bool:
    """Whether the model has at most SMALL_BYTES."""
    return _has_two_forms(plan) and NUM_BYTES["float32"] * _number_of_weights(plan) <= SMALL_BYTES


def _is_shared(config: EngineConfig) -> bool:
    """Whether other replicas must come to the same answer."""
    return max(config.data_parallel_size, config.max_replicas) > 1


def _measured_for(
    config: EngineConfig, dtype: torch.dtype, form: Form, *, may_twin: bool, is_small: bool
) -> tuple[Scheme, str]:
    """As `measured`; for replicas once on a machine. What was asked for, if they cannot tell each other."""
    if not _is_shared(config):
        return measured(dtype, form, may_twin=may_twin, is_small=is_small)
    form_name = form.__name__ if isinstance(form, type) else repr(form)
    # A processor's name may be that of several kinds, and a folder may be that of several machines.
    machine = (processor_name(), torch.backends.cpu.get_cpu_capability(), os.environ.get("ONEDNN_MAX_CPU_ISA", ""))
    parts = (*machine, is_exact(), torch.__version__, __version__, dtype, form_name, may_twin, is_small)
    found = measured_once(
        " | ".join(map(str, parts)), lambda: str(measured(dtype, form, may_twin=may_twin, is_small=is_small)[0])
    )
    if found is not None:
        return Scheme.parse(found), "measured once for all replicas of this machine"
    asked = str(dtype).removeprefix("torch.")
    if form is not Dense and is_exact():
        asked = "int4" if isinstance(form, Int4Weights) else "int8"
    return Scheme(asked, asked), "as asked for"


def _within_memory(found: Scheme, config: EngineConfig, num_weights: int) -> Scheme:
    """The same, or what takes less memory.

    What is free would differ between replicas: they share half of what the machine has, since others have some of it, too.
    """
    model, size = config.model, max(config.data_parallel_size, config.max_replicas)
    available = memory.limit_bytes() // (2 * size) if _is_shared(config) else memory.available_bytes()
    if found.is_twin and model.quantization_twin is None:
        if num_weights * NUM_BYTES[found.prompt] > TWIN_SHARE * available:
            return Scheme(found.decode, found.decode)
    elif found.leaves_out(model) and is_exact():
        asked = "int8" if model.quantization == "int8" else "int4"
        if num_weights * NUM_BYTES[found.decode] > PLAIN_SHARE * available:
            return Scheme(asked, asked)
    elif model.quantization is None and num_weights * NUM_BYTES[found.decode] > PLAIN_SHARE * available:
        return Scheme("bfloat16", "bfloat16")
    return found


def _number_of_weights(plan: Plan) -> int:
    """Roughly, of the layers; 0: that is not known."""
    if not isinstance(plan, DecoderConfig):
        return 0
    attention = plan.head_dim * (2 * plan.num_heads + 2 * plan.num_kv_heads)
    recurrent = 0
    if plan.recurrent is not None:
        recurrent = sum(out * into for _, out, into in plan.recurrent.products(plan.hidden_size)) // plan.hidden_size
    mlp = (2 + plan.has_gate) * plan.intermediate_size
    mlps = sum(map(plan.adds_mlp, range(plan.num_layers)))
    attends, recurs = len(plan.attention_layers), len(plan.recurrent_layers)
    return plan.hidden_size * (attends * attention + recurs * recurrent + mlps * mlp)


def product_times(sides: Sequence[Linear], dtype: torch.dtype) -> list[tuple[float, ...]]:
    """Of each side the seconds of a product, by `ROWS`; taken in turns, and the shortest counts.

    Processor time of the one thread that computes: what other processes take of this core does not count.
    """
    found = [[float("inf")] * len(ROWS) for _ in sides]
    other = torch.ones(EVICTED_BYTES // 4)
    for at, num_rows in enumerate(ROWS):
        x = torch.ones(num_rows, sides[0].in_features, dtype=dtype)
        for _ in range(ROUNDS):
            for times, side in zip(found, sides, strict=True):
                if num_rows == 1:
                    side(x)  # kernels are made in the first call
                    other.sum()
                began = time.thread_time()
                side(x)
                times[at] = min(times[at], time.thread_time() - began)
    return [tuple(times) for times in found]


def measured(dtype: torch.dtype, form: Form, *, may_twin: bool, is_small: bool = False) -> tuple[Scheme, str]:
    """The fastest scheme here, and in words what was found.

    Arguments:
        dtype: of the model.
        form: what plain weights are rounded to; `Dense`: they are not.
        may_twin: rows of prompts may have a scheme of their own, which keeps every weight twice.
        is_small: the model has at most SMALL_BYTES.
    """
    plain = "float32" if widens(dtype) else str(dtype).removeprefix("torch.")
    if form is not Dense and not is_exact():
        return Scheme(plain, plain), "sums of 8 bits are not exact: this processor has no VNNI"
    weight = torch.full(SHAPE, 0.5, dtype=dtype)
    sides: dict[str, Linear] = {plain: linear(Dense(weight))}
    if form is Dense:
        if plain != "bfloat16":
            return Scheme(plain, plain), ""
        sides["float32"] = WidenedLinear(weight)
    elif isinstance(form, Int4Weights):
        sides["int4"] = linear(form.of(weight))
        if may_twin:
            sides["int8"] = linear(Int8.of(weight))
    else:
        sides["int8"] = linear(form.of(weight))
    times = dict(zip(sides, product_times(list(sides.values()), dtype), strict=True))
    told = ", ".join(
        f"{name} {times[plain][0] / one:.2f} and {times[plain][1] / many:.2f}"
        for name, (one, many) in times.items()
        if name != plain
    )
    told = f"times as fast as {plain}, for one row and for prompts: {told}"
    return _fastest(times, plain, may_twin, is_small), told


def _fastest(times: dict[str, tuple[float, ...]], plain: str, may_twin: bool, is_small: bool = False) -> Scheme:
    one, many = times[plain]
    if "int4" in times or "int8" in times:
        decode = "int4" if "int4" in times else "int8"
        is_twin = decode == "int4" and "int8" in times and times["int4"][1] >= MIN_GAIN * times["int8"][1]
        found = Scheme(decode, "int8" if is_twin else decode)
        is_slower = times[found.decode][0] > MIN_LOSS * one and times[found.prompt][1] > MIN_LOSS * many
        return Scheme(plain, plain) if is_slower else found
    wide = times["float32"]
    prompt = "float32" if many >= MIN_GAIN * wide[1] else plain
    most_lost = MOST_LOST if is_small and prompt == "float32" else 1 / MIN_GAIN
    decode = "float32" if wide[0] <= most_lost * one else plain
    if decode != prompt and not (may_twin and decode == plain):
        decode = prompt = plain
    return Scheme(decode, prompt)


def products(
    scheme: Scheme, dtype: torch.dtype, kinds: RowKinds | None, make: Callable[[LinearWeight], Linear]
) -> Callable[[LinearWeight], Linear]:
    """What makes the products of a scheme. kinds: None where it is one. make: those of a weight as it is."""

    def of(weight: LinearWeight) -> Linear:
        if isinstance(weight, SideBySide):
            return SideBySideLinear([of(part) for part in weight.parts])
        is_wide = "float32" in (scheme.decode, scheme.prompt)
        if is_wide and isinstance(weight, Dense) and weight.weight.dtype == torch.bfloat16:
            wide: Linear = WidenedLinear(weight.weight, weight.bias)
            wide = PairedLinear(wide) if make is paired else wide
            if scheme.decode == "float32":
                return wide
            if kinds is not None:
                return ByKindLinear(make(weight), wide, kinds)
        if isinstance(weight, Int4) and kinds is not None:
            twin = nearest(weight.dense(), weight.bias, dtype)
            if isinstance(twin, Int8):  # else 8 bits would change the weight too much
                return ByKindLinear(make(weight), linear(twin), kinds)
        return make(weight)

    return of
