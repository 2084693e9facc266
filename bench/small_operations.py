"""What do the small operations of a decode step take on one thread, and what is the least that they could take?

    python bench/small_operations.py [--context 100] [--json FILE]

Attention, its store, rotation and activation are those of one layer of a 135M Llama, for 1, 2 and 4 rows. Sampling is of 49,152 and
151,936 ids at temperature 0.8. Times are medians of processor time, one call of each in turns. The floor of an operation is the sum
of the calls of torch and numpy that it is made of, each timed by itself. What is above it are views and Python.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from report import compared, finish

from actorllm.messages import NewRow, StepPlan, pack_rows
from actorllm.model.cpu.attention import KVCache
from actorllm.model.cpu.layers import ACTIVATIONS
from actorllm.model.inputs import PersistentBatch
from actorllm.model.philox import ID_DOMAIN, TILE_DOMAIN, gumbel_noise
from actorllm.model.sampler import GROUP, TILE, Sampler, SamplingColumns

HEADS, KV_HEADS, DIM, SIZE, INNER = 9, 3, 64, 32, 1536
ROUNDS = 400
VOCABULARIES = (49_152, 151_936)

Calls = dict[str, Callable[[], Any]]


def medians(calls: Calls) -> dict[str, float]:
    """Microseconds of processor time of each."""
    times: dict[str, list[int]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    for _ in range(ROUNDS):
        for name, call in calls.items():
            began = time.thread_time_ns()
            call()
            times[name].append(time.thread_time_ns() - began)
    return {name: statistics.median(each) / 1e3 for name, each in times.items()}


def attention(rows: int, context: int) -> tuple[dict[str, float], dict[str, list[str]]]:
    """Times, and by operation the calls that are its floor."""
    per_row = -(-(context + 2) // SIZE)
    cache = KVCache(1, KV_HEADS, DIM, rows * per_row, SIZE, torch.bfloat16)
    batch = PersistentBatch(2, SIZE, rows * per_row, per_row, padding_block=cache.padding_block)
    slots = np.arange(rows, dtype=np.int32)
    plan = StepPlan(
        step=0,
        new_rows=pack_rows(NewRow(row, context) for row in range(rows)),
        new_tokens=np.zeros(rows * context, np.int32),
        new_num_blocks=np.full(rows, per_row, np.int32),
        new_blocks=np.arange(rows * per_row, dtype=np.int32),
        prefill_slots=slots,
        prefill_counts=np.full(rows, context, np.int32),
        decode_slots=np.zeros(0, np.int32),
    )
    batch.apply(plan)
    inputs = batch.inputs(plan)
    batch.advance(inputs)
    batch.store(inputs.result_slots, np.zeros(rows, np.int32))
    plan = StepPlan(step=1, decode_slots=slots)
    batch.apply(plan)
    (attending,) = cache.attention(batch.inputs(plan), HEADS // KV_HEADS, (None,)).values()
    (group,), layer, writes = attending.groups, cache.layers[0], attending._writes
    heads = torch.randn(rows, HEADS + 2 * KV_HEADS, DIM).bfloat16()
    query, key_value = heads[:, :HEADS], heads[:, HEADS:]
    spread = query.unsqueeze(2).expand(-1, -1, group.num_blocks, -1)
    weights = spread.reshape(-1)
    scores = torch.randn(rows, HEADS, group.num_blocks * SIZE).bfloat16()
    shares = torch.softmax(scores, -1).view(-1)
    rotated, angles = heads[:, : HEADS + KV_HEADS], torch.randn(rows, 1, DIM // 2, dtype=torch.complex64)
    exact = rotated.float()
    turned = torch.view_as_complex(exact.view(*exact.shape[:2], -1, 2))
    gate_up = torch.randn(rows, 2 * INNER).bfloat16()
    gate, up = gate_up.chunk(2, 1)
    made = torch.nn.functional.silu(gate)

    def rotate() -> None:
        numbers = rotated.float()
        torch.view_as_complex(numbers.view(*numbers.shape[:2], -1, 2)).mul_(angles)
        rotated.copy_(numbers)

    def activate() -> torch.Tensor:
        one, other = gate_up.chunk(2, 1)
        return ACTIVATIONS["silu"](one).mul_(other)

    bag = torch.embedding_bag
    calls: Calls = {
        "store": lambda: writes.store(0, key_value),
        "attention with its store": lambda: attending.attend(0, query, key_value),
        "rotation": rotate,
        "activation": activate,
        "put_": lambda: layer.elements.put_(writes.places._elements, key_value.reshape(-1)),
        "reshape": lambda: spread.reshape(-1),
        "bag of keys": lambda: bag(layer.key_rows, group.key_index, group.key_bags, False, 0, False, weights),
        "bag of values": lambda: bag(layer.value_rows, group.value_index, group.value_bags, False, 0, False, shares),
        "add": lambda: torch.add(group.bias, scores, alpha=0.125),
        "softmax": lambda: torch.softmax(scores, -1),
        "float": rotated.float,
        "mul_ of complex": lambda: turned.mul_(angles),
        "copy_": lambda: rotated.copy_(exact),
        "silu": lambda: torch.nn.functional.silu(gate),
        "mul_": lambda: made.mul_(up),
    }
    floors = {
        "store": ["put_"],
        "attention with its store": ["put_", "reshape", "bag of keys", "add", "softmax", "bag of values"],
        "rotation": ["float", "mul_ of complex", "copy_"],
        "activation": ["silu", "mul_"],
    }
    return medians(calls), floors


def sampling(vocabulary: int) -> tuple[dict[str, float], dict[str, list[str]]]:
    """As `attention`, of one row."""
    logits, sampler = torch.randn(1, vocabulary), Sampler(vocabulary)
    one = np.ones(1, np.int32)
    columns = SamplingColumns(
        np.full(1, 0.8, np.float32), 0 * one, np.ones(1, np.float32), np.zeros(1, np.float32),
        np.zeros(1, np.uint64), 0 * one, one,
    )  # fmt: skip
    keys = columns.sampled.keys
    tiles = np.arange(-(-sampler.num_tiles // GROUP), dtype=np.uint32)
    ids = np.arange(TILE // GROUP, dtype=np.uint32)
    highest, divisor = logits.amax(1, keepdim=True), torch.full((1, 1), 0.8)
    whole = vocabulary // TILE * TILE
    calls: Calls = {
        "sampling": lambda: sampler.sample(logits, columns),
        "look for what is not finite": lambda: np.isfinite(logits.sum(1).numpy()),
        "sum": lambda: logits.sum(1),
        "amax": lambda: logits.amax(1, keepdim=True),
        "sub": lambda: torch.sub(logits, highest),
        "div_": lambda: logits.div_(divisor),
        "softmax": lambda: torch.softmax(logits, 1),
        "sum of tiles": lambda: logits[:, :whole].view(1, -1, TILE).sum(-1),
        "noise of tiles": lambda: gumbel_noise(keys, one, one, tiles, TILE_DOMAIN),
        "noise of ids": lambda: gumbel_noise(keys, one, one, ids, ID_DOMAIN),
    }
    floors = {
        "sampling": ["amax", "sub", "div_", "softmax", "sum of tiles", "noise of tiles", "noise of ids"],
        "look for what is not finite": ["sum"],
    }
    return medians(calls), floors


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json")
    parser.add_argument("--context", type=int, default=100)
    arguments = parser.parse_args()
    load_before = os.getloadavg()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    calls: dict[str, dict[str, float]] = {}
    with torch.inference_mode():
        for label, (times, floors) in {
            **{f"{n} row{'s' if n > 1 else ''}": attention(n, arguments.context) for n in (1, 2, 4)},
            **{f"{n:,} ids": sampling(n) for n in VOCABULARIES},
        }.items():
            calls[label] = times
            for name, parts in floors.items():
                floor = [sum(times[part] for part in parts)]
                rows.append(compared(f"{name}, {label}, us", [times[name]], "floor", floor))
    configuration = {"context": arguments.context, "rounds": ROUNDS}
    finish(
        "small_operations", "One thread", rows, arguments.json, load_before, configuration=configuration, calls=calls
    )


if __name__ == "__main__":
    main()
