"""Recurrent layers: every bit of a token's output and state is the same, however its prompt is cut, and as a decode row."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from actorllm.model.cpu.recurrent import mamba
from actorllm.model.cpu.recurrent.convolution import CausalConvolution
from actorllm.model.cpu.recurrent.mamba import MambaMixer
from actorllm.model.cpu.recurrent.states import Piece
from actorllm.model.families.recurrent_shapes import MambaShape
from actorllm.model.families.recurrent_tensors import MambaTensors
from actorllm.model.linear.dense import Dense

NUM_TOKENS, SLOT = 150, 1
WIDTH = 64
"""Channels. What is left behind whole vectors of the processor may be rounded otherwise: models have none of that."""
CUTS: list[tuple[int, ...]] = [(150,), (64, 86), (40, 3, 107), (1, 1, 148), (100,)]
"""Tokens of the chunks; what is left are decode rows."""
SHAPE = MambaShape(num_channels=96, state_size=8, step_rank=5, kernel_size=4, has_conv_bias=True, has_bias=False)


def steps_of(cuts: tuple[int, ...]) -> list[tuple[slice, Any]]:
    """Which tokens each step has, and what a mixer is told of its rows."""
    steps: list[tuple[slice, Any]] = []
    position = 0
    for count in cuts:
        piece = Piece(0, count, position, SLOT)
        steps.append(
            (slice(position, position + count), SimpleNamespace(num_decodes=0, decodes=slice(0, 0), pieces=[piece]))
        )
        position += count
    for place in range(position, NUM_TOKENS):
        own = SimpleNamespace(num_decodes=1, decodes=slice(SLOT, SLOT + 1), pieces=[])
        steps.append((slice(place, place + 1), own))
    return steps


def row_by_row(weight: Any) -> Any:
    """A product whose bits depend on no other row."""
    return lambda x: torch.cat([row @ weight.weight.T for row in x.split(1)])


@pytest.mark.parametrize("cuts", CUTS[1:], ids=str)
@torch.inference_mode()
def test_bits_of_a_convolution_do_not_depend_on_the_cut(cuts: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    x = torch.randn(NUM_TOKENS, WIDTH)
    convolution = CausalConvolution(torch.randn(4, WIDTH), torch.randn(WIDTH))

    def outputs(cuts: tuple[int, ...]) -> torch.Tensor:
        kept = torch.full((2, 3, WIDTH), torch.nan)
        return torch.cat([convolution.step(x[tokens], kept, rows) for tokens, rows in steps_of(cuts)])

    assert torch.equal(outputs(cuts), outputs(CUTS[0]))


@pytest.mark.parametrize("cuts", CUTS[1:], ids=str)
@pytest.mark.parametrize("most", [mamba.MOST_NUMBERS, 3 * 96 * 8])
@torch.inference_mode()
def test_bits_of_mamba_do_not_depend_on_the_cut(
    cuts: tuple[int, ...], most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    size, rank, state = SHAPE.num_channels, SHAPE.step_rank, SHAPE.state_size
    unused = Dense(torch.empty(0, 0))
    tensors = MambaTensors(
        first=unused,
        last=unused,
        select=Dense(torch.randn(rank + 2 * state, size) / size**0.5),
        steps=Dense(torch.randn(size, rank)),
        kernel=torch.randn(4, size),
        kernel_bias=torch.randn(size),
        step_bias=torch.randn(size),
        decay=-torch.rand(size, state),
        skip=torch.randn(size),
    )
    mixer = MambaMixer(SHAPE, tensors, row_by_row)
    made = torch.randn(NUM_TOKENS, 2 * size)

    def run(cuts: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        states = {"conv": torch.full((2, 3, size), torch.nan), "channels": torch.full((2, size, state), torch.nan)}
        out = torch.cat([mixer(made[tokens], states, rows) for tokens, rows in steps_of(cuts)])
        return out, states["channels"][SLOT]

    expected, last = run(CUTS[0])
    monkeypatch.setattr(mamba, "MOST_NUMBERS", most)
    found, behind = run(cuts)
    assert torch.equal(found, expected)
    assert torch.equal(behind, last)
