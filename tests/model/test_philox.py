"""The random words: against the published vectors, against plain integers, and what they depend on."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from actorllm.model.philox import gumbel, gumbel_noise, philox_words, round_keys
from actorllm_kernels import reference

word = st.integers(0, 2**32 - 1)

# Random123, examples/kat_vectors, philox4x32 with 10 rounds: counter, key, result
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def one(counter: tuple[int, ...], key: tuple[int, ...]) -> tuple[int, ...]:
    keys = round_keys(np.array([key[0] | key[1] << 32], np.uint64))
    c0, c1, c3 = (np.array([[counter[i]]], np.uint32) for i in (0, 1, 3))
    return tuple(int(w[0, 0]) for w in philox_words(keys, c0, c1, counter[2], c3))


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN_ANSWERS)
def test_known_answers(counter: tuple[int, ...], key: tuple[int, ...], answer: tuple[int, ...]) -> None:
    assert one(counter, key) == answer
    assert reference.philox4x32(counter, key) == answer  # type: ignore[arg-type]


@given(st.tuples(word, word, word, word), st.tuples(word, word))
def test_equal_to_plain_integers(counter: tuple[int, int, int, int], key: tuple[int, int]) -> None:
    assert one(counter, key) == reference.philox4x32(counter, key)


@pytest.mark.parametrize(("num_rows", "num_groups"), [(1, 1), (1, 64), (3, 1), (2, 5), (7, 64), (130, 3)])
def test_many_at_once_are_the_same_as_one_by_one(num_rows: int, num_groups: int) -> None:
    rng = np.random.default_rng(num_rows * 1000 + num_groups)
    seeds = rng.integers(0, 2**64, num_rows, dtype=np.uint64)
    c0, c3 = (rng.integers(0, 2**32, (num_rows, 1), dtype=np.uint32) for _ in range(2))
    c1 = rng.integers(0, 2**32, (num_rows, num_groups), dtype=np.uint32)
    words = philox_words(round_keys(seeds), c0, c1, 1, c3)
    for row in range(num_rows):
        for group in range(num_groups):
            seed = int(seeds[row])
            counter = (int(c0[row, 0]), int(c1[row, group]), 1, int(c3[row, 0]))
            answer = reference.philox4x32(counter, (seed & 0xFFFFFFFF, seed >> 32))
            assert tuple(int(w[row, group]) for w in words) == answer


@pytest.mark.parametrize("seed", [0, 1, 2**32 - 1, 2**32, 2**63, 2**64 - 1])
def test_noise_of_an_id_is_its_lane_of_its_group(seed: int) -> None:
    keys = round_keys(np.array([seed], np.uint64))
    token_index, sample_index = np.array([5], np.int32), np.array([2], np.int32)
    noise = gumbel_noise(keys, token_index, sample_index, np.arange(10, 14, dtype=np.uint32), 1)
    words = [reference.noise_word(seed, 2, 5, id, 1) for id in range(40, 56)]
    assert noise.shape == (1, 16)
    assert noise.dtype == np.float32
    np.testing.assert_allclose(noise[0], reference.gumbel(words).numpy(), rtol=0, atol=1e-5)


def test_every_coordinate_matters() -> None:
    base = (3, 1, 7, 9, 1)
    words = {reference.noise_word(*base)}
    for i in range(5):
        changed = list(base)
        changed[i] ^= 1
        words.add(reference.noise_word(*changed))
    words.add(reference.noise_word(3 + 2**32, 1, 7, 9, 1))
    assert len(words) == 7


def test_gumbel_at_the_ends_is_finite() -> None:
    words = [0, 1, 2**24, 2**31, 2**32 - 257, 2**32 - 129, 2**32 - 128, 2**32 - 1]
    noise = gumbel(np.array(words, np.float32))
    assert np.isfinite(noise).all()
    assert (np.diff(noise) <= 0).all()
    np.testing.assert_allclose(noise[0], 33 * np.log(2), atol=1e-5)  # u = 2**-33
    np.testing.assert_allclose(noise[-1], -np.log(24 * np.log(2)), atol=1e-5)  # u = 1 - 2**-24
    np.testing.assert_allclose(noise, reference.gumbel(words).numpy(), rtol=0, atol=1e-5)


def test_gumbel_has_its_distribution() -> None:
    """Mean, variance and quantiles of Gumbel(0, 1), over a million words."""
    keys = round_keys(np.arange(1000, dtype=np.uint64))
    zero = np.zeros(1000, np.int32)
    noise = gumbel_noise(keys, zero, zero, np.arange(250, dtype=np.uint32), 1).astype(np.float64).ravel()
    assert abs(noise.mean() - np.euler_gamma) < 5e-3
    assert abs(noise.var() - np.pi**2 / 6) < 1e-2
    for p in (0.001, 0.1, 0.5, 0.9, 0.999):
        assert abs((noise < -np.log(-np.log(p))).mean() - p) < 4 * np.sqrt(p * (1 - p) / noise.size)


def test_words_do_not_depend_on_torch_threads() -> None:
    keys = round_keys(np.arange(256, dtype=np.uint64))
    zero = np.zeros(256, np.int32)
    groups = np.arange(64, dtype=np.uint32)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        single = gumbel_noise(keys, zero, zero, groups, 1)
        torch.set_num_threads(2)
        np.testing.assert_array_equal(single, gumbel_noise(keys, zero, zero, groups, 1))
    finally:
        torch.set_num_threads(before)
