"""The main program of the encoder's process: it loads a model's tower and encodes images, one after the other.

Run by `intake.intake_program`, with its frames. A request is a JSON list, ["encode", configuration, arrays], with
[name, dtype, shape] of each array; the bytes of the arrays follow it. Started by `media_encoder` only.
"""

from __future__ import annotations

import contextlib
import math
import os
import socket
from functools import lru_cache
from typing import Any

from actorllm.intake.intake_program import BEGUN, exactly, send

PROCESS_NAME = "actor:encoder"
NICENESS = 5
"""Steps of the engine go first."""


def obey(control: socket.socket, operation: str, config: str, described: list[tuple[str, str, list[int]]]) -> bytes:
    import numpy as np

    arrays: dict[str, Any] = {}
    for name, dtype, shape in described:
        size = math.prod(shape) * np.dtype(dtype).itemsize
        arrays[name] = np.frombuffer(bytearray(exactly(control, size)), dtype).reshape(shape)
    tower = tower_of(config)
    send(control, BEGUN, b"")
    rows: bytes = tower.encode(arrays).tobytes()
    return rows


@lru_cache(maxsize=1)
def tower_of(config: str) -> Any:
    import torch

    from actorllm.config import EngineConfig
    from actorllm.intake.media.towers import new_tower

    with contextlib.suppress(OSError):
        os.nice(NICENESS)
    torch.set_num_threads(max(1, torch.get_num_threads() // 2))
    return new_tower(EngineConfig.from_json(config).model)
