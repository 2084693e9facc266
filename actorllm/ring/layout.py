"""Where every byte of a segment is. Owns all offsets and struct formats; nothing else in the package states one.

A segment is one header page and a ring of `capacity` bytes (a power of two). The header is seen as 64-bit words:

    byte                                                          written by            checked by
    ┌────  0  MAGIC            stored last by the creator          creator               attach
    │      8  VERSION          format version << 32 | header size  creator               attach
    │     16  CAPACITY         bytes of the ring                   creator               attach
    │     24  NUM_READERS                                          creator               attach
    │     32  LINK_ID (2)      random, one per link                creator               attach
    │     48  GENERATION       of the link                         creator               attach
    │     56  FLAGS            none defined: 0                     creator               attach
    ├──── 64  TAIL             committed bytes since the start     writer                readers, every drain
    ├─── 128  WRITER_PID, 136 WRITER_START   for people            writer                never read
    │    144  CLOSED           1: no frame will follow             writer (supervisor)   readers
    ├─── 192  SPACE_WANTED     1: the writer waits for room        writer sets, the reader that rings clears
    ├─── 512  reader 0 ─┬─  +0 HEAD      released bytes            reader                writer, when it looks full
    │                   ├─ +64 SLEEP     1: ring my bell           reader sets, the writer clears before it rings
    │                   ├─ +72 PID, +80 START    for people        reader                never read
    │                   └─ +88 STATE     EXPECTED ACTIVE DEAD      reader; DEAD: also the writer
    ├─── 640  reader 1 ...                                         (128 bytes each, at most MAX_READERS)
    ├── 4096  the ring
    └── 4096 + capacity

TAIL and HEAD are absolute positions: they only grow, never wrap, and are multiples of 16, so 0 <= TAIL - HEAD <=
capacity holds at every instant. Words of different writers lie on different cache lines.

A frame starts at a multiple of 16 and never wraps; a PAD frame fills the ring to its end when the next frame would:

    +0 u32 payload length | +4 u16 kind | +6 u16 flags | +8 u32 stamp | +12 u32 checksum | payload | fill to 16

The stamp is the frame's own position / 16 (low 32 bits). So a frame of an earlier lap, or any other bytes, is recognised
without a second counter that would have to agree with TAIL. The checksum is crc32 of the payload seeded with the stamp
when CHECKSUM is set, else 0.
"""

from __future__ import annotations

import struct

MAGIC = int.from_bytes(b"ACTLRNG1", "little")
VERSION = 1
HEADER_BYTES = 4096
VERSION_VALUE = VERSION << 32 | HEADER_BYTES

MIN_CAPACITY = 512
MAX_CAPACITY = 1 << 30

# Words of the header (byte offset / 8).
MAGIC_WORD = 0
VERSION_WORD = 1
CAPACITY_WORD = 2
NUM_READERS_WORD = 3
LINK_ID_WORD = 4
"""Two words."""
GENERATION_WORD = 6
FLAGS_WORD = 7
TAIL_WORD = 8
WRITER_PID_WORD = 16
WRITER_START_WORD = 17
CLOSED_WORD = 18
SPACE_WANTED_WORD = 24

# Words of one reader, relative to `reader_word(index)`.
READERS_WORD = 64
READER_WORDS = 16
HEAD = 0
SLEEP = 8
READER_PID = 9
READER_START = 10
STATE = 11

MAX_READERS = (HEADER_BYTES // 8 - READERS_WORD) // READER_WORDS

# Values of STATE.
EXPECTED = 0
"""Not attached yet; counts as a reader, so it misses nothing."""
ACTIVE = 1
DEAD = 2
"""Does not hold the writer back; is told so at its next release, should it live."""

# Frames.
ALIGNMENT = 16
FRAME_HEADER = struct.Struct("<IHHII")
FRAME_HEADER_BYTES = 16
STAMP_MASK = 0xFFFFFFFF

# Flags of a frame.
PAD = 1
"""Fills the ring to its end; not delivered."""
MORE = 2
"""The message goes on in the next frame."""
CHECKSUM = 4
KNOWN_FLAGS = PAD | MORE | CHECKSUM


def reader_word(index: int) -> int:
    """The first word of a reader's block."""
    return READERS_WORD + READER_WORDS * index


def max_payload(capacity: int) -> int:
    """The longest payload of one frame: half the ring, so that it always fits an empty ring whatever the position."""
    return capacity // 2 - FRAME_HEADER_BYTES


def chunk_payload(capacity: int) -> int:
    """The payload of one chunk of a longer message: an eighth of the ring, so that both ends work at once."""
    return capacity // 8 - FRAME_HEADER_BYTES
