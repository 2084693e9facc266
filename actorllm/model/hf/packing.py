"""Linear layers of a transformers model, with their weights as the fused forwards have them (`model.linear`).

`pack` puts a `PackedModule` in place of every plain linear layer, one after the other. So no more than one weight is in
memory twice. An embedding that is also the head stays beside its packed copy. Other modules that multiply by a weight are left
as they are: the three-dimensional ones of experts, routers of their own. Called by `transformers_backend.load`, which
checks the logits afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from actorllm.model.cpu.layers import linear
from actorllm.model.linear import Form, Linear, LinearWeight
from actorllm.model.linear.dense import Dense


class PackedModule(torch.nn.Module):
    """x @ weight.T + bias, for x of any number of dimensions."""

    def __init__(self, weight: LinearWeight, replaced: torch.Tensor, make: Callable[[LinearWeight], Linear]) -> None:
        """replaced: the weight of the layer that it takes the place of. make: what computes with the weight."""
        super().__init__()
        self.out_features, self.in_features = weight.out_features, weight.in_features
        placeholder = torch.full((), torch.nan, dtype=replaced.dtype, device=replaced.device)
        self.weight = placeholder.expand(self.out_features, self.in_features)
        """Tells type and shape to code that asks. Each value is the same NaN, which takes no memory: what multiplies by it is
        found by the check of the logits. A product with a tensor on the meta device returns whatever the memory held."""
        self.product: Linear = make(weight)
        """What computes; adapters may be added to it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in_features] to [..., out_features]."""
        return self.product(x.reshape(-1, self.in_features)).view(*x.shape[:-1], self.out_features)


ROUTERS = ("gate", "router")
"""Names of layers that choose experts: a rounding there would choose others, so they stay dense."""


def pack(
    model: torch.nn.Module,
    form: Form = Dense,
    make: Callable[[LinearWeight], Linear] = linear,
    stored: Mapping[str, LinearWeight] | None = None,
) -> int:
    """In place, and for good: the values of the original weights are gone.

    form: what the weights become. make: what computes with one of them. stored: weights that are there already, by the names of
    modules. Returns how many bytes fewer a step reads of them.
    """
    packed: dict[torch.nn.Module, PackedModule] = {}
    head: Any = cast(Any, model).get_output_embeddings() if isinstance(model, PreTrainedModel) else None
    num_saved = 0
    for path, parent in list(model.named_modules()):
        for name, child in list(parent._modules.items()):
            if type(child) is torch.nn.Linear or type(child) is Conv1D:
                if child not in packed:
                    weight = child.weight.detach()
                    bias = None if child.bias is None else child.bias.detach()
                    plain = weight.T if isinstance(child, Conv1D) else weight
                    known = None if stored is None else stored.get(f"{path}.{name}" if path else name)
                    if known is not None:
                        made = known
                    elif child is head:
                        made = form.head_of(plain, bias)
                    else:
                        made = (Dense if name in ROUTERS else form).of(plain, bias)
                    num_saved += weight.numel() * weight.element_size() - made.num_bytes
                    packed[child] = PackedModule(made, weight, make)
                    del child.weight
                setattr(parent, name, packed[child])
    return num_saved
