"""Adapters in a model of transformers: which of its packed layers they may adapt, and how these get them.

What an adapter adds to a token is found by the token's place in the step (`model.adapters.slots`). So a layer can be adapted if it
sees all tokens of a step, in their order, once. Experts and whatever else sees a choice of tokens cannot. This is found out by
running the model. Called by `transformers_backend`.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import torch

from actorllm.errors import UnsupportedModelError
from actorllm.model.adapters import AdaptedLayer
from actorllm.model.adapters.slots import AdapterSlots
from actorllm.model.hf.packing import ROUTERS, PackedModule
from actorllm.model.hf.probe import NUM_BLOCKS, Probed, step_inputs
from actorllm.model.weights import ALL

STEPS = (3, 5)
"""Tokens of the prefills beside a decode row, of the steps that are tried."""


def adapt(decoder: Any, body: torch.nn.Module, slots: AdapterSlots) -> None:
    """Let the layers of `body` be adapted. decoder: a packed `Probed`, and its `model`. Raises UnsupportedModelError."""
    names = {module: name for name, module in decoder.model.named_modules() if isinstance(module, PackedModule)}
    inside = [module for module in body.modules() if module in names]
    for module in _layers_that_see_all(decoder, inside):
        name = names[module]
        if name.rpartition(".")[2] not in ROUTERS and ".experts." not in name:
            outputs = torch.arange(module.out_features)
            whole = slice(0, module.out_features)
            layer = AdaptedLayer(name, module.out_features, module.in_features, outputs, ALL, whole)
            module.product = slots.adapt(module.product, [layer])
    if not slots.targets:
        raise UnsupportedModelError(
            f"enable_lora=True: architecture {decoder.config.architecture!r} has no linear layers that an adapter can adapt; "
            f"leave it out"
        )


def adapt_again(model: torch.nn.Module, slots: AdapterSlots) -> None:
    """Let the same layers of the same model with other weights be adapted."""
    for name, layer in slots.targets.items():
        module: Any = model.get_submodule(name)
        module.product = slots.adapt(module.product, [layer])


@torch.inference_mode()
def _layers_that_see_all(decoder: Probed, modules: list[PackedModule]) -> list[PackedModule]:
    """Those that are called once in each step, with as many rows as the step has tokens."""
    calls: Counter[PackedModule] = Counter()
    num_tokens = 0

    def count(module: PackedModule, given: tuple[torch.Tensor, ...]) -> None:
        # Any other call counts as many, so that it is not taken for the one call.
        calls[module] += 1 if given[0].numel() == num_tokens * module.in_features else len(STEPS) + 1

    hooks = [module.register_forward_pre_hook(count) for module in modules]
    try:
        for length in STEPS:
            ids = np.arange(length, dtype=np.int64) % decoder.config.vocab_size
            decode = (0, length, np.array([3, 4], np.int32))
            inputs = step_inputs(decoder, decode, [(ids, 0, np.array([0, 1], np.int32))])
            num_tokens = 1 + length
            decoder.forward(inputs, decoder.new_cache(NUM_BLOCKS))
    finally:
        for hook in hooks:
            hook.remove()
    return [module for module in modules if calls[module] == len(STEPS)]
