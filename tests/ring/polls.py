"""Turns of an event loop, counted: how long to wait before it is said that nothing happened."""

from __future__ import annotations

import asyncio
import os


class Polls:
    """To be made before what is watched is closed: it must not get the number of a descriptor that is still registered."""

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    async def pass_by(self, count: int = 10) -> None:
        """Returns after so many polls of the running loop: every descriptor that was readable has been heard in each."""
        loop = asyncio.get_running_loop()
        has_polled = asyncio.Event()
        loop.add_reader(self._fd, has_polled.set)
        try:
            for _ in range(count):
                os.eventfd_write(self._fd, 1)
                await has_polled.wait()
                os.eventfd_read(self._fd)
                has_polled.clear()
        finally:
            loop.remove_reader(self._fd)

    def close(self) -> None:
        os.close(self._fd)


async def pass_by() -> None:
    """Some polls of the running loop."""
    polls = Polls()
    try:
        await polls.pass_by()
    finally:
        polls.close()
