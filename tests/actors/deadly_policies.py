"""Policies that kill their process because of a request, at the moments of its life at which a scheduler may die of it."""

from __future__ import annotations

import os
import signal
from typing import Any

from actorllm.scheduling.policy import KeyPolicy

DEADLY = 4092
"""A token of a prompt that schedulers die of."""
COMES, STARTS, HAS_A_TOKEN, WAITS = MOMENTS = (4086, 4087, 4088, 4089)
"""Tokens of prompts that schedulers with the policy `AtItsMoment` die of, each at another moment."""
SIBLING = 4085
"""A token of prompts whose second sequence kills them when it is `SIBLING_AT` tokens long, and the first one does not."""
SIBLING_AT = 20


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_of(sequence: Any, deadly: int = DEADLY) -> None:
    if deadly in sequence.submit.prompt:
        die()


def length_of(sequence: Any, view: Any) -> int:
    """Tokens of its output that are computed."""
    return int(view.batch.num_computed[sequence.slot]) - sequence.num_prompt


class WhenItComes(KeyPolicy):
    def on_arrival(self, sequence: Any, view: Any) -> None:
        die_of(sequence)


class WhenItStarts(KeyPolicy):
    def on_admit(self, sequence: Any, view: Any) -> None:
        die_of(sequence)


class WhenItHasAToken(KeyPolicy):
    def on_step(self, done: Any, view: Any) -> None:
        for sequence in view.running():
            die_of(sequence)


class WhileItWaits(KeyPolicy):
    def on_step(self, done: Any, view: Any) -> None:
        for sequence in view.waiting():
            die_of(sequence)


class AtItsMoment(KeyPolicy):
    def on_arrival(self, sequence: Any, view: Any) -> None:
        die_of(sequence, COMES)

    def on_admit(self, sequence: Any, view: Any) -> None:
        die_of(sequence, STARTS)

    def on_step(self, done: Any, view: Any) -> None:
        for sequence in view.running():
            die_of(sequence, HAS_A_TOKEN)
            if sequence.submit.fork_of is not None and length_of(sequence, view) >= SIBLING_AT:
                die_of(sequence, SIBLING)
        for sequence in view.waiting():
            die_of(sequence, WAITS)


class Always(KeyPolicy):
    def on_step(self, done: Any, view: Any) -> None:
        die()
