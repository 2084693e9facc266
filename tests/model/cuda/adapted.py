"""Adapters of the tiny model in the slots of runners of both backends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from actorllm.model.runner import ModelRunner
from actorllm.types.adapter_folder import AdapterDigests
from tests.model.adapters.lora_folders import write_adapter
from tests.model.cuda.twins import TINY, Twins

LORA: dict[str, Any] = {"enable_lora": True, "max_loras": 3, "max_lora_rank": 8}


def layers_of(tree: dict[str, Any]) -> dict[str, tuple[int, int]]:
    hidden, inner, dim = tree["hidden_size"], tree["intermediate_size"], tree["head_dim"]
    queries, keys = dim * tree["num_attention_heads"], dim * tree["num_key_value_heads"]
    sizes = {
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    return {f"model.layers.{i}.{name}": size for i in range(tree["num_hidden_layers"]) for name, size in sizes.items()}


def put(runner: ModelRunner[Any, Any], slot: int, folder: Path) -> None:
    assert runner.adapters is not None
    adapter = AdapterDigests(max_rank=8).adapter_of(str(folder))
    runner.adapters.put(slot, adapter.digest, runner.adapters.read(adapter))


def fill(twins: Twins, tmp_path: Path, **differences: Any) -> None:
    """Slot 1: all layers; 2: two of them, of another rank; 3: nothing yet."""
    layers = layers_of(TINY | differences)
    write_adapter(tmp_path / "all", layers, seed=1, size=1.0)
    write_adapter(tmp_path / "few", dict(list(layers.items())[1:4]), seed=2, size=2.0, r=7)
    for runner in (twins.cpu_runner, twins.runner):
        put(runner, 1, tmp_path / "all")
        put(runner, 2, tmp_path / "few")
