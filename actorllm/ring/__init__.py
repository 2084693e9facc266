"""Messages between processes through shared memory: a byte ring, a doorbell, a codec, and the channel made of them.

Reading order: layout (every offset) → segment (memory) → doorbell (wake-ups) → ring (one writer, N readers) → codec
(scalars and arrays as bytes) → channel (what actors use). Nothing here knows of requests, tokens or models.
"""
