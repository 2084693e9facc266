"""Kernels that were measured by shape: products, attention, experts and all-reduces, of which a config.json names its own.

What is read becomes a `KernelProfile`, so `fit_kernels` adds it up. A product whose sizes were not measured lies between those
that were: in proportion to both of its sizes. Beyond the largest one, time is in proportion to size. Of attention, of experts and
of all-reduces the exact shape must be there. Norms, rotary embeddings and activations are in no such table. They are computed from
the bandwidth of a data sheet if a GPU is named, and cost nothing otherwise. Pure but for reading the files.
"""

from __future__ import annotations

import csv
import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from actorllm.errors import ConfigError
from actorllm.slo import profile_columns as columns
from actorllm.slo.data_sheets import MEMORY, gpu_named
from actorllm.slo.kernel_profiles import Attention, KernelProfile

Row = Mapping[str, Any]

SMALL_S = 3e-6
"""Of a kernel that does next to nothing, within a CUDA graph (AIConfigurator: mem_empirical_constant_latency)."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What a config.json says of one GPU's part of a layer."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head: int
    inner: int
    """Of a layer without experts; of one expert."""
    experts: int
    chosen: int
    vocabulary: int
    tp: int

    @classmethod
    def of(cls, config: Mapping[str, Any], tp: int) -> ModelShape:
        """config: of config.json. tp: GPUs that share every layer.

        Raises ConfigError naming the key that is missing, or what such a profile cannot say of the model.
        """
        shape = config.get("text_config", config)
        for key in ("kv_lora_rank", "n_shared_experts"):
            if shape.get(key):
                raise ConfigError(
                    f"config.json: {key}={shape[key]!r}: such layers are not read from a profile by shape"
                )
        others = [kind for kind in shape.get("layer_types") or () if kind != "full_attention"]
        if others:
            raise ConfigError(f"config.json: layer_types has {others[0]!r}; only full attention is read from a profile")

        def size(*keys: str) -> int:
            for key in keys:
                value = shape.get(key)
                if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                    return value
            raise ConfigError(f"config.json: {keys[0]}={shape.get(keys[0])!r} must be a positive number")

        heads = size("num_attention_heads")
        kv_heads = size("num_key_value_heads", "num_attention_heads")
        if tp < 1 or heads % tp:
            raise ConfigError(f"tp={tp} must be 1 or more and divide the {heads} attention heads")
        experts = int(shape.get("num_local_experts") or shape.get("num_experts") or 0)
        return cls(
            hidden=size("hidden_size"),
            layers=size("num_hidden_layers"),
            heads=heads // tp,
            kv_heads=max(1, kv_heads // tp),
            head=int(shape.get("head_dim") or size("hidden_size") // heads),
            inner=size("moe_intermediate_size", "intermediate_size") if experts else size("intermediate_size"),
            experts=experts,
            chosen=size("num_experts_per_tok") if experts else 0,
            vocabulary=size("vocab_size"),
            tp=tp,
        )

    def products(self) -> dict[str, tuple[int, int]]:
        """Outputs and inputs of each product of a layer, by its name."""
        found = {
            "qkv_proj": ((self.heads + 2 * self.kv_heads) * self.head, self.hidden),
            "o_proj": (self.hidden, self.heads * self.head),
        }
        if self.experts:
            return found | {"router": (self.experts, self.hidden)}
        inner = self.inner // self.tp
        return found | {"gate_up_proj": (2 * inner, self.hidden), "down_proj": (self.hidden, inner)}

    def small(self) -> tuple[int, ...]:
        """Bytes for each token that kernels between the products read and write, in 16 bits, of each such kernel of a layer."""
        rotated, cached = (self.heads + self.kv_heads) * self.head, 2 * self.kv_heads * self.head
        norm = 4 * self.hidden  # the sum and the residual are read, both are written
        found: tuple[int, ...] = (norm, norm, 2 * rotated, 2 * cached)
        if not self.experts:  # the experts' own kernels have theirs
            found += (3 * self.inner // self.tp,)
        return tuple(2 * numbers for numbers in found)


@dataclass(frozen=True, slots=True)
class ShapeKernels:
    """What `read_shapes` returns."""

    profile: KernelProfile
    layers: int
    files: tuple[Path, ...]
    """What was read."""


def is_shape_profile(path: str | Path) -> bool:
    """A folder that has a table of products by shape in it, or below."""
    return Path(path).is_dir() and bool(_files(Path(path), "products", None))


def read_shapes(
    path: str | Path,
    config: Mapping[str, Any],
    *,
    tp: int = 1,
    engine: str = "vllm",
    dtype: str = "bfloat16",
    gpu: str | None = None,
) -> ShapeKernels:
    """The kernels of one model on one GPU.

    path: the folder of a GPU. config: of the model's config.json. tp: GPUs that share every layer. engine: whose kernels, where
    the folder has those of several; of several versions the newest is read. dtype: of the products, as the profile calls it.
    The logits are bfloat16. gpu: one of `data_sheets.GPUS`, for the kernels between the products.

    Raises ConfigError naming the table, the column or the shape that is missing.
    """
    shape = ModelShape.of(config, tp)
    try:
        return _read(Path(path), shape, engine, dtype, gpu)
    except ConfigError:
        raise
    except KeyError as error:
        raise ConfigError(f"profile {str(path)!r} has a table without the column {error}") from None
    except (TypeError, ValueError) as error:  # of a cell
        raise ConfigError(f"profile {str(path)!r} has a cell that is no number: {error}") from error


def _read(folder: Path, shape: ModelShape, engine: str, dtype: str, gpu: str | None) -> ShapeKernels:
    tp = shape.tp
    found = KernelProfile(shards={tp})
    # Products: of each layer by tokens, and the logits by rows.
    products, file = _table(folder, "products", engine, lambda row: row["gemm_dtype"] in (dtype, "bfloat16"))
    files = [file]
    by_type = {kind: _Products([row for row in products if row["gemm_dtype"] == kind]) for kind in {dtype, "bfloat16"}}
    for name, (outputs, inputs) in shape.products().items():
        grid = by_type["bfloat16" if name == "router" else dtype]
        if not grid.times:
            raise ConfigError(f"profile {str(file)!r} has no products of dtype={dtype!r}")
        found.tokens[name] = {size: [seconds] for size, seconds in grid.between(outputs, inputs).items()}
    logits = by_type["bfloat16"].between(-(-shape.vocabulary // tp), shape.hidden)
    found.rows["lm_head"] = {size: [seconds] for size, seconds in logits.items() if size <= columns.MAX_ROWS}
    # Attention: without a window, of these heads.
    heads = {"num_heads": shape.heads, "num_key_value_heads": shape.kv_heads, "head_dim": shape.head}
    heads_of = heads | {"attn_dtype": "bfloat16", "kv_cache_dtype": "bfloat16", "window_size": 0}
    for part in ("prompt", "decode"):
        rows, file = _table(folder, part, engine, _same(heads_of))
        if not rows:
            raise ConfigError(f"profile {str(file)!r} has no attention of {_told(heads)}")
        files.append(file)
        found.attention += _attention(rows, part)
    # Experts, and what GPUs tell each other.
    if shape.experts:
        experts, file = _experts(folder, shape, engine, dtype)
        files.append(file)
        found.tokens["experts"] = experts
    if tp > 1:
        reduced, file = _reduces(folder, shape, engine, tuple(found.tokens["o_proj"]))
        files.append(file)
        found.tokens["all_reduce"] = reduced
    if gpu is not None:
        bandwidth = MEMORY * gpu_named(gpu).bytes_per_s
        found.tokens["small"] = {
            m: [sum(SMALL_S + m * size / bandwidth for size in shape.small())] for m in found.tokens["o_proj"]
        }
    found.num_rows = sum(map(len, found.tokens.values())) + len(found.attention)
    return ShapeKernels(found, shape.layers, tuple(files))


# Tables ------------------------------------------------------------------------------------------------------------------


def _files(folder: Path, part: str, engine: str | None) -> list[Path]:
    """By version, the newest last."""
    stem = columns.SHAPE_TABLES[part]
    found = [file for ending in ("csv", "parquet") for file in folder.rglob(f"{stem}.{ending}")]
    named = [file for file in found if engine is None or engine in file.relative_to(folder).parts]

    def version(file: Path) -> tuple[int, ...]:
        return tuple(int(digits) for digits in file.parent.name.split(".") if digits.isdecimal())

    return sorted(named, key=lambda file: (version(file), str(file)))


def _table(folder: Path, part: str, engine: str, keeps: Callable[[Row], bool]) -> tuple[list[Row], Path]:
    """The rows of the newest table that are kept, and its file."""
    files = _files(folder, part, engine)
    if not files:
        raise ConfigError(
            f"profile {str(folder)!r} has no {columns.SHAPE_TABLES[part]}.parquet or .csv of {engine!r}: choose its engine"
        )
    file = files[-1]
    try:
        return [row for row in _rows(file) if keeps(row)], file
    except (OSError, UnicodeDecodeError, csv.Error, ValueError) as error:
        raise ConfigError(f"profile {str(file)!r} cannot be read: {error}") from error
    except KeyError as error:
        raise ConfigError(f"profile {str(file)!r} has no column {error}") from None


def _rows(file: Path) -> Iterable[Row]:
    if file.suffix == ".csv":
        with open(file, newline="", encoding="utf-8") as opened:
            return [{name: _value(text) for name, text in row.items()} for row in csv.DictReader(opened)]
    try:
        parquet = importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise ConfigError(f"profile {str(file)!r} needs pyarrow: pip install 'actorllm[lab]'") from error
    rows: list[Row] = parquet.read_table(file).to_pylist()
    return rows


def _value(text: str | None) -> float | str:
    try:
        return float(text or "")
    except ValueError:
        return text or ""


def _same(wanted: Mapping[str, Any]) -> Callable[[Row], bool]:
    """A column that a table lacks says nothing."""
    return lambda row: all(name not in row or row[name] == value for name, value in wanted.items())


def _told(sizes: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in sizes.items())


def _seconds(row: Row) -> float:
    return float(row["latency"]) * columns.SHAPE_UNIT


# Parts -------------------------------------------------------------------------------------------------------------------


class _Products:
    """Seconds of products by outputs and inputs, and by tokens."""

    def __init__(self, rows: Sequence[Row]) -> None:
        found: dict[tuple[int, int], dict[int, list[float]]] = {}
        for row in rows:
            tokens = int(row["m"])
            if tokens in columns.NODES:
                found.setdefault((int(row["n"]), int(row["k"])), {}).setdefault(tokens, []).append(_seconds(row))
        self.times = {pair: {m: median(each) for m, each in by.items()} for pair, by in found.items()}
        self._outputs, self._inputs = (sorted({pair[axis] for pair in self.times}) for axis in (0, 1))

    def between(self, outputs: int, inputs: int) -> dict[float, float]:
        """Of a product of these sizes: seconds by tokens, at all numbers of tokens that its neighbours have."""
        (n0, n1, x, more_n), (k0, k1, y, more_k) = _about(self._outputs, outputs), _about(self._inputs, inputs)
        corners = [
            (self.times[pair], share)
            for pair, share in (
                ((n0, k0), (1 - x) * (1 - y)),
                ((n1, k0), x * (1 - y)),
                ((n0, k1), (1 - x) * y),
                ((n1, k1), x * y),
            )
            if share and pair in self.times
        ]
        if abs(sum(share for _, share in corners) - 1) > 1e-9:
            raise ConfigError(f"the profile has no products beside {outputs} outputs and {inputs} inputs")
        common = set.intersection(*(set(by_tokens) for by_tokens, _ in corners))
        scale = more_n * more_k
        sizes = sorted(common)
        told = _ascending([scale * sum(share * by_tokens[m] for by_tokens, share in corners) for m in sizes])
        return {float(m): seconds for m, seconds in zip(sizes, told, strict=True)}


def _ascending(values: Sequence[float]) -> list[float]:
    """The nearest values that do not descend (isotonic regression): more tokens take no less, and what says so is noise."""
    pools: list[tuple[float, int]] = []  # sums, and of how many
    for value in values:
        total, num = value, 1
        while pools and pools[-1][0] / pools[-1][1] > total / num:
            more, others = pools.pop()
            total, num = total + more, num + others
        pools.append((total, num))
    return [total / num for total, num in pools for _ in range(num)]


def _about(axis: Sequence[int], size: int) -> tuple[int, int, float, float]:
    """The nodes at both sides of a size, the share of the way between them, and how often it has the largest one."""
    if size >= axis[-1]:
        return axis[-1], axis[-1], 0.0, size / axis[-1]
    above = next(i for i, node in enumerate(axis) if node > size)
    if not above:
        return axis[0], axis[0], 0.0, 1.0
    low, high = axis[above - 1], axis[above]
    return low, high, (size - low) / (high - low), 1.0


def _attention(rows: Iterable[Row], part: str) -> list[Attention]:
    """Of a prompt those of one chunk alone; of decode rows any number of them, after `step` tokens."""
    found = []
    for row in rows:
        size, batch, before = float(row["isl"]), float(row["batch_size"]), float(row["step"])
        if part == "decode":
            found.append(Attention(0.0, 0.0, batch, before + size, _seconds(row)))
        elif batch == 1:
            found.append(Attention(size, before, 0.0, 0.0, _seconds(row)))
    return found


def _experts(folder: Path, shape: ModelShape, engine: str, dtype: str) -> tuple[dict[float, list[float]], Path]:
    sizes = {
        "hidden_size": shape.hidden,
        "inter_size": shape.inner,
        "topk": shape.chosen,
        "num_experts": shape.experts,
        "moe_tp_size": shape.tp,
    }
    rows, file = _table(folder, "experts", engine, _same(sizes | {"moe_dtype": dtype, "moe_ep_size": 1}))
    loads = {row["distribution"] for row in rows}
    load = next((name for name in columns.EXPERT_LOADS if name in loads), None)
    if load is None:
        raise ConfigError(f"profile {str(file)!r} has no experts of dtype={dtype!r}, {_told(sizes)}")
    found: dict[float, list[float]] = {}
    for row in rows:
        if row["distribution"] == load:
            found.setdefault(float(row["num_tokens"]), []).append(_seconds(row))
    return found, file


def _reduces(
    folder: Path, shape: ModelShape, engine: str, tokens: Sequence[float]
) -> tuple[dict[float, list[float]], Path]:
    """Of the outputs of so many tokens; the table is by numbers in the message."""
    rows, file = _table(folder, "reduce", engine, _same({"num_gpus": shape.tp, "allreduce_dtype": "bfloat16"}))
    kinds = {row["kernel_source"] for row in rows}
    kind = next((name for name in columns.IN_GRAPHS if name in kinds), None)
    sizes: dict[float, list[float]] = {}
    for row in rows:
        if kind is None or row["kernel_source"] == kind:
            sizes.setdefault(float(row["message_size"]), []).append(_seconds(row))
    if not sizes:
        raise ConfigError(f"profile {str(file)!r} has no all-reduce among {shape.tp} GPUs")
    at = sorted(sizes)
    told = np.interp([shape.hidden * m for m in tokens], at, [median(sizes[size]) for size in at])
    return {m: [float(seconds)] for m, seconds in zip(tokens, told.tolist(), strict=True)}, file
