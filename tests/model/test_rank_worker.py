"""`RankWorker`: weights that functions of the application bring are copied on one rank, which the engine takes them from."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from actorllm.model.rank_worker import RankWorker


@pytest.mark.parametrize(("rank", "replica"), [(0, 0), (1, 0), (0, 1)])
def test_weights_are_copied_once_for_all_ranks(rank: int, replica: int) -> None:
    config = SimpleNamespace(replica=replica, model=SimpleNamespace(module=None))
    runner = SimpleNamespace(rank=rank, config=config, model=SimpleNamespace())
    worker = RankWorker(runner)
    given = {"a": torch.ones(1000), "b": torch.ones(10, dtype=torch.bfloat16)}
    assert runner.model.load_weights(iter(given.items())) == {"a", "b"}, "every rank reads all, and is told the names"
    found = worker.take_weights()
    assert found.keys() == given.keys()
    is_first = (rank, replica) == (0, 0)
    assert sum(tensor.nbytes for tensor in found.values()) == (4020 if is_first else 0)
    assert all(tensor.data_ptr() != given[name].data_ptr() for name, tensor in found.items())
    assert not worker.take_weights()
