"""What the config.json of a head that drafts says, in the forms in which EAGLE heads are published. Free of torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

OWN = "speculators_model_type"
"""A key of checkpoints of the library speculators, which have the shape of the layers in a tree of its own."""

SPECULATORS_DEFAULTS = {"norm_before_residual": True}
"""Where such a tree says nothing."""

MTP_LAYERS = "num_nextn_predict_layers"
"""How many layers a target has that predict further tokens (method 'mtp')."""


def head_tree(tree: Mapping[str, Any]) -> dict[str, Any]:
    """One flat tree: the shape of the layers, and what is a head's own.

    EAGLE's own checkpoints are flat. Others have the shape in `model` (EAGLEConfig of vLLM) or in `transformer_layer_config`
    (speculators).
    """
    flat = dict(tree)
    inner = flat.pop("model", None)
    if isinstance(inner, Mapping):
        flat = dict(inner) | {key: value for key, value in flat.items() if key != "model_type"}
    layers = flat.pop("transformer_layer_config", None)
    if isinstance(layers, Mapping):
        flat = SPECULATORS_DEFAULTS | dict(layers) | flat
        kind = str(layers.get("model_type", "llama"))
        flat["architectures"] = ["Qwen3ForCausalLM" if kind == "qwen3" else "LlamaForCausalLM"]
    return flat
