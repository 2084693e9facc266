"""Step 4: preemption by recompute. Nothing is promised; if blocks run out, the newest request gives its own back."""

from __future__ import annotations

from step01_scheduler import Request, run
from step02_blocks import PagedModel, num_blocks_of, streams_of
from step03_chunked_prefill import ChunkingScheduler


class PreemptingScheduler(ChunkingScheduler):
    num_preemptions = 0

    def fits(self, request: Request) -> bool:
        """The known tokens and one more, now. What comes later is not asked."""
        return num_blocks_of(len(request.tokens) + 1) <= len(self.free)

    def reserve(self, request: Request, count: int) -> bool:
        while request in self.running:
            if super().reserve(request, count):
                return True
            self.preempt(self.running[-1])  # maybe the request itself; the oldest one always goes on
        return False

    def preempt(self, request: Request) -> None:
        """Its tokens stay known, and count as prompt when it is admitted again."""
        self.running.remove(request)
        self.release(request)
        request.num_computed = 0
        self.waiting.appendleft(request)
        self.num_preemptions += 1


def serve(kind: type[ChunkingScheduler]) -> tuple[int, ChunkingScheduler, dict[str, list[int]]]:
    requests = [Request(f"r{i}", [i] * (3 + i), 8 + 4 * (i % 4)) for i in range(8)]
    scheduler = kind(max_seqs=8, num_blocks=20, max_step_tokens=32)
    for request in requests:
        scheduler.add(request)
    return run(scheduler, PagedModel(20)), scheduler, streams_of(requests)


def main() -> None:
    num_steps, _, expected = serve(ChunkingScheduler)
    fewer, scheduler, streams = serve(PreemptingScheduler)
    assert isinstance(scheduler, PreemptingScheduler)
    print(f"{num_steps} steps with promised blocks, {fewer} with {scheduler.num_preemptions} preemptions")
    print(f"the same tokens: {streams == expected}; all blocks are free again: {len(scheduler.free) == 20}")


if __name__ == "__main__":
    main()
