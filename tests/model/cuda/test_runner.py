"""The GPU's step, launched in its own order on CPU tensors, gives what the CPU worker gives (float32)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.model.cuda.twins import Twins, prompt

pytestmark = pytest.mark.timeout(120)


@pytest.mark.parametrize("family", ["Qwen3ForCausalLM", "Qwen2ForCausalLM", "MistralForCausalLM"])
def test_chunks_and_decode_steps_give_the_tokens_of_the_cpu(make_twins: Callable[..., Twins], family: str) -> None:
    """Prompts of several blocks in chunks, greedy and seeded, decode rows beside prompts and alone."""
    differences: dict[str, Any] = {"architectures": [family]}
    if family == "MistralForCausalLM":
        differences["sliding_window"] = 40
    twins = make_twins(differences)
    twins.add(0, prompt(70, 1))
    twins.add(3, prompt(5, 2), temperature=0.8, seed=2**63 + 5)
    twins.step({0: 60, 3: 5}, decode=[])
    twins.step({0: 10}, decode=[3])
    twins.add(1, prompt(20, 3), temperature=1.2, seed=7, sample_index=2)
    twins.step({1: 20}, decode=[3, 0])
    twins.step(decode=[3, 0, 1])
    for _ in range(3):
        twins.step()
    assert len(twins.tokens(0)) == 70 + 6
