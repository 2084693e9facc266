"""`Outlet`: one frontend as the scheduler actor sees it, and what it is owed while it takes nothing.

A frontend may be stopped, swapped out or busy for long; its link is then full. Nobody waits for it: outputs that its link
has no room for are held here, in order, and its new submissions are put off until they are gone. So what is held is
bounded by the tokens that its requests may still produce, nothing of a living frontend is lost, and the others do not
notice. Whoever is dead is reported by the supervisor, and its outlet is dropped. Used by SchedulerActor only.
"""

from __future__ import annotations

from collections import deque
from typing import TypeAlias

from actorllm.actors.link import Link
from actorllm.errors import WouldBlock
from actorllm.messages import Abort, Begun, OnTrial, Outputs, PauseChanged, Submit, Unblock

ForFrontend: TypeAlias = Outputs | PauseChanged | OnTrial | Begun


class Outlet:
    """The outputs on their way to one frontend."""

    __slots__ = ("deferred", "link", "number", "unsent")

    def __init__(self, number: int, link: Link) -> None:
        self.number = number
        """Of the frontend: what the keys of its requests begin with."""
        self.link = link
        self.unsent: deque[ForFrontend] = deque()
        self.deferred: list[Submit | Abort | Unblock] = []
        """Submissions that came while outputs wait, and what came after them about requests."""

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
            unsent.popleft()
        return True

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
