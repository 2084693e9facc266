"""What does a hand-off between two replicas take, beside a memcpy of the same bytes; and from the offer to the next token?

The first part copies the KV of a prompt out of the memory of one cache into another one, as a decoding replica does, lease and all.
In turns with it, it copies as many bytes between two arrays that lie in one piece each. The blocks lie side by side, or scattered.
All memory has been written before. The second part runs an engine with roles, and asks it for prompts one after the other. It tells
what the copies took by the scheduler's count, and what the stream waited from the offer to its next token. Times are medians.
Run: python bench/roles.py [--json FILE] [--model 0.6B] [--tokens 2048] [--rounds 20] [--prompts 12]
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from model import SHAPES
from report import environment, write_json

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from actorllm import AsyncLLM, SamplingParams  # noqa: E402
from actorllm.actors.memory_file import MemoryFile  # noqa: E402
from actorllm.actors.tiers.lease_board import LeaseBoard, num_bytes  # noqa: E402
from actorllm.actors.tiers.peer_memory import PeerMemory  # noqa: E402
from actorllm.model.cpu.attention import KVCache, shared_pages  # noqa: E402
from actorllm.scheduling.role_router import RoleRouter  # noqa: E402

TARGET = 1.2
"""Of a memcpy."""
BLOCK = 32
DIGEST = bytes(32)


def copies(shape: dict[str, Any], tokens: int, rounds: int) -> list[dict[str, Any]]:
    """A hand-off and a memcpy in turns."""
    number = tokens // BLOCK
    head_dim = shape.get("head_dim") or shape["hidden_size"] // shape["num_attention_heads"]
    sizes = shape["num_hidden_layers"], shape["num_key_value_heads"], head_dim
    board_file, pool = MemoryFile("leases", num_bytes(number)), MemoryFile("kv-cache")
    board = LeaseBoard(board_file.path, number)
    era = board.begin_era(0)
    lender = KVCache(*sizes, 2 * number, BLOCK, torch.bfloat16, pages=shared_pages(pool.path))
    borrower = KVCache(*sizes, 2 * number, BLOCK, torch.bfloat16)
    peers = PeerMemory([pool.path, ""], board, borrower.block_regions)
    for cache in (lender, borrower):
        for region in cache.block_regions():
            region[:] = 1
    size = sum(region[:, :number].nbytes for region in lender.block_regions())
    source, target = np.ones(size, np.uint8), np.ones(size, np.uint8)
    table = board.lender(0, 2 * number)
    rows = []
    for name in ("side by side", "scattered"):
        blocks = np.arange(number, dtype=np.int32)
        targets = blocks.tolist()
        if name == "scattered":
            blocks = np.random.default_rng(1).permutation(2 * number)[:number].astype(np.int32)
            targets = np.random.default_rng(2).permutation(2 * number)[:number].tolist()
        lease = table.grant(blocks, DIGEST, era)
        assert lease is not None
        found: dict[str, list[float]] = {"hand-off": [], "memcpy": []}
        for turn in range(rounds + 1):
            for kind in sorted(found, reverse=bool(turn % 2)):
                began = time.perf_counter()
                if kind == "memcpy":
                    np.copyto(target, source)
                elif peers.pull(lease.tolist()[:3], DIGEST, 0, targets)[0] != number:
                    raise SystemExit("the lease was not there")
                if turn:  # the first one is not counted
                    found[kind].append(time.perf_counter() - began)
        table.end(lease)
        handed, copied = (statistics.median(found[kind]) for kind in ("hand-off", "memcpy"))
        rows.append({"figure": f"{tokens} tokens, {name}", "bytes": size, "hand_off_s": handed, "memcpy_s": copied})
        rows[-1]["ratio"] = statistics.median(a / b for a, b in zip(found["hand-off"], found["memcpy"], strict=True))
        print(
            f"{tokens} tokens, {name}: {1e3 * handed:.1f} ms, memcpy {1e3 * copied:.1f} ms: {rows[-1]['ratio']:.2f} "
            f"(target {TARGET:g})"
        )
    return rows


async def live(prompts: int) -> dict[str, Any]:
    """From the offer to the next token, of the bundled model."""
    params = SamplingParams(max_tokens=8, ignore_eos=True, detokenize=False)
    waited: list[float] = []
    RoleRouter.pays = lambda self, request, prefill, decode: True  # type: ignore[method-assign]
    options: dict[str, Any] = {"num_threads": 1, "skip_tokenizer_init": True, "roles": "1P1D"}
    async with AsyncLLM("storyteller", **options) as llm:
        while any(one.state != "running" for one in llm.health().replicas):  # noqa: ASYNC110 - nothing tells of it
            await asyncio.sleep(0.05)
        router: Any = llm._engine._frontend.router  # type: ignore[attr-defined]
        router.hand_off.observe = lambda number, seconds: waited.append(seconds)
        for number in range(prompts):
            tokens = random.Random(number).choices(range(3, 500), k=400)
            async for _ in llm.generate({"prompt_token_ids": tokens}, params):
                pass
        told = (await llm.stats())["scheduler"]["replicas"][1]["scheduler"]["transfers"]
    row = {
        "figure": "storyteller, 400 tokens, live",
        "hand_off_s": told["pull_s"] / max(1, told["num_pulls"]),
        "to_next_token_s": statistics.median(waited),
        "lost": told["num_lost_leases"],
    }
    print(
        f"live: {1e3 * row['hand_off_s']:.2f} ms of copying, {1e3 * row['to_next_token_s']:.1f} ms from the offer to the next "
        f"token; {row['lost']} leases were over before"
    )
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--model", default="0.6B", choices=SHAPES)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--prompts", type=int, default=12)
    arguments = parser.parse_args()
    before = list(os.getloadavg())
    rows = copies(SHAPES[arguments.model], arguments.tokens, arguments.rounds)
    rows.append(asyncio.run(live(arguments.prompts)))
    if arguments.json is not None:
        data = {
            "environment": environment(),
            "load_before": before,
            "configuration": {"model": arguments.model, "tokens": arguments.tokens, "rounds": arguments.rounds},
            "rows": rows,
        }
        write_json(arguments.json, data)


if __name__ == "__main__":
    main()
