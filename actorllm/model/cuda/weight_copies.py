"""New weights in the place of those before, on a device: numbers of a decoder on the host go into the tensors of another one.

Recorded steps hold the addresses of these tensors, and heads that draft hold some of them. So both go on as they are. Called by the
runner.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from actorllm.errors import UnsupportedModelError
from actorllm.model.cuda.decoder import DeviceDecoder, DeviceLayer
from actorllm.model.cuda.experts import DeviceExperts, StackedWeights
from actorllm.model.cuda.latent import DeviceLatent
from actorllm.model.cuda.linear import DeviceDense
from actorllm.model.cuda.quantized import DeviceQuantized, DeviceSideBySide

WEIGHTS: dict[type, tuple[str, ...]] = {
    DeviceDecoder: ("embedding", "layers", "norm", "lm_head"),
    DeviceLayer: (
        *("qkv", "output", "latent", "experts", "gate_up", "down", "sinks"),
        *("input_norm", "mlp_norm", "output_norm", "mlp_output_norm", "qk_norms"),
    ),
    DeviceDense: ("weight", "bias"),
    DeviceQuantized: ("codes", "scales", "bias"),
    DeviceSideBySide: ("parts",),
    DeviceExperts: ("_router", "_router_bias", "_correction", "shared", "_gate_up", "_down"),
    StackedWeights: ("weight", "scales", "bias"),
    DeviceLatent: ("query_norm", "query_up", "norm", "_up"),
}
"""What of each class is weights, or holds some; all else is memory of steps, or follows from the shape."""


def pairs(old: object, new: object) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Each tensor of weights below an object, with the one in its place below another.

    Raises UnsupportedModelError: something below has weights that cannot change, or the two are not alike.
    """
    if isinstance(old, torch.Tensor) and isinstance(new, torch.Tensor):
        if old.shape != new.shape or old.dtype != new.dtype:
            raise _unlike(f"{tuple(old.shape)} of {old.dtype} and {tuple(new.shape)} of {new.dtype}")
        yield old, new
    elif isinstance(old, list | tuple) and isinstance(new, list | tuple):
        if len(old) != len(new):
            raise _unlike(f"{len(old)} and {len(new)} parts")
        for one, other in zip(old, new, strict=True):
            yield from pairs(one, other)
    elif old is not None or new is not None:
        names = WEIGHTS.get(type(old))
        if names is None or type(new) is not type(old):
            raise _unlike(f"{type(old).__name__} and {type(new).__name__}")
        for name in names:
            yield from pairs(getattr(old, name), getattr(new, name))


def _unlike(what: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"the new weights cannot take the place of those before on the device: {what}")
