"""How long a launch takes by its bytes and its latencies: to rank configurations, and to predict steps (`bench/gpu.py --predict`).

The model knows waves of programs, the bytes that they have under way, and what is done one after the other:

    start of a launch + reads that wait for each other + the longer of (arithmetic, reading), wave by wave

Reading is as fast as the memory, unless too few bytes are under way: then it is what is under way in one latency. Reads that
began before the launch in front had ended go on during the start. Nothing here is measured. `Machine` has what is assumed of a
GPU, and `bench/gpu.py` puts what it measures in its place. Shared memory is estimated from the tiles; tests hold the programs per
multiprocessor that follow against the compiled code.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from actorllm_kernels.configs import REGISTERS_PER_SM, RESERVED_SHARED, SHARED_PER_SM
from actorllm_kernels.gemv import AT_ONCE
from actorllm_kernels.launches import Launch
from actorllm_kernels.skinny_gemm import UNROLLED


@dataclass(frozen=True, slots=True)
class Machine:
    """What is assumed of a GPU. Times are in seconds."""

    name: str
    bandwidth: float
    """Bytes per second that a large read reaches."""
    flops: float
    """Of bfloat16 products, as a large one reaches them."""
    multiprocessors: int = 132
    clock: float = 1.7e9
    latency_s: float = 0.8e-6
    """Of a read from memory under load."""
    cached_s: float = 0.25e-6
    """Of a read from the second-level cache, or of an atomic operation there."""
    launch_s: float = 1.5e-6
    """From the end of a launch in a graph to the first instruction of the next."""
    dependent_s: float = 0.8e-6
    """The same for a dependent launch, up to the end of its wait."""


MACHINES = {
    "H200": Machine("H200", 4.2e12, 700e12),
    "H100": Machine("H100", 2.9e12, 650e12),
}

TABLE = "sm_90"
"""The part of the table of configurations that these are served by."""


@dataclass(frozen=True, slots=True)
class Work:
    """What a launch does."""

    num_bytes: float = 0.0
    """Read from memory, and written."""
    flops: float = 0.0
    programs: int = 1
    resident: int = 1
    """Programs on a multiprocessor at once."""
    ahead: float = math.inf
    """Bytes that a program has under way."""
    serial: int = 2
    """Reads of the cache that wait for each other, before and after the main loop."""
    tail_s: float = 0.0
    """Of a program behind its loop, with nothing under way."""
    prefetched: float = 0.0
    """Bytes that are asked for before the launch in front has ended."""
    is_dependent: bool = False
    efficiency: float = 1.0
    """Of the arithmetic, against `Machine.flops`."""


def seconds(work: Work, machine: Machine) -> float:
    """How long the launch takes, from the end of the one in front of it, in a graph."""
    room = work.resident * machine.multiprocessors
    start = machine.dependent_s if work.is_dependent else machine.launch_s
    reading = math.fsum(
        _wave(work, min(room, work.programs - first), machine) for first in range(0, work.programs, room)
    )
    early = min(work.prefetched / machine.bandwidth, start, reading)
    # Programs that share a multiprocessor hide each other's tails, but not the last ones.
    waves = math.ceil(work.programs / room)
    tails = work.tail_s * (waves if work.resident == 1 else 1)
    return start + work.serial * machine.cached_s + max(reading - early, 0.0) + tails


def _wave(work: Work, programs: int, machine: Machine) -> float:
    share = programs / work.programs
    rate = min(machine.bandwidth, programs * work.ahead / machine.latency_s)
    full = min(1.0, programs / machine.multiprocessors)  # a multiprocessor without a program computes nothing
    computing = share * work.flops / (machine.flops * work.efficiency * full) if work.flops else 0.0
    return max(share * work.num_bytes / rate, computing)


def resident(launch: Launch, shared: float) -> int:
    """Programs per multiprocessor, by their shared memory and the registers that the table lets them have."""
    by_shared = int(SHARED_PER_SM[TABLE] // (shared + RESERVED_SHARED))
    threads = 32 * int(launch.options["num_warps"])
    by_registers = REGISTERS_PER_SM // (int(launch.options.get("maxnreg", 0)) * threads or 1)
    return max(1, min(by_shared, by_registers))


def of_launch(launch: Launch, machine: Machine, *, kv_tokens: int = 0, prompt_pairs: float = 0.0) -> Work:
    """Of a launch of one of our kernels, but for what small ones move, which its caller knows.

    kv_tokens: of all sequences together, whose keys and values are read. prompt_pairs: of a query and a key that it may see.
    """
    name = launch.kernel.__name__
    makers = {
        "gemv_kernel": _one_row,
        "skinny_gemm_kernel": _product,
        "lm_head_sample_kernel": _head,
        "attn_decode_kernel": _decode,
        "attn_prefill_kernel": _prefill,
    }
    programs = math.prod(launch.grid)
    dependent = bool(launch.options.get("launch_pdl"))
    if name not in makers:
        room = resident(launch, 1024)
        return Work(programs=programs, resident=room, is_dependent=dependent)
    return makers[name](launch, machine, programs, dependent, kv_tokens, prompt_pairs)


PIECES_AT_ONCE = 2
"""Of the rows of a program of `gemv`, that registers hold while they are read."""


def _one_row(launch: Launch, machine: Machine, programs: int, is_dependent: bool, kv_tokens: int, pairs: float) -> Work:
    c = launch.constants
    factors = 2 if c["ACTIVATION"] else 1
    num_bytes = 2.0 * c["N"] * c["K"] * factors
    piece = 2 * c["BLOCK_N"] * min(c["BLOCK_K"], c["K"]) * factors
    return Work(
        num_bytes=num_bytes,
        programs=programs,
        resident=AT_ONCE,
        ahead=min(PIECES_AT_ONCE * piece, num_bytes / programs),
        serial=2,
        prefetched=float(programs * piece) if c["IS_EARLY"] else 0.0,
        is_dependent=is_dependent,
    )


def _product(launch: Launch, machine: Machine, programs: int, is_dependent: bool, kv_tokens: int, pairs: float) -> Work:
    c = launch.constants
    factors = 2 if c["ACTIVATION"] else 1
    # The matrix units for large tiles read from shared memory while the next tile is loaded: one buffer more.
    buffers = int(launch.options["num_stages"]) - (0 if c["BLOCK_N"] * launch.options["num_warps"] >= 256 else 1)
    tile = 2 * c["BLOCK_N"] * c["BLOCK_K"] * factors
    beside = 2 * c["BLOCK_M"] * c["BLOCK_K"] + (4 * c["BLOCK_K"] if c["HAS_NORM"] else 0)
    return Work(
        num_bytes=2.0 * c["N"] * c["K"] * factors,
        flops=2.0 * c["BLOCK_M"] * c["N"] * c["K"] * factors,
        programs=programs,
        resident=resident(launch, buffers * (tile + beside)),
        ahead=(int(launch.options["num_stages"]) - 1) * tile,
        serial=2 + _merging(c["SPLIT"]),
        prefetched=min(1.0, c["AHEAD"] * c["SPLIT"] / c["K"]) * 2.0 * c["N"] * c["K"] * factors,
        is_dependent=is_dependent,
        efficiency=0.5,  # tiles too small for the fastest matrix units
    )


def _merging(split: int) -> int:
    """Reads one behind the other where a product is split: a store, a count, and the parts, at once if they are few."""
    return 0 if split == 1 else 3 if split <= UNROLLED.value else 2 + split


PHILOX_INSTRUCTIONS = 8 * 2800
"""Behind the loop of the LM head, of all warps together, per 16 rows; counted in the machine code of eight warps."""


def _head(launch: Launch, machine: Machine, programs: int, is_dependent: bool, kv_tokens: int, pairs: float) -> Work:
    c = launch.constants
    buffers = int(launch.options["num_stages"])
    tile = 2 * 256 * c["BLOCK_K"]
    beside = 2 * c["BLOCK_M"] * c["BLOCK_K"] + 4 * c["BLOCK_K"]
    shared_by = launch.grid[0]
    return Work(
        num_bytes=2.0 * c["VOCAB"] * c["K"],  # programs of the same tile find it in the cache
        flops=2.0 * c["BLOCK_M"] * shared_by * c["VOCAB"] * c["K"],
        programs=programs,
        resident=resident(launch, buffers * (tile + beside)),
        ahead=(buffers - 1) * tile / shared_by,
        serial=3,
        tail_s=PHILOX_INSTRUCTIONS * c["BLOCK_M"] / 16 / 4 / machine.clock,
        prefetched=min(1.0, c["AHEAD"] / c["K"]) * min(programs, 132) / programs * 2.0 * c["VOCAB"] * c["K"],
        is_dependent=is_dependent,
        efficiency=0.5,
    )


def _decode(launch: Launch, machine: Machine, programs: int, is_dependent: bool, kv_tokens: int, pairs: float) -> Work:
    c = launch.constants
    tile = 2 * 2 * c["TILE"] * c["DIM_BLOCK"]
    buffers = max(1, int(launch.options["num_stages"]) - 3)  # the block ids take two stages
    tiles = max(1, kv_tokens // c["TILE"]) * c["NUM_KV"]
    working = min(programs, max(1, tiles // 2))
    return Work(
        num_bytes=2.0 * 2 * kv_tokens * c["NUM_KV"] * c["DIM"],
        flops=4.0 * kv_tokens * c["NUM_KV"] * c["BLOCK_M"] * c["DIM"],
        programs=working,
        resident=resident(launch, (buffers + 0.25) * tile),
        ahead=buffers * tile,
        serial=4 + (4 if working < tiles else 0),  # the plan, lengths, block ids, queries; parts that are merged
        is_dependent=is_dependent,
        efficiency=0.3,  # 16 rows of queries, and a softmax in between
    )


def _prefill(launch: Launch, machine: Machine, programs: int, is_dependent: bool, kv_tokens: int, pairs: float) -> Work:
    c = launch.constants
    # Clocks of a tile: products, exponentials (16 a clock), and about eight other operations on every score (128 a clock).
    per_clock = machine.flops / machine.multiprocessors / machine.clock
    scores = c["BLOCK_M"] * c["TILE"]
    products = 4 * scores * c["DIM_BLOCK"] / per_clock
    efficiency = products / (products + scores / 16 + 8 * scores / 128)
    rows = c["NUM_KV"] * c["GROUP"]
    return Work(
        num_bytes=2.0 * 2 * kv_tokens * c["NUM_KV"] * c["DIM"],
        flops=4.0 * pairs * rows * c["DIM"],
        programs=programs,
        resident=1,
        ahead=2.0 * 2 * c["TILE"] * c["DIM"],
        serial=4,
        is_dependent=is_dependent,
        efficiency=efficiency,
    )


CUBLAS_TILE = 128
CUBLAS_READS = 0.85
"""Of the bandwidth, for a product of few rows by cuBLAS."""


def of_product(num_rows: int, num_outputs: int, num_inputs: int, machine: Machine) -> Work:
    """A product by cuBLAS. Of few rows it reads the weight; of many, its tiles are shared out among the multiprocessors."""
    num_bytes = 2.0 * (num_outputs * num_inputs + num_rows * (num_inputs + num_outputs))
    flops = 2.0 * num_rows * num_outputs * num_inputs
    tiles = math.ceil(num_rows / CUBLAS_TILE) * math.ceil(num_outputs / CUBLAS_TILE)
    waves = tiles / machine.multiprocessors
    # A last wave that is not full leaves multiprocessors idle; where there are few tiles, they are split along K.
    quantized = waves / math.ceil(waves) if waves > 1 else 0.8
    padded = math.ceil(num_rows / 64) * 64 / num_rows
    return Work(num_bytes / CUBLAS_READS, flops * padded, machine.multiprocessors, efficiency=quantized, serial=2)


def of_moves(num_bytes: float, is_dependent: bool) -> Work:
    """A small kernel, by what it moves."""
    return Work(num_bytes=num_bytes, programs=132, serial=2, is_dependent=is_dependent)


PIVOTS = (2, 7)
"""That are tried for top_k and top_p in registers, in normally distributed logits (top_k of 20, then top_p of 0.95)."""


def cutoff_s(launch: Launch, machine: Machine) -> float:
    """Of the program that decides a cutoff from few tiles: the sort of the maxima, and pivots tried in registers."""
    c = launch.constants
    barrier = 100  # clocks, for a sum over a program's threads
    stages = math.log2(c["BLOCK"]) * (math.log2(c["BLOCK"]) + 1) / 2
    compared: float = 3 * c["CHUNK"] * 256 / (32 * 4)  # three instructions an id, four schedulers
    clocks: float = stages * 60 + PIVOTS[0] * (barrier + compared) + PIVOTS[1] * 2 * (barrier + compared)
    return clocks / machine.clock
