"""The noise on the device against the golden vectors of docs/sampling.md and the CPU's noise."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import torch
import triton
import triton.language as tl

from actorllm.model.philox import gumbel_noise, round_keys
from actorllm_kernels import philox, reference

DOCUMENT = Path(__file__).parents[2] / "docs" / "sampling.md"


@triton.jit
def noise_kernel(
    seed_ptr, sample_ptr, token_ptr, group_ptr, words_ptr, noise_ptr, DOMAIN: tl.constexpr, SIZE: tl.constexpr
):
    i = tl.arange(0, SIZE)
    seed, sample = tl.load(seed_ptr + i)[:, None], tl.load(sample_ptr + i)[:, None]
    token, group = tl.load(token_ptr + i)[:, None], tl.load(group_ptr + i)[:, None]
    a, b, c, d = philox.noise_words(seed, sample, token, group, DOMAIN)
    words = philox.four_in_a_row(a, b, c, d)  # [4 * SIZE, 1]
    at = tl.arange(0, 4 * SIZE)[:, None]
    tl.store(words_ptr + at, words.to(tl.int64))
    tl.store(noise_ptr + at, philox.gumbel(words))


def run(
    seeds: list[int], samples: list[int], tokens: list[int], groups: list[int], domain: int
) -> tuple[np.ndarray, ...]:
    """Words and noise, each [len(seeds), 4]."""
    size = triton.next_power_of_2(len(seeds))
    columns = [np.resize(np.array(column, kind), size) for column, kind in (
        (seeds, np.uint64), (samples, np.int32), (tokens, np.int32), (groups, np.int32)
    )]  # fmt: skip
    words, noise = torch.zeros(4 * size, dtype=torch.int64), torch.zeros(4 * size)
    arguments = [torch.from_numpy(column.view(np.int64) if column.dtype == np.uint64 else column) for column in columns]
    noise_kernel[(1,)](*arguments, words, noise, DOMAIN=domain, SIZE=size)
    count = len(seeds)
    return words.numpy().reshape(-1, 4)[:count], noise.numpy().reshape(-1, 4)[:count]


def test_golden_vectors() -> None:
    number = r"\| *(\d+) "
    rows = re.findall(rf"^{number * 5}\| `([0-9a-f]{{8}})` \| *(-?[\d.]+) \|$", DOCUMENT.read_text(), re.M)
    assert len(rows) >= 16
    for *key, word, noise in rows:
        seed, sample, token, id, domain = map(int, key)
        words, noises = run([seed], [sample], [token], [id >> 2], domain)
        assert words[0, id & 3] == int(word, 16)
        assert abs(noises[0, id & 3] - float(noise)) < 1e-5


def test_the_noise_is_that_of_the_cpu() -> None:
    rng = np.random.default_rng(0)
    seeds = rng.integers(0, 2**64, 64, dtype=np.uint64)
    samples, tokens = rng.integers(0, 2**31, (2, 64)).astype(np.int32)
    groups = rng.integers(0, 40000, 64).astype(np.uint32)
    _, noise = run(seeds.tolist(), samples.tolist(), tokens.tolist(), groups.tolist(), 1)
    expected = gumbel_noise(round_keys(seeds), tokens, samples, groups[:, None], 1)
    assert np.abs(noise - expected).max() < 1e-5


@triton.jit
def gumbel_kernel(words_ptr, noise_ptr, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    tl.store(noise_ptr + i, philox.gumbel(tl.load(words_ptr + i).to(tl.uint32)))


def test_the_noise_of_extreme_words() -> None:
    words = [0, 1, 2, 255, 65536, 2**24, 2**31 - 1, 2**31, 2**31 + 1, 2**32 - 2**20, 2**32 - 257, 2**32 - 1]
    words = [*words, *words[:4]]
    noise = torch.zeros(16)
    gumbel_kernel[(1,)](torch.tensor(words), noise, SIZE=16)
    assert (noise - reference.gumbel(words)).abs().max() < 1e-5
