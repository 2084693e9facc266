"""The scheduler of a scripted engine: the scheduler of any engine, which tells the script of requests that have ended.

With a VirtualTime, deadlines of requests count in it.
"""

from __future__ import annotations

from dataclasses import replace

from actorllm.actors.engine_thread import HostLoop
from actorllm.actors.link import Link
from actorllm.actors.scheduler import SchedulerActor
from actorllm.clock import now
from actorllm.messages import DEADLINE_PASSED, Message, Submit
from actorllm.scheduling.sequence import Key, Sequence
from actorllm.testing.script import Script
from actorllm.testing.virtual_time import RealTime, VirtualTime, due_of


class ScriptedSchedulerActor(SchedulerActor):
    """A scheduler of one life."""

    WARMS_UP = False

    def __init__(self, script: Script, time: RealTime | VirtualTime) -> None:
        super().__init__()
        self._script, self._time = script, time
        self._open: dict[Key, Sequence | None] = {}
        """The requests that it was given, with what the scheduler made of each."""

    def on_message(self, link: Link, message: Message) -> None:
        if isinstance(message, Submit):
            keys = [(self._frontend_of[link], rid) for rid in (message.rid, *message.siblings.tolist())]
            self._open |= dict.fromkeys(keys)
            if message.deadline is not None and isinstance(self._time, VirtualTime):
                self._set_deadline(self._time, keys, due_of(message.deadline))
                message = replace(message, deadline=None)
        super().on_message(link, message)

    def _set_deadline(self, time: VirtualTime, keys: list[Key], due: float) -> None:
        host = HostLoop.current()
        time.call_at(
            due,
            lambda: host.call_soon_threadsafe(self._expire, keys),
            lambda: any(self.scheduler.sequence(key) is not None for key in keys),
        )

    def _expire(self, keys: list[Key]) -> None:
        self.take_inbox()
        self.send_ends([end._replace(stop_reason=DEADLINE_PASSED) for end in self.scheduler.abort(keys, now())])
        self.wake()

    def turn(self) -> bool:
        has_turned = super().turn()
        for key, known in list(self._open.items()):
            sequence = self.scheduler.sequence(key)
            if sequence is not None:
                self._open[key] = sequence
                continue
            del self._open[key]
            if known is not None and known.scheduled is not None:
                self._script.leave(known.submit.prompt.tolist(), known.submit.seed, known.submit.sample_index)
        return has_turned
