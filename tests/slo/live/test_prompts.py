"""Token ids for workloads: lengths to the token, and what is shared."""

from __future__ import annotations

import numpy as np

from actorllm.slo.live.prompts import Prompts, with_lengths_scaled
from actorllm.slo.traces import SAMPLE, load_trace
from actorllm.slo.workload import Prefixes, fixed_lengths, make_workload, poisson_arrivals, share_prefixes, synthetic


def shared(a: np.ndarray, b: np.ndarray) -> int:
    size = min(a.size, b.size)
    return int(np.append(a[:size] != b[:size], True).argmax())


def test_lengths_are_exact_and_ids_are_of_the_vocabulary() -> None:
    for workload in (synthetic(30, 5.0), load_trace(SAMPLE).workload.head(30)):
        prompts = Prompts(workload, 4096, seed=1)
        for row in range(30):
            ids = prompts.ids(row)
            assert ids.size == workload.num_prompt[row]
            assert ids.dtype == np.int32
            assert 100 <= ids.min() <= ids.max() < 4096
    assert Prompts(make_workload(np.zeros(1), fixed_lengths(1, 500, 1)), 10).ids(0).max() < 10


def test_prompts_share_what_their_hash_ids_say() -> None:
    ids = np.array([1, 2, 3, 1, 2, 4, 1, 9, 1, 2], np.int64)
    workload = make_workload(np.arange(5.0), fixed_lengths(5, 70, 1))
    object.__setattr__(workload, "prefixes", Prefixes(ids, np.array([0, 3, 6, 8, 10, 10]), 32))
    prompts = Prompts(workload, 4096)
    got = [prompts.ids(row) for row in range(5)]
    assert [ids.size for ids in got] == [70] * 5
    assert shared(got[0], got[1]) == 64
    assert shared(got[0], got[2]) == 32
    assert shared(got[0], got[3]) == 64, "what lies behind the ids is its own"
    assert shared(got[0], got[4]) < 5, "without ids nothing is shared"


def test_the_seed_says_everything() -> None:
    workload = share_prefixes(synthetic(20, 5.0), num_groups=2, num_tokens=64)
    first, again, other = Prompts(workload, 1000, 1), Prompts(workload, 1000, 1), Prompts(workload, 1000, 2)
    for row in (7, 3, 11):
        assert again.ids(row).tolist() == first.ids(row).tolist(), "in any order"
        assert other.ids(row).tolist() != first.ids(row).tolist()


def test_lengths_are_scaled_for_a_small_model() -> None:
    workload = share_prefixes(
        make_workload(poisson_arrivals(4, 1.0), fixed_lengths(4, 1000, 3)), num_groups=1, num_tokens=512
    )
    small = with_lengths_scaled(workload, 0.1)
    assert small.num_prompt.tolist() == [100] * 4
    assert small.num_output.tolist() == [1] * 4
    assert small.prefixes is not None
    assert small.prefixes.block_tokens == 6
    prompts = Prompts(small, 4096)
    assert shared(prompts.ids(0), prompts.ids(1)) == 48, "eight blocks of 64 tokens, now of 6"
