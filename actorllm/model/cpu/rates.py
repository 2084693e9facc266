"""What products of a model take on this machine, with each number of threads; measured while loading, in about 0.1 s."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from actorllm.model.cpu.thread_count import set_own_num_threads
from actorllm.model.linear import Form, Linear, LinearWeight
from actorllm.model.team import Rates

MANY_ROWS = 32
"""Of the products whose time shows what a further row takes."""

ROUNDS = 3

MOST_BYTES = 24 << 20
"""Of the weights that are read one after the other; as many as this are not all in a cache of one core."""

MOST_NUMBERS = 2 << 20
"""Of one weight."""

NUM_REGIONS = 20


def sizes_of(num_threads: int) -> tuple[int, ...]:
    """The numbers of threads to choose between: powers of two, and the largest."""
    sizes = [1]
    while 2 * sizes[-1] < num_threads:
        sizes.append(2 * sizes[-1])
    return tuple(sorted({*sizes, num_threads}))


def measured_rates(
    sizes: Sequence[int],
    num_numbers: int,
    num_inputs: int,
    num_products: int,
    dtype: torch.dtype,
    linear: Callable[[LinearWeight], Linear],
    form: Form,
) -> Rates:
    """Of a weight of average size; the shortest time of each counts. Leaves the calling thread's number of threads changed.

    Arguments:
        sizes: numbers of threads. One whose products have other bits than those of the largest is left out of the result.
        num_numbers: of one weight of the model, on average.
        num_inputs: of most layers.
        num_products: of a step.
        dtype: of the model.
        linear: makes the products of a weight, as the model's are made.
        form: what its weights are.
    """
    num_outputs = max(16, min(num_numbers, MOST_NUMBERS) // num_inputs)
    set_own_num_threads(sizes[-1])
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(num_outputs, num_inputs, generator=generator).to(dtype)
    first = linear(form.of(weight))
    count = max(1, min(num_products, MOST_BYTES // max(1, first.num_bytes)))
    products = [first, *(linear(form.of(weight)) for _ in range(count - 1))]
    many = torch.randn(MANY_ROWS, num_inputs, generator=generator).to(dtype)
    one = many[:1].contiguous()
    tiny = linear(form.of(weight[:16]))
    one_row, per_row, region, bits = {}, {}, {}, {}
    for size in sizes:
        set_own_num_threads(size)
        bits[size] = first(one), first(many)
        single = _shortest(lambda: [product(one) for product in products]) / count
        whole = _shortest(lambda: first(many))
        one_row[size] = single
        per_row[size] = max(0.0, whole - single) / (MANY_ROWS - 1)
        region[size] = _shortest(lambda: [tiny(one) for _ in range(NUM_REGIONS)]) / NUM_REGIONS
    kept = [size for size in sizes if all(map(torch.equal, bits[size], bits[sizes[-1]]))]
    # A product of nothing takes as long with one thread as with several, but for starting these.
    regions = {size: max(0.0, region[size] - region[sizes[0]]) for size in kept}
    return Rates(
        {size: one_row[size] for size in kept},
        {size: per_row[size] for size in kept},
        regions,
        num_products,
    )


def _shortest(action: Callable[[], object]) -> float:
    found = float("inf")
    for _ in range(ROUNDS):
        began = time.perf_counter()
        action()
        found = min(found, time.perf_counter() - began)
    return found
