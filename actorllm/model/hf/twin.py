"""The twin of a module: a second tree of modules over the same parameters, which can be configured without touching the first.

The engine runs the twin of a module that the application lends it. Mode, attention and frozen rotations are set on the twin, so the
application's own module keeps its mode, its hooks, its gradients and its configuration. Called by `transformers_backend`.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from types import MethodType
from typing import Any

import torch

HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
)


def twin(module: Any, *, on_meta: bool = False) -> Any:
    """A module with the same parameters, in eval mode and without hooks.

    Arguments:
        module: stays as it is.
        on_meta: parameters and buffers of the same shapes, without values. Parameters are bfloat16: some products know no other
            type there.
    """
    twins: dict[int, torch.nn.Module] = {id(part): copy.copy(part) for part in module.modules()}
    configs: dict[int, Any] = {}
    tensors: dict[int, torch.Tensor] = {}

    def without_values(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in tensors:
            empty = torch.empty_like(tensor, device="meta", requires_grad=False)
            if isinstance(tensor, torch.nn.Parameter):
                empty = torch.nn.Parameter(empty.bfloat16(), requires_grad=False)
            tensors[id(tensor)] = empty
        return tensors[id(tensor)]

    def own_config(config: Any) -> Any:
        if id(config) not in configs:
            configs[id(config)] = copy.deepcopy(config)
        return configs[id(config)]

    for part in module.modules():
        made: Any = twins[id(part)]
        fields = vars(made)
        fields["_modules"] = {
            name: None if child is None else twins[id(child)] for name, child in part._modules.items()
        }
        fields["_buffers"] = dict(part._buffers)
        if on_meta:
            for kind in ("_parameters", "_buffers"):
                fields[kind] = {
                    name: None if tensor is None else without_values(tensor) for name, tensor in fields[kind].items()
                }
        elif hasattr(part, "rope_type"):  # its frequencies are frozen in place
            fields["_buffers"] = {n: None if b is None else b.clone() for n, b in part._buffers.items()}
        for name in HOOKS:
            if name in fields:
                fields[name] = OrderedDict()
        for name, value in list(fields.items()):
            if isinstance(value, MethodType) and id(value.__self__) in twins:
                fields[name] = MethodType(value.__func__, twins[id(value.__self__)])
        if "config" in fields:
            fields["config"] = own_config(part.config)
    return twins[id(module)].eval()
