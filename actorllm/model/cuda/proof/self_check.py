"""`SelfCheck`: every kernel that a model launches, with the configuration that it launches it with, against torch.

The runner makes a few steps of made-up requests while the check is `ops.checking`. Each operation then runs twice, on the tensors
of the step and on copies of them: by its kernel, and by its function in `host_ops`. What the step reads of its outputs is
compared. A kernel that differs, or does not compile, fails. The step goes on with what torch has found, so that the operations
behind it are judged by themselves. Of launches that are alike, the first is compared.

What a kernel leaves for another kernel alone (plans, scratch) is judged by what that one makes of it.
"""

from __future__ import annotations

import dataclasses
import inspect
import logging
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from actorllm.model.cuda import host_ops
from actorllm.model.cuda.ops import Operation

logger = logging.getLogger(__name__)

TOLERANCE = {torch.bfloat16: 3e-2, torch.float16: 1e-2, torch.float32: 2e-3}
"""Of the size of a number, and of the root mean square of its row or of all numbers; by the coarsest type among the arguments."""
MAX_NUMBER = 1e20
"""What is larger is no result."""
MAX_OTHER_IDS = 0.05
"""The share of ids that may be others: of two candidates that are nearly equal, rounding chooses."""

OUTPUTS: dict[str, tuple[str, ...]] = {
    "step_prep": ("ids", "positions", "kv_slots", "seq_lens", "num_computed"),
    "plan_decode": (),
    "embed": ("y",),
    "rmsnorm": ("y", "residual"),
    "skinny_gemm": ("y",),
    "quantized_gemm": ("y",),
    "dequantize": ("y",),
    "quantize_rows": ("rounded", "factors"),
    "scale_sums": ("y",),
    "router_scores": ("scores",),
    "choose_experts": ("numbers", "weights"),
    "group_pairs": ("starts",),  # of pairs that are not here, what was in the order stays there
    "grouped_gemm": ("y",),
    "sum_experts": ("y",),
    "lora_shrink": ("hidden",),
    "lora_expand": ("y",),
    "activation_mul": ("y",),
    "qknorm_rope_kv": ("q", "keys", "values"),
    "attn_decode": ("out", "keys", "values"),
    "attn_prefill": ("out",),
    "latent_rope_kv": ("rotated", "latents"),
    "latent_decode": ("out",),
    "latent_prefill": ("out",),
    "kv_copy": ("pool",),
    "kv_clear": ("pool",),
    "lm_head_sample": ("offers.highest", "offers.id"),
    "sample_pick": ("tokens", "is_finite", "state.token_index"),
    "tile_maxima": ("logits",),
    "find_cutoffs": (),  # see `_kept`
    "draw_tiles": ("offers.highest", "offers.id"),
    "edit_logits": ("logits",),
    "top_logprobs": ("ids", "logprobs", "ranks"),
}
"""What the rest of a step reads of an operation: names of arguments, or of their fields."""

IDS = ("offers.id", "tokens", "ids", "ranks", "numbers")
"""Of these, few may be others."""
CACHED = ("keys", "values", "rounded")
"""Of these, in codes of 8 bits, as few may be the next code."""
CONSTANT = (
    "weight",
    "codes",
    "scales",
    "down",
    "up",
    "starts",
    "bias",
    "norm",
    "norms",
    "cos",
    "sin",
    "rope",
    "sinks",
    "correction",
)
"""Arguments that no operation writes: they are not copied."""


class SelfCheck:
    """failed: by the name of the operation, what is wrong with its kernel."""

    def __init__(self) -> None:
        self.failed: dict[str, str] = {}
        self.num_checked = 0
        self._seen: set[Any] = set()

    def __call__(self, name: str, operation: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Run an operation; see `ops.checking`."""
        given = inspect.signature(operation.launcher).bind(*args, **kwargs).arguments
        like = _kind(name, given)
        if name in self.failed:
            operation.on_host(*args, **kwargs)
            return
        if like in self._seen:
            operation.launcher(*args, **kwargs)
            return
        self._seen.add(like)
        self.num_checked += 1
        copies = Copies()
        twins = {key: value if key in CONSTANT else copies.of(value) for key, value in given.items()}
        operation.on_host(**twins)
        try:
            operation.launcher(*args, **kwargs)
            what = self._difference(name, given, twins)
        except Exception as error:  # it does not compile, or cannot be launched
            what = f"{type(error).__name__}: {error!s:.300}"
        if what is not None:
            self.failed[name] = what
            copies.back()

    @staticmethod
    def _difference(name: str, given: dict[str, Any], twins: dict[str, Any]) -> str | None:
        if name == "find_cutoffs":
            kept, right = (_kept(values) for values in (given, twins))
            if bool(((kept - right).abs() > 1 + MAX_OTHER_IDS * right).any()):
                return f"{kept.tolist()} logits are kept where torch keeps {right.tolist()}"
        tolerance = max((TOLERANCE.get(one.dtype, 0.0) for one in _tensors(given.values())), default=0.0)
        for output in OUTPUTS[name]:
            found, expected = (_field(values, output) for values in (given, twins))
            if found is None or expected is None:
                continue
            error = difference(found, expected, output, tolerance)
            if error is not None:
                return f"{output} {error}, of {tuple(found.shape)} {found.dtype}"
        return None


def difference(
    found: torch.Tensor, expected: torch.Tensor, output: str = "", tolerance: float = TOLERANCE[torch.float32]
) -> str | None:
    """What is wrong with a tensor, in words; None: nothing."""
    if output in IDS:
        share = (found != expected).double().mean().item()
        return f"differs in {share:.0%} of its entries" if share > MAX_OTHER_IDS else None
    if output in CACHED and found.dtype in (torch.uint8, torch.int8):
        return _other_codes(found, expected)
    if not found.is_floating_point():
        num = int((found != expected).sum())
        return f"differs in {num} entries" if num else None
    x, y = found.double(), expected.double()
    is_number = y.isfinite()
    if not torch.equal(x.isfinite(), is_number):
        return "has numbers that are not finite where torch has others"
    off, size = (x - y)[is_number].abs(), y[is_number].abs()
    if not off.numel():
        return None
    allowed = tolerance * (size + _spread(y)[is_number])
    if bool((off <= allowed).all()):
        return None
    worst = int((off - allowed).argmax())
    return f"is off by {off[worst].item():.3g} where {allowed[worst].item():.3g} is allowed"


def _spread(numbers: torch.Tensor) -> torch.Tensor:
    """The root mean square of all numbers, or of the row that each is in where that is more: rows may be padding.

    What stands for an id that is not there (`NOT_THERE`, infinity) is left out.
    """
    is_number = numbers.isfinite() & (numbers.abs() < MAX_NUMBER)
    squares = numbers.where(is_number, 0.0).square()
    whole = (squares.sum() / is_number.sum().clamp(min=1)).sqrt()
    if numbers.dim() < 2:
        return whole.expand_as(numbers)
    rows = (squares.sum(-1, keepdim=True) / is_number.sum(-1, keepdim=True).clamp(min=1)).sqrt()
    return torch.maximum(rows, whole).expand_as(numbers)


def _other_codes(found: torch.Tensor, expected: torch.Tensor) -> str | None:
    """As `difference`, of codes of 8 bits, uint8 those of floats: what is nearly between two of them may be either."""
    x, y = found.short(), expected.short()
    if found.dtype == torch.uint8:
        x, y = (torch.where(codes >= 128, 128 - codes, codes) for codes in (x, y))
    off, num_written = (x - y).abs(), int((y != 0).sum())
    num = int((off > 0).sum())
    if num and (int(off.max()) > 1 or num > MAX_OTHER_IDS * num_written):
        return f"differs in {num} of {num_written} codes, by up to {int(off.max())}"
    return None


class Copies:
    """Copies of tensors that share memory as those do."""

    def __init__(self) -> None:
        self._storages: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def of(self, value: Any) -> Any:
        """A tensor, or something with tensors in it."""
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            fields = {one.name: self.of(getattr(value, one.name)) for one in dataclasses.fields(value)}
            return dataclasses.replace(value, **fields)
        if isinstance(value, tuple):
            return tuple(self.of(one) for one in value)
        return value

    def back(self) -> None:
        """Give the tensors what their copies hold."""
        for tensor, copy in self._storages.values():
            tensor.copy_(copy)

    def _tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._storages:
            whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
            self._storages[storage.data_ptr()] = whole, whole.clone()
        _, copy = self._storages[storage.data_ptr()]
        twin = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return twin.set_(copy.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())


def _tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Those among the arguments, and among the fields of tuples."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, tuple):
            yield from _tensors(value)


def _kept(values: dict[str, Any]) -> torch.Tensor:
    """How many logits of every row are left to be drawn from: a cutoff may lie anywhere between two of them."""
    logits, rows = values["logits"], values["rows"]
    key = (0.0 - host_ops.scaled(logits, values["state"], rows)).view(torch.int32)
    is_kept = key <= values["scratch"].cutoff[: len(rows)].unsqueeze(1)
    return torch.where(rows >= 0, is_kept.sum(1), 0)


def _field(values: dict[str, Any], output: str) -> torch.Tensor | None:
    name, _, attribute = output.partition(".")
    value = values.get(name)
    found: torch.Tensor | None = getattr(value, attribute) if attribute and value is not None else value
    return found


def _kind(name: str, given: dict[str, Any]) -> tuple[Any, ...]:
    """What a build of a kernel depends on, and a little more: shapes, types and settings."""
    parts: list[tuple[Any, ...]] = []
    for key, value in given.items():
        if isinstance(value, torch.Tensor):
            parts.append((key, tuple(value.shape), value.dtype))
        elif isinstance(value, int | float | str | bool | None):
            parts.append((key, value))
    return (name, *parts)
