"""The noise of docs/sampling.md on the device: the same bits as on the CPU, and the same float32 noise to within 1e-5.

Called by the sampling kernels. `reference.noise_word` and `reference.gumbel` state it; the words are exact, the logarithms
are not.
"""

from __future__ import annotations

import triton
import triton.language as tl

TILE_DOMAIN = tl.constexpr(0)
ID_DOMAIN = tl.constexpr(1)


@triton.jit
def philox4x32(c0, c1, c2, c3, k0, k1):
    """Philox4x32-10 (Salmon et al., SC 2011) of uint32 counters and keys of one shape; four words."""
    for _ in tl.static_range(10):
        high0 = tl.umulhi(c0, 0xD2511F53 + c0 * 0)
        low0 = c0 * 0xD2511F53
        high1 = tl.umulhi(c2, 0xCD9E8D57 + c2 * 0)
        low1 = c2 * 0xCD9E8D57
        c0 = high1 ^ c1 ^ k0
        c1 = low1
        c2 = high0 ^ c3 ^ k1
        c3 = low0
        k0 += 0x9E3779B9
        k1 += 0xBB67AE85
    return c0, c1, c2, c3


@triton.jit
def noise_words(seed, sample_index, token_index, group, DOMAIN: tl.constexpr):
    """Words of the ids 4 * group + (0, 1, 2, 3). seed: int64; all arguments of one shape."""
    k0 = (seed & 0xFFFFFFFF).to(tl.uint32)
    k1 = ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    zero = (group * 0).to(tl.uint32)
    return philox4x32(token_index.to(tl.uint32), group.to(tl.uint32), zero + DOMAIN, sample_index.to(tl.uint32), k0, k1)


@triton.jit
def gumbel(word):
    """Gumbel noise of uint32 words.

    The inner logarithm, of 1 - u, decides the large noise and must be exact to the last bits where u is small: there it
    is a series in u / (2 - u), and no logarithm of a number near 1.
    """
    u = tl.minimum((word.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.9999999403953552)
    s = u / (2.0 - u)
    z = s * s
    series = 1.0 / 13.0
    series = series * z + 1.0 / 11.0
    series = series * z + 1.0 / 9.0
    series = series * z + 1.0 / 7.0
    series = series * z + 1.0 / 5.0
    series = series * z + 1.0 / 3.0
    small = 2.0 * s * (series * z + 1.0)
    # -log(1 - u), by the series up to one half
    x = tl.where(u <= 0.5, small, -tl.log(tl.where(u <= 0.5, 0.5, 1.0 - u)))
    return -tl.log(x)


@triton.jit
def four_in_a_row(a, b, c, d):
    """[a[0], b[0], c[0], d[0], a[1], ..] along the first dimension; two dimensions, of which the second stays."""
    joined = tl.join(tl.join(a, c), tl.join(b, d))  # [groups, columns, 2, 2], the last two (high bit, low bit)
    return tl.permute(joined, (0, 2, 3, 1)).reshape(4 * a.shape[0], a.shape[1])
