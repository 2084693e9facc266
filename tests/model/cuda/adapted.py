"""Adapters of the tiny model in the slots of runners of both backends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from actorllm.model.runner import ModelRunner
from actorllm.types.adapter_folder import AdapterDigests
from tests.model.adapters.lora_folders import write_adapter
from tests.model.cuda.twins import TINY, Twins, prompt

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


def follow_adapters(twins: Twins) -> None:
    """Prompts of few tokens and of many, chunks beside decode rows, rows of three kinds, and a slot that changes hands."""
    twins.add(0, prompt(80, 1), adapter_id=1, temperature=0.8, seed=7)
    twins.step({0: 70}, decode=[])
    twins.add(1, prompt(9, 2))
    twins.add(3, prompt(80, 1), adapter_id=2)
    twins.step({0: 10, 1: 9, 3: 80})
    for _ in range(3):
        twins.step(decode=[0, 1, 3])
    twins.remove(0)
    twins.add(0, prompt(80, 1))
    twins.step({0: 80}, decode=[1, 3])
    for _ in range(3):
        twins.step(decode=[0, 1, 3])
    assert len({tuple(twins.tokens(slot)[-6:]) for slot in (0, 3)}) == 2
