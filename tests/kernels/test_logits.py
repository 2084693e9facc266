"""What is done to logits before the draw, and what is reported of them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from actorllm.messages.logit_rules import SamplingRules
from actorllm.model.logits import LogitRules
from actorllm_kernels import reference
from actorllm_kernels.edit_logits import Edits, Penalties, edit_logits
from actorllm_kernels.sample_topk_topp import FilterScratch, tile_maxima
from actorllm_kernels.top_logprobs import top_logprobs
from tests.kernels.closeness import assert_close


def test_edits() -> None:
    rng = np.random.default_rng(0)
    logits = torch.from_numpy(rng.normal(size=(4, 50)).astype(np.float32))
    logits[0, 3], logits[1, 7] = 1e35, -torch.inf
    cells = rng.permutation(200)[:150]
    row, id = (cells // 50).astype(np.int32), (cells % 50).astype(np.int32)
    row[[2, 140]] = -1
    bias = rng.choice([0, 1.5, -2, -np.inf], 150).astype(np.float32)
    count = rng.integers(-1, 4, 150).astype(np.int32)
    penalties = rng.uniform(-1, 1, (3, 4)).astype(np.float32)
    penalties[2] += 1.5
    expected = logits.clone().double()
    for i, j, *entry in zip(row.tolist(), id.tolist(), bias.tolist(), count.tolist(), strict=True):
        if i >= 0:
            expected[i, j] = reference.edit_logit(float(expected[i, j]), *entry, *penalties[:, i].tolist())
    columns = (torch.from_numpy(column) for column in (row, id, bias, count))
    edit_logits(logits, Edits(*columns), Penalties(*torch.from_numpy(penalties)))
    finite = expected.isfinite()
    assert torch.equal(logits[~finite].double(), expected[~finite])
    assert_close(logits[finite], expected[finite])


def test_edits_are_those_of_the_cpu_worker() -> None:
    prompt, output = np.array([1, 2, 2, 3], np.int32), np.array([2, 5, 5, 9], np.int32)
    rules = SamplingRules(
        presence_penalty=0.5, frequency_penalty=0.25, repetition_penalty=1.25, bias_ids=(3, 7), biases=(2.0, -4.0)
    )
    owner = LogitRules(20)
    owner.add(0, rules, prompt, output)
    logits = torch.randn(1, 20)
    expected = logits.clone()
    owner.apply(expected.numpy(), np.zeros(1, np.int32), np.array([4], np.int32))
    entries = {1: (0.0, 0), 2: (0.0, 1), 3: (2.0, 0), 5: (0.0, 2), 9: (0.0, 1), 7: (-4.0, -1)}
    edits = Edits(
        torch.zeros(len(entries), dtype=torch.int32),
        torch.tensor(list(entries), dtype=torch.int32),
        torch.tensor([bias for bias, _ in entries.values()]),
        torch.tensor([count for _, count in entries.values()], dtype=torch.int32),
    )
    edit_logits(logits, edits, Penalties(torch.tensor([0.5]), torch.tensor([0.25]), torch.tensor([1.25])))
    assert_close(logits, expected.double())


@pytest.mark.parametrize("has_ties", [False, True])
@pytest.mark.parametrize("num_top", [0, 1, 20])
def test_top_logprobs(num_top: int, has_ties: bool) -> None:
    logits = 4 * torch.randn(3, 700)
    if has_ties:
        logits = logits.round()
    logits[1, ::3] = -torch.inf
    tokens = torch.tensor([int(logits[0].argmax()), 1, 699], dtype=torch.int32)
    scratch = FilterScratch.empty(3, 700, logits.device)
    ids = torch.full((3, 1 + num_top), -7, dtype=torch.int32)
    logprobs, ranks = torch.full(ids.shape, torch.nan), torch.full((3,), 5, dtype=torch.int32)
    tile_maxima(logits, scratch, has_mass=True)
    top_logprobs(logits, tokens, scratch, ids, logprobs, ranks)
    for row, token in enumerate(tokens.tolist()):
        expected_ids, expected, rank = reference.top_logprobs(logits[row].double(), token, num_top)
        assert ids[row].tolist() == expected_ids
        assert_close(logprobs[row], expected)
        assert ranks[row] == rank
