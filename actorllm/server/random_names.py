"""Random names for answers, made in advance.

`uuid.uuid4` asks the kernel each time, and lets the other threads of the process have the interpreter meanwhile. One that computes
keeps it for milliseconds. Of 64 requests at once, the last one waited for all of these.
"""

from __future__ import annotations

import os

NUM_BYTES = 16
NUM_MADE = 256

_made: list[str] = []
os.register_at_fork(after_in_child=_made.clear)


def random_name() -> str:
    """32 hexadecimal digits that cannot be guessed. From any thread."""
    while True:
        try:
            return _made.pop()
        except IndexError:
            digits = os.urandom(NUM_BYTES * NUM_MADE).hex()
            width = 2 * NUM_BYTES
            _made.extend([digits[at : at + width] for at in range(0, len(digits), width)])
