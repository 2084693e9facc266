"""Policies of the user's own, as another process loads them."""

from __future__ import annotations

import os
import sys

from actorllm.scheduling.policy import KeyPolicy, SortKey, View
from actorllm.scheduling.sequence import Sequence


class ShortestFirst(KeyPolicy):
    def key(self, sequence: Sequence, view: View) -> SortKey:
        return (sequence.num_prompt,)


class Once(ShortestFirst):
    """As one that takes what there is once in a process."""

    num_built = 0

    def __init__(self) -> None:
        Once.num_built += 1
        if Once.num_built > 1:
            raise RuntimeError("it is taken")


class Exiting(ShortestFirst):
    def __init__(self) -> None:
        sys.exit("no licence")


class Ending(ShortestFirst):
    """As a library that crashes."""

    def __init__(self) -> None:
        os._exit(3)
