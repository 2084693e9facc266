"""A drafter that knows what is sampled next, from an earlier run, and is wrong now and then on purpose."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from actorllm.types.drafter import Drafter

STREAMS = "ACTORLLM_TEST_STREAMS"
"""The variable that has the path of the file: a list of [prompt, stream]."""


class KnowingDrafter(Drafter):
    """How many drafts of a row are right goes by its length: 0 to all of them."""

    def __init__(self, options: Any, vocab_size: int) -> None:
        super().__init__(options, vocab_size)
        pairs = json.loads(Path(os.environ[STREAMS]).read_text())
        self._whole = [prompt + stream for prompt, stream in pairs]
        self._num_prompt = [len(prompt) for prompt, _ in pairs]

    def draft(self, tokens: Any, most: int) -> Sequence[int]:
        known = tokens.tolist()
        for whole, num_prompt in zip(self._whole, self._num_prompt, strict=True):
            if len(known) > num_prompt and whole[: len(known)] == known:
                drafts = whole[len(known) : len(known) + most]
                right = zlib.crc32(str(known[-3:]).encode()) % (most + 2)
                return [token if i < right else (token + 1) % self.vocab_size for i, token in enumerate(drafts)]
        return ()
