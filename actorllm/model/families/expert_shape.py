"""What families with experts read of a config.json alike."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from actorllm.errors import CorruptModelError
from actorllm.model.families.decoder_config import ExpertShape, positive


def expert_shape(hf: Mapping[str, Any], count: str, size: str, **differences: Any) -> ExpertShape:
    """count, size: the keys of the number of experts, and of their intermediate size. Raises CorruptModelError."""
    num_experts, num_active = positive(hf, count), positive(hf, "num_experts_per_tok")
    if num_active > num_experts:
        raise CorruptModelError(f"config.json: num_experts_per_tok={num_active} is more than {count}={num_experts}")
    common: dict[str, Any] = {
        "num_experts": num_experts,
        "num_active": num_active,
        "intermediate_size": positive(hf, size),
        "normalizes": bool(hf.get("norm_topk_prob", False)),
        "layers": (True,) * positive(hf, "num_hidden_layers"),
    }
    return ExpertShape(**(common | differences))
