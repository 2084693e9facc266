"""Step 3: a token budget. A long prompt is computed in chunks, so that no step is long and other streams go on."""

from __future__ import annotations

from step01_scheduler import Request, Row, run
from step02_blocks import PagedModel, PagedScheduler, streams_of


class ChunkingScheduler(PagedScheduler):
    def __init__(self, max_seqs: int, num_blocks: int, max_step_tokens: int) -> None:
        super().__init__(max_seqs, num_blocks)
        self.max_step_tokens = max_step_tokens

    def schedule(self) -> list[Row]:
        self.admit()
        self.running.sort(key=lambda request: request.num_missing > 1)  # decode rows first: one token each
        budget, rows = self.max_step_tokens, []
        for request in list(self.running):
            count = min(request.num_missing, budget)
            if count and self.reserve(request, count):
                rows.append(self.row(request, count))
                budget -= count
        return rows


def step_ms(rows: list[Row]) -> float:
    """What a step takes on a made-up machine: a little for itself, and some for each token."""
    return 2 + 0.25 * sum(row.count for row in rows)


def longest_gap(max_step_tokens: int) -> tuple[float, dict[str, list[int]]]:
    """Between two tokens of a stream beside which a long prompt arrives, in ms; and what all requests got."""
    requests = [Request("chat", [1, 2, 3], 40), Request("book", list(range(400)), 4)]
    scheduler, model = ChunkingScheduler(4, 128, max_step_tokens), PagedModel(128)
    scheduler.add(requests[0])
    now, last, gap, num_steps = 0.0, 0.0, 0.0, 0

    def timed(rows: list[Row]) -> list[int | None]:
        nonlocal now, last, gap, num_steps
        now += step_ms(rows)
        num_steps += 1
        if any(row.name == "chat" for row in rows):
            last, gap = now, max(gap, now - last)
        if num_steps == 5:
            scheduler.add(requests[1])
        return model(rows)

    run(scheduler, timed)
    return gap, streams_of(requests)


def main() -> None:
    whole, expected = longest_gap(1000)
    chunked, streams = longest_gap(32)
    print(f"longest gap of the stream: {whole:.1f} ms with whole prompts, {chunked:.1f} ms with 32 tokens a step")
    print(f"the same tokens: {streams == expected}")


if __name__ == "__main__":
    main()
