"""Block hashes: the identity of a full block of prompt tokens together with everything before it.

A block's hash covers its token ids, the hash of the block before it, and an extra key (cache salt, adapter, image) that
keeps apart what has the same ids and must not share KV. The frontend computes the hashes and they travel in `Submit`;
the index that finds blocks by them is the prefix cache's.
"""

from __future__ import annotations

import hashlib

import numpy as np

from actorllm.messages import I32, NO_U8, U8

HASH_BYTES = 32


def hash_blocks(token_ids: I32, block_size: int, extra_key: bytes = b"") -> U8:
    """The hashes of the full blocks of a prompt: HASH_BYTES for each, concatenated."""
    count = token_ids.size // block_size
    if count == 0:
        return NO_U8
    data = np.ascontiguousarray(token_ids[: count * block_size], "<i4").tobytes()
    step = 4 * block_size
    digest = hashlib.sha256(b"actorllm-block-1\0" + extra_key).digest()
    digests = []
    for start in range(0, len(data), step):
        digest = hashlib.sha256(digest + data[start : start + step]).digest()
        digests.append(digest)
    return np.frombuffer(b"".join(digests), np.uint8)
