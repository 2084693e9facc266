"""Floats of 8 bits (float8_e4m3fn) as their bits, which every GPU can read and write (reference: `reference.float8_codes`).

Shifted by 7, the bits are the float16 of 1/256 of the value. So `widened` gives numbers that are too small by FLOAT8_SCALE, and
its callers multiply what they have added up.
"""

from __future__ import annotations

import triton
import triton.language as tl

FLOAT8_SCALE = 256.0
"""By which the bits of a float of 8 bits, as float16, are too small."""


@triton.jit
def widened(codes, IS_FLOAT: tl.constexpr, dtype: tl.constexpr):
    """Numbers of codes of 8 bits; those of floats are 1/256 of what they should be."""
    if IS_FLOAT:
        bits = codes.to(tl.uint16)
        half = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
        return half.to(tl.float16, bitcast=True).to(dtype)
    return codes.to(dtype)


@triton.jit
def narrowed(x):
    """float32 as codes, to the nearest and of two to the even one. What is larger than 448, or NaN, becomes 448."""
    bits = x.to(tl.int32, bitcast=True)
    size = (bits & 0x7FFFFFFF).to(tl.float32, bitcast=True)
    size = tl.where(size <= 448.0, size, 448.0)
    # Below 2**-6 the codes are multiples of 2**-9. Adding 1.5 * 2**23 rounds to whole numbers, and leaves them in the lowest bits.
    small = (size * 512.0 + 12582912.0).to(tl.int32, bitcast=True) & 0xF
    whole = size.to(tl.int32, bitcast=True)
    large = ((whole + 0x7FFFF + ((whole >> 20) & 1)) >> 20) - (120 << 3)
    code = tl.where(size < 0.015625, small, large) | ((bits >> 24) & 0x80)
    return code.to(tl.uint8)
