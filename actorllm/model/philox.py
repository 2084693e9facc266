"""Counter-based random numbers for the sampler: Philox4x32-10, and the Gumbel noise made from its words.

Owns the vectorised bits of docs/sampling.md. A word depends on the request's seed and on where it is used (token index,
id, domain, sample index). It depends on nothing else: not on the batch, not on what was drawn before. So a stream can be batched
in any way, or taken up again at any token. `actorllm_kernels.reference` states the same with plain integers.

Called by `actorllm.model.sampler`. Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).
"""

from __future__ import annotations

import sys
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

F32: TypeAlias = NDArray[np.float32]
U32: TypeAlias = NDArray[np.uint32]
U64: TypeAlias = NDArray[np.uint64]

NUM_ROUNDS = 10
TILE_DOMAIN = 0
"""Counter word 2 where the noise is for tile numbers."""
ID_DOMAIN = 1
"""Counter word 2 where the noise is for vocabulary ids."""

_MULTIPLIERS = np.array([0xD2511F53, 0xCD9E8D57], np.uint64).reshape(2, 1, 1)
_KEY_STEPS = np.outer(np.arange(NUM_ROUNDS), [0x9E3779B9, 0xBB67AE85]).astype(np.uint32)  # [round, word], modulo 2**32

_HALF = np.float32(0.5)
_MINUS_ULP = np.float32(-(2.0**-32))
_LOWEST = np.float32(-(1.0 - 2.0**-24))

_LOW, _HIGH = (0, 1) if sys.byteorder == "little" else (1, 0)  # of the two 32-bit halves of a 64-bit integer


def round_keys(seeds: U64) -> U32:
    """The keys of every round, which a seed fixes once for all: [NUM_ROUNDS, 2, num_rows, 1]."""
    words = np.stack((seeds.astype(np.uint32), (seeds >> np.uint64(32)).astype(np.uint32)))  # [2, num_rows]
    keys: U32 = (words[None] + _KEY_STEPS[:, :, None])[..., None]
    return keys


def philox_words(keys: U32, c0: NDArray[Any], c1: NDArray[Any], c2: int, c3: NDArray[Any]) -> tuple[U32, U32, U32, U32]:
    """The four words of every counter, each [num_rows, num_groups].

    keys: `round_keys`. c0 and c3: [num_rows, 1], c1: anything that broadcasts to [num_rows, num_groups], c2: a scalar.
    """
    shape = np.broadcast_shapes(c0.shape, c1.shape, c3.shape)
    # The words are stacked as a = (c0, c2) and b = (c1, c3). A round multiplies a, and then
    # a' = reversed high halves ^ b ^ key and b' = reversed low halves: three array operations, because the halves are
    # strided views of the 64-bit products, and a itself is a 64-bit array whose high halves stay zero.
    a64 = np.zeros((2, *shape), np.uint64)
    a = a64.view(np.uint32).reshape(2, *shape, 2)[..., _LOW]
    b: U32 = np.empty((2, *shape), np.uint32)
    a[0], a[1], b[0], b[1] = c0, c2, c1, c3
    products = np.empty((2, 2, *shape), np.uint64)  # two buffers, because b is a view of the last round's products
    halves = products.view(np.uint32).reshape(2, 2, *shape, 2)[:, ::-1]
    highs, lows = halves[..., _HIGH], halves[..., _LOW]
    steps = (products[0], highs[0], lows[0]), (products[1], highs[1], lows[1])
    for i in range(NUM_ROUNDS):
        product, high, low = steps[i & 1]
        np.multiply(a64, _MULTIPLIERS, out=product)
        np.bitwise_xor(high, b, out=a)
        np.bitwise_xor(a, keys[i], out=a)
        b = low
    return a[0], b[0], a[1], b[1]


def gumbel(words: F32) -> F32:
    """Gumbel noise from 32-bit words that were converted to float32; overwrites its argument.

    u = (word + 0.5) * 2**-32, at most 1 - 2**-24; the noise is -log(-log1p(-u)). A small u is a large noise: there the
    float32 spacing of u is finest, so the tail that decides is exact.
    """
    np.add(words, _HALF, out=words)
    np.multiply(words, _MINUS_ULP, out=words)
    np.maximum(words, _LOWEST, out=words)
    # torch's logarithms are vectorised on every CPU, numpy's log1p is not
    torch.from_numpy(words).log1p_().neg_().log_().neg_()
    return words


def gumbel_noise(
    keys: U32, token_index: NDArray[Any], sample_index: NDArray[Any], groups: NDArray[Any], domain: int
) -> F32:
    """Noise of the ids 4 * group + (0, 1, 2, 3), for every group: [num_rows, 4 * num_groups].

    keys: `round_keys`. token_index, sample_index: [num_rows]. groups: [num_groups] or [num_rows, num_groups].
    """
    words = philox_words(keys, token_index[:, None], groups, domain, sample_index[:, None])
    noise: F32 = np.empty((*words[0].shape, 4), np.float32)
    for lane in range(4):
        noise[..., lane] = words[lane]
    return gumbel(noise).reshape(len(token_index), -1)
