"""`Outlet`: one frontend as the scheduler actor sees it, and what it is owed while it takes nothing.

A frontend may be stopped, swapped out or busy for long; its link is then full. The scheduler does not wait for it: outputs that
do not fit into the link are held here, in order. New submissions of that frontend are put off until the outputs are sent. So
what is held is bounded by the tokens that its requests may still produce. Nothing of a living frontend is lost, and the others
do not notice. The supervisor reports a frontend that is dead, and its outlet is dropped. Outputs that no message can hold are
lost: their requests, and no others, fail. Used by SchedulerActor only.
"""

from __future__ import annotations

import logging
from collections import deque
from typing import TypeAlias

import numpy as np

from actorllm.actors.link import Link
from actorllm.errors import WouldBlock
from actorllm.messages import (
    NO_I32,
    Abort,
    Begun,
    KvOffer,
    Outputs,
    PauseChanged,
    ProbeGroup,
    Submit,
    Unblock,
    WeightsChanged,
)

logger = logging.getLogger(__name__)

ForFrontend: TypeAlias = Outputs | PauseChanged | WeightsChanged | ProbeGroup | Begun | KvOffer


class Outlet:
    """The outputs on their way to one frontend."""

    __slots__ = ("_last_word", "deferred", "failed", "link", "number", "unsent")

    def __init__(self, number: int, link: Link) -> None:
        self.number = number
        """Of the frontend: what the keys of its requests begin with."""
        self.link = link
        self.unsent: deque[ForFrontend] = deque()
        self.deferred: list[Submit | Abort | Unblock] = []
        """Submissions that came while outputs wait, and what came after them about requests."""
        self.failed: list[int] = []
        """The rids of requests whose output could not be sent: the frontend is told that they have failed, and the caller
        of `send` is to end them."""
        self._last_word: Outputs | None = None

    def send(self, outputs: ForFrontend) -> bool:
        """Send, or hold behind what is held; False when it is held. TransportError: the link must be dropped."""
        self.unsent.append(outputs)
        return self.flush()

    def flush(self) -> bool:
        """Send what is held; False when some of it is left. TransportError: the link must be dropped."""
        unsent = self.unsent
        while unsent:
            try:
                self.link.send_nowait(unsent[0])
            except WouldBlock:
                return False
            except (TypeError, ValueError) as error:  # it is too long, or cannot be encoded, and will never be sent
                self._give_up(unsent.popleft(), error)
                continue
            unsent.popleft()
        return True

    def _give_up(self, message: ForFrontend, error: Exception) -> None:
        logger.error("a message to %s cannot be sent", self.link.peer, exc_info=error)
        if isinstance(message, Outputs) and message is not self._last_word:
            self.failed += message.rids.tolist()
            self._last_word = failure_of(message, error)
            self.unsent.appendleft(self._last_word)

    def take_failed(self) -> list[int]:
        """The requests that have failed since the last call."""
        taken, self.failed = self.failed, []
        return taken

    def defers(self, message: Submit | Abort | Unblock) -> bool:
        """Whether a message has to wait until the outputs are gone: submissions have.

        What says something about requests acts at once, and once more in its place behind a submission it may mean.
        """
        if isinstance(message, Submit):
            if self.unsent:
                self.deferred.append(message)
                return True
        elif self.deferred:
            self.deferred.append(message)
        return False

    def take_deferred(self) -> list[Submit | Abort | Unblock]:
        """What was put off, in the order of its arrival."""
        taken, self.deferred = self.deferred, []
        return taken


def failure_of(outputs: Outputs, error: Exception) -> Outputs:
    """The end of every request with a row, instead of the rows."""
    text = f"its output cannot be sent: {error}"
    told = {end[0]: end for end in outputs.ends}
    unknown = (outputs.emitted, None, None, None, 0, 0, 0)  # its times and counts (RequestEnd)
    num_rows = outputs.rids.size
    ends = [
        [
            row,
            "error",
            None,
            text,
            *(told[row][4:-1] if row in told else unknown),
        ]  # without the details of another error
        for row in range(num_rows)
    ]
    return Outputs(
        rids=outputs.rids,
        index=np.full(num_rows, -1, np.int32),
        tokens=NO_I32,
        counts=np.zeros(num_rows, np.int32),
        ends=ends,
        emitted=outputs.emitted,
    )
