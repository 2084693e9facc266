"""Policies that kill their process because of a request, at the moments of its life at which a scheduler may die of it."""

from __future__ import annotations

import os
import signal
from typing import Any

from actorllm.scheduling.policy import KeyPolicy

DEADLY = 4092
"""A token of a prompt that schedulers die of."""


def die_of(sequence: Any) -> None:
    if DEADLY in sequence.submit.prompt:
        os.kill(os.getpid(), signal.SIGKILL)


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


class Always(KeyPolicy):
    def on_step(self, done: Any, view: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)
