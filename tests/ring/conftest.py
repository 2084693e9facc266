"""Rings inside one process: both ends with mappings and descriptors of their own, as two processes would have them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

from actorllm.ring.doorbell import Doorbell
from actorllm.ring.ring import RingReader, RingWriter
from actorllm.ring.segment import Segment, create_segment


@pytest.fixture(scope="module")
def anyio_backend() -> tuple[str, dict[str, bool]]:
    return "asyncio", {"use_uvloop": True}


@dataclass
class RingPair:
    """A writer and its readers, and a third mapping for a test that plays a corrupt peer."""

    writer: RingWriter
    readers: list[RingReader]
    segment: Segment

    @property
    def reader(self) -> RingReader:
        return self.readers[0]

    def close(self) -> None:
        self.writer.close()
        for reader in self.readers:
            reader.close()
        self.segment.close()


@pytest.fixture
def make_ring() -> Iterator[Callable[..., RingPair]]:
    pairs: list[RingPair] = []

    def make(capacity: int = 512, num_readers: int = 1, *, checksum: bool = False, debug: bool = False) -> RingPair:
        fd = create_segment(capacity, num_readers=num_readers)
        bells = [Doorbell.create() for _ in range(num_readers)]
        space = Doorbell.create()
        pair = RingPair(
            RingWriter(Segment.attach(fd), bells, space, checksum=checksum, debug=debug),
            [
                RingReader(Segment.attach(fd), bell.duplicate(), space.duplicate(), index=index, debug=debug)
                for index, bell in enumerate(bells)
            ],
            Segment.attach(fd),
        )
        os.close(fd)
        pairs.append(pair)
        return pair

    yield make
    for pair in pairs:
        pair.close()
