"""Which device an engine runs on, and what that takes, as far as that can be known without torch.

`choose` turns the argument `device` into "cpu", "cuda" or the name of another backend (`model.backends`); `rules_of` says which
arguments that takes. They are called where the configuration is made, in the application's process. So they ask files and never
the driver: a process that has asked the driver cannot be forked any more. What only the driver knows (compute capability,
memory) the worker checks when it starts (`model.cuda.device`). Standard library only.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from actorllm.errors import ConfigError, nearest_name
from actorllm.types.quantization import GGUF

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

DEVICES = ("auto", "cpu", "cuda")

Dtype: TypeAlias = Literal["float32", "bfloat16", "float16"]
"""What a model computes in, and what its KV cache holds."""

GROUP = "actorllm.backends"
"""Of the entry points by which installed packages announce theirs."""

RULES_GROUP = "actorllm.backend_rules"
"""Of the entry points that name the `BackendRules` of these."""

CODES_OF_8_BITS = ("int8", "fp8", "compressed-tensors", "torchao", "modelopt")
"""Methods of `quantization=` whose weights have 8 bits on CUDA, or may have them."""

_DEV = Path("/dev")


@dataclass(frozen=True)
class BackendRules:
    """What a backend takes of an engine's arguments. Checked before anything is started, so it must not need torch."""

    dtypes: tuple[Dtype, ...] = ("float32", "bfloat16")
    """What it computes in. The first is that of models that are stored in another one."""
    block_size: int = 32
    """Where none is given."""
    block_multiple: int = 1
    """What a block size must be a multiple of."""
    makes_vectors: bool = False
    """Prompts are pooled here (`runner="pooling"`), with heads for labels in the worker of the backend."""
    encodes: bool = False
    """Encoders run here, in which every token attends to all others of its prompt."""
    quantizes: bool = False
    """Quantized weights are computed with here."""
    adapts: bool = False
    """Requests may have LoRA adapters here."""
    drafts: bool = False
    """Several tokens of a row are checked in one step here (`speculative_config`)."""
    drafting_models: tuple[str, ...] = ()
    """Methods whose drafts are computed by a model, of those that run here."""
    has_own_memory: bool = False
    """The KV cache is not in the memory of the machine."""
    title: str = ""
    """In messages; empty: the argument."""

    def why_not(self, options: Mapping[str, Any], *, pools: bool) -> str | None:
        """Which argument it cannot do, and what it could; None: none. A subclass may know more such arguments.

        Arguments:
            options: the arguments of the engine, those that were not given at their defaults.
            pools: vectors of prompts are wanted.
        """
        dtype, block_size, multiple = options["dtype"], options["block_size"], self.block_multiple
        where = self.title or f"device={options['device']!r}"
        if pools and not self.makes_vectors:
            return f"runner={options['runner']!r}: vectors of prompts are not made on {where} yet; use a model that generates"
        if options.get("quantization") is not None and not self.quantizes:
            return f"quantization={options['quantization']!r} is not supported on {where} yet; leave it at None"
        if options.get("enable_lora") and not self.adapts:
            return f"enable_lora=True: there are no adapters on {where} yet; leave it out"
        if options.get("speculative_config") is not None and not self.drafts:
            return f"speculative_config={options['speculative_config']!r:.120} is not supported on {where} yet; leave it at None"
        if (
            options.get("speculative_config") is not None
            and (reason := self._why_no_drafts(options, where)) is not None
        ):
            return reason
        if dtype_name(dtype) not in ("auto", *self.dtypes):
            known = ", ".join(map(repr, ("auto", *self.dtypes[:-1])))
            return f"dtype={dtype!r} is not supported on {where}; use {known} or {self.dtypes[-1]!r}"
        if isinstance(block_size, int) and block_size % multiple:
            fix = (
                ", which is the default there; use that" if multiple == self.block_size else f"; use {self.block_size}"
            )
            return f"block_size={block_size}: on {where} it must be a multiple of {multiple}{fix}"
        return None

    def _why_no_drafts(self, options: Mapping[str, Any], where: str) -> str | None:
        """As `why_not`, of `speculative_config`. where: this backend, in a message."""
        from actorllm.types.speculation import WITH_MODEL, read_speculation  # imports numpy

        speculation = read_speculation(options["speculative_config"])
        if speculation is None or speculation.method not in WITH_MODEL:
            return None
        told = f"speculative_config (method={speculation.method!r}) is not supported"
        if speculation.method not in self.drafting_models:
            known = ", ".join(map(repr, (*self.drafting_models, "ngram")))
            return f"{told} on {where} yet; use {known} or 'suffix'"
        if (size := options.get("tensor_parallel_size") or 1) > 1:
            return f"{told} with tensor_parallel_size={size} on {where} yet; use 'ngram' or 'suffix', or leave one of them out"
        return None


class CudaRules(BackendRules):
    """Those of CUDA know more of quantized weights."""

    def why_not(self, options: Mapping[str, Any], *, pools: bool) -> str | None:
        reason = super().why_not(options, pools=pools)
        if reason is None and options.get("compute_scheme") is not None:
            return f"compute_scheme={options['compute_scheme']!r} is about products on a CPU, not on {self.title}; leave it out"
        if (
            reason is None
            and options.get("kv_cache_dtype") not in (None, "auto")
            and options.get("model_impl") == "transformers"
        ):
            told = f"kv_cache_dtype={options['kv_cache_dtype']!r} is not supported on {self.title}"
            return f"{told} with model_impl='transformers' yet; leave one of them out"
        if reason is None and options.get("enable_lora") and options.get("model_impl") == "transformers":
            told = f"enable_lora=True: there are no adapters on {self.title} with model_impl='transformers' yet"
            return f"{told}; leave one of them out"
        return self._why_not_quantized(options) if reason is None else reason

    def _why_not_quantized(self, options: Mapping[str, Any]) -> str | None:
        """As `why_not`, of quantized weights."""
        method = options.get("quantization")
        if method is None:
            return None
        for name, taken in (
            ("quantization_twin", (None, False, True) if method in CODES_OF_8_BITS else (None, False)),
            ("model_impl", (None, "auto", "vllm", "transformers") if method != GGUF else (None, "auto", "vllm")),
        ):
            if options.get(name) not in taken:
                told = f"quantization={method!r} is not supported on {self.title} with"
                return f"{told} {name}={options[name]!r} yet; leave one of them out"
        return None


OWN_RULES = {
    "cpu": BackendRules(
        dtypes=("float32", "bfloat16", "float16"),
        makes_vectors=True,
        encodes=True,
        quantizes=True,
        adapts=True,
        drafts=True,
        drafting_models=("draft_model", "eagle", "eagle3", "mtp"),
    ),
    "cuda": CudaRules(
        dtypes=("bfloat16", "float16"),
        block_size=64,
        block_multiple=64,
        makes_vectors=True,
        quantizes=True,
        adapts=True,
        drafts=True,
        drafting_models=("draft_model", "eagle", "eagle3", "mtp"),
        has_own_memory=True,
        title="CUDA",
    ),
}


def dtype_name(dtype: Any) -> str:
    """As `BackendRules.dtypes` has it: of torch's dtypes, and of names for the same."""
    name = str(dtype).removeprefix("torch.")
    return {"float": "float32", "half": "float16"}.get(name, name)


def rules_of(device: str) -> BackendRules:
    """What a backend takes: ours, those that its package announces, or those of any. Raises ConfigError."""
    if device in OWN_RULES:
        return OWN_RULES[device]
    point = _announced(RULES_GROUP).get(device)
    if point is None:
        return BackendRules()
    try:
        found = point.load()
    except Exception as error:  # of a package of another's
        raise ConfigError(
            f"device={device!r}: {point.value} cannot be imported: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(found, BackendRules):
        raise ConfigError(f"device={device!r}: {point.value} is no actorllm.types.device.BackendRules")
    return found


def choose(device: Any, *, is_elsewhere: bool = False) -> str:
    """ "auto" is "cuda" where torch is built for it and a GPU is visible. Raises ConfigError for "cuda" where not.

    is_elsewhere: all workers are on other machines, which see for themselves.
    """
    if device == "cpu" or (device == "cuda" and is_elsewhere):
        return str(device)
    if device not in ("auto", "cuda"):
        names = (*DEVICES, *sorted(others()))
        if device in names:
            return str(device)
        known = nearest_name(device, names) if isinstance(device, str) else ""
        raise ConfigError(f"device={device!r} must be one of {', '.join(map(repr, names))}{known}")
    reason = why_not_cuda()
    if reason is None:
        return "cuda"
    if device == "cuda":
        raise ConfigError(f"device='cuda': {reason}, or use device='cpu'")
    return "cpu"


def others() -> dict[str, EntryPoint]:
    """The backends of installed packages, by name. None of them takes the place of ours."""
    return _announced(GROUP)


def _announced(group: str) -> dict[str, EntryPoint]:
    from importlib.metadata import entry_points  # reads every package's folder: only for a name that is not ours

    return {point.name: point for point in entry_points(group=group) if point.name not in DEVICES}


def why_not_cuda() -> str | None:
    """What keeps a worker from running on a GPU here, and what to do about it; None: nothing that can be seen."""
    version, cuda = _torch_build()
    if cuda is None:
        return f"torch {version} is built without CUDA; install a build for CUDA (https://pytorch.org/get-started)"
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.strip() in ("", "-1"):
        return f"CUDA_VISIBLE_DEVICES={visible!r} hides every GPU; name one"
    if not (any(_DEV.glob("nvidia[0-9]*")) or (_DEV / "dxg").exists()):
        return "no NVIDIA GPU is visible on this machine (/dev has none); install its driver"
    return None


def num_visible_gpus() -> int:
    """GPUs of NVIDIA that a worker here would see, without torch; 0 where their number is not known."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return sum(name.strip() not in ("", "-1") for name in visible.split(","))
    return sum(1 for _ in _DEV.glob("nvidia[0-9]*"))


def _torch_build() -> tuple[str, str | None]:
    """torch's version, and that of CUDA it is built for, read from its files: importing it takes a second."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return "(not installed)", None
    text = (Path(spec.origin).parent / "version.py").read_text()
    version = re.search(r"^__version__\s*=\s*'([^']*)'", text, re.M)
    cuda = re.search(r"^cuda\b[^=\n]*=\s*'([^']*)'", text, re.M)
    return version.group(1) if version else "(unknown)", cuda.group(1) if cuda else None
