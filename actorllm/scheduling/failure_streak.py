"""`FailureStreak`: when is it the workers that fail, and not the requests?

A request that fails alone is at fault, and ends (`suspects`). Workers that can do nothing any more, because of a broken
accelerator or spoilt weights, make every request fail alone. The one looks like the other until several have failed, one
after the other and each with a prompt of its own, without a step in between that came to anything: from then on it is the
workers, and none of those requests. Somebody who tries the same prompt again and again proves nothing.

Pure counting, owned by `Faults`; of no cost while nothing fails.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b

from actorllm.scheduling.sequence import Sequence

MAX_PROMPTS = 3
"""So many different prompts in a row that nothing comes of are no accident."""


class FailureStreak:
    """Prompts that nothing came of, since a step came to something. Falsy while there are none."""

    def __init__(self) -> None:
        self._prompts: set[bytes] = set()

    def __bool__(self) -> bool:
        return bool(self._prompts)

    @property
    def num_prompts(self) -> int:
        return len(self._prompts)

    def add(self, failed: Iterable[Sequence]) -> None:
        """Of these nothing came, and of nobody else."""
        for sequence in failed:
            digest = blake2b(sequence.submit.prompt.tobytes(), digest_size=16)
            digest.update(sequence.submit.prompt_embeds.tobytes())
            self._prompts.add(digest.digest())

    def clear(self) -> None:
        """A step came to something, or the workers are others now."""
        self._prompts.clear()
