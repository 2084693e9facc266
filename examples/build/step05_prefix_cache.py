"""Step 5: prefix caching. A full block is known by the hash of all tokens up to its end, and outlives its request."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

from step01_scheduler import Request, Row, run
from step02_blocks import BLOCK, PagedModel, streams_of
from step04_preemption import PreemptingScheduler


def block_hashes(tokens: list[int]) -> Iterator[bytes]:
    """Each covers the one before, so that equal hashes mean equal prefixes."""
    digest = b""
    for end in range(BLOCK, len(tokens) + 1, BLOCK):
        digest = hashlib.sha256(digest + repr(tokens[end - BLOCK : end]).encode()).digest()
        yield digest


class CachingScheduler(PreemptingScheduler):
    def __init__(self, max_seqs: int, num_blocks: int, max_step_tokens: int) -> None:
        super().__init__(max_seqs, num_blocks, max_step_tokens)
        self.users = [0] * num_blocks
        self.cached: dict[bytes, int] = {}
        self.hash_of: dict[int, bytes] = {}
        self.num_hits = 0

    def start(self, request: Request) -> None:
        """Take over the longest cached prefix. The last token is always computed: its logits are needed."""
        super().start(request)
        for digest in block_hashes(request.tokens[:-1]):
            block = self.cached.get(digest)
            if block is None:
                break
            if not self.users[block]:
                self.free.remove(block)
            self.users[block] += 1
            self.tables[request.name].append(block)
        request.num_computed = len(self.tables[request.name]) * BLOCK
        self.num_hits += request.num_computed

    def update(self, rows: list[Row], sampled: Sequence[int | None]) -> list[Request]:
        """Publish the blocks that this step has filled."""
        for row in rows:
            for block, digest in zip(row.blocks, block_hashes(row.tokens[: row.start + row.count]), strict=False):
                if digest not in self.cached and block not in self.hash_of:
                    self.cached[digest], self.hash_of[block] = block, digest
        return super().update(rows, sampled)

    def take(self) -> int:
        """The block that has been free for longest; what it held is forgotten now."""
        block = super().take()
        if (digest := self.hash_of.pop(block, None)) is not None:
            del self.cached[digest]
        self.users[block] = 1
        return block

    def give(self, block: int) -> None:
        self.users[block] -= 1
        if not self.users[block]:
            super().give(block)


def serve(kind: type[PreemptingScheduler]) -> tuple[int, dict[str, list[int]]]:
    system = list(range(100, 140))  # what all prompts begin with
    requests = [Request(f"r{i}", [*system, i, i + 1, i + 2], 6) for i in range(8)]
    scheduler, model, num_tokens = kind(max_seqs=2, num_blocks=40, max_step_tokens=64), PagedModel(40), 0
    for request in requests:
        scheduler.add(request)

    def counted(rows: list[Row]) -> list[int | None]:
        nonlocal num_tokens
        num_tokens += sum(row.count for row in rows)
        return model(rows)

    run(scheduler, counted)
    return num_tokens, streams_of(requests)


def main() -> None:
    without, expected = serve(PreemptingScheduler)
    with_cache, streams = serve(CachingScheduler)
    print(f"tokens computed: {without} without the cache, {with_cache} with it")
    print(f"the same tokens: {streams == expected}")


if __name__ == "__main__":
    main()
