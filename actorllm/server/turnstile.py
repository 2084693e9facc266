"""`Turnstile`: of many requests that arrive at once, few begin in each turn of the loop.

What a request does before it first waits takes half a millisecond. A hundred that began in one turn of the loop would hold
everything else on it meanwhile: streams, and the application's own tasks. So the others wait, in the order of their arrival.
Called by `Guards`; used on the loop of the server alone.
"""

from __future__ import annotations

from collections import deque

import anyio

from actorllm.actors.engine_thread import AsyncioLoop, HostLoop

PER_TURN = 2


class Turnstile:
    """See the module docstring. Only asyncio and uvloop have turns of a loop; elsewhere nothing waits."""

    def __init__(self) -> None:
        self._waiting: deque[anyio.Event] = deque()
        self._num_begun = 0
        """In the turn that goes on, with those that were let in for it."""
        self._is_counting = False

    async def take(self) -> None:
        """Return when one more request may begin. Cancelled, it takes no other request's place."""
        host = HostLoop.current()
        if not isinstance(host, AsyncioLoop):
            return
        if not self._is_counting:
            self._is_counting = True
            host.call_soon(self._next, host)
        if self._num_begun < PER_TURN and not self._waiting:
            self._num_begun += 1
            return
        turn = anyio.Event()
        self._waiting.append(turn)
        await turn.wait()

    def _next(self, host: AsyncioLoop) -> None:
        """A turn of the loop later: those that are let in go on in the next one."""
        self._num_begun = min(PER_TURN, len(self._waiting))
        for _ in range(self._num_begun):
            self._waiting.popleft().set()
        self._is_counting = self._num_begun > 0
        if self._is_counting:
            host.call_soon(self._next, host)
