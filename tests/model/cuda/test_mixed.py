"""Steps with prompts as graphs: the CPU's tokens, and nothing written by what fills them up."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from actorllm.model.cuda import mixed, ops
from actorllm.model.cuda.device import HostDevice, Replay
from actorllm.model.cuda.graphs import GraphPart
from actorllm.model.cuda.runner import CudaRunner
from tests.model.cuda.conftest import config_of
from tests.model.cuda.twins import Twins, prompt


def recorded(twins: Twins) -> CudaRunner:
    """All sizes are graphs."""
    runner = twins.runner
    for size in mixed.SIZES:
        assert (GraphPart.MIXED, size) in runner.graphs or runner.graphs.next_wanted() is not None
    while runner.record_next():
        pass
    return runner


WINDOWS = {"architectures": ["Gemma3ForCausalLM"], "sliding_window": 24, "sliding_window_pattern": 2}


@pytest.mark.parametrize("differences", [{}, WINDOWS], ids=["llama", "windows"])
def test_recorded_steps_with_prompts_give_the_tokens_of_the_cpu(
    make_twins: Callable[..., Twins], differences: dict[str, Any]
) -> None:
    """In chunks, several at once, beside decode rows, over the border of a block, of requests that come and go."""
    twins = make_twins(differences)
    runner = recorded(twins)
    launched = runner.graphs.num_launched
    twins.add(3, prompt(70, 1))
    twins.add(0, prompt(9, 2), temperature=0.8, seed=1, top_p=0.9)
    twins.step({3: 60, 0: 9}, decode=[])
    twins.step({3: 10}, decode=[0])
    twins.add(5, prompt(130, 3), temperature=0.9, seed=5)
    twins.add(1, prompt(1, 4))
    twins.step({5: 100, 1: 1}, decode=[0, 3])
    twins.step({5: 30}, decode=[3, 1, 0])
    twins.remove(3)
    twins.add(3, prompt(33, 5))
    twins.step({3: 33}, decode=[0, 5, 1])
    assert runner.graphs.num_launched == launched, "everything was a graph"
    twins.step(decode=[3, 0, 5, 1])


def test_a_step_with_prompts_is_a_handful_of_launches(
    make_twins: Callable[..., Twins], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside its graph: the head, the draw, and nothing for each layer."""
    twins = make_twins()
    runner = recorded(twins)
    twins.add(0, prompt(20, 1))
    twins.step({0: 20}, decode=[])
    twins.device.add(1, prompt(20, 2))
    ran: list[tuple[GraphPart, int]] = []
    monkeypatch.setattr(runner.graphs, "run", lambda *key: ran.append(key))
    with ops.record() as launches:
        runner.execute(twins.device.plan({1: 20}, [0]))
    assert ran == [(GraphPart.MIXED, 32)]
    assert [getattr(call, "func", call).__name__ for call in launches] == ["lm_head_sample", "sample_pick"]


@pytest.mark.parametrize("what", ["more tokens", "more prompts"])
def test_a_step_that_does_not_fit_is_launched_as_it_is(
    make_twins: Callable[..., Twins], monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    monkeypatch.setattr(mixed, "MAX_CHUNKS", 2 if what == "more prompts" else 16)
    twins = make_twins({"max_position_embeddings": 1024}, max_num_batched_tokens=2048)
    runner = recorded(twins)
    lengths = [600] if what == "more tokens" else [5, 6, 7]
    for slot, length in enumerate(lengths):
        twins.add(slot, prompt(length, slot))
    replays = runner.graphs.num_replays
    twins.step(dict(enumerate(lengths)), decode=[])
    assert runner.graphs.num_replays == replays
    twins.step(decode=list(range(len(lengths))))


def test_padding_writes_nothing(make_twins: Callable[..., Twins]) -> None:
    """Of a step without requests, in whatever state the last one has left its memory."""
    twins = make_twins()
    runner = recorded(twins)
    twins.add(0, prompt(40, 1))
    twins.add(2, prompt(7, 2))
    twins.step({0: 40, 2: 7}, decode=[])
    pool, state = runner.pool.clone(), runner.state.snapshot()
    assert runner.mixed is not None
    with torch.inference_mode():
        for size in mixed.SIZES[:3]:
            runner.mixed.clear(size)
            runner.graphs.run(GraphPart.MIXED, size)
    assert torch.equal(runner.pool, pool)
    assert torch.equal(runner.state.snapshot(), state)


def test_what_is_not_finite_stays_with_its_request(make_twins: Callable[..., Twins]) -> None:
    """A prompt whose states are not finite, between others, in a graph: it is reported, and its keys are cleared."""
    twins = make_twins()
    runner = recorded(twins)
    with torch.inference_mode():
        runner.model.embedding[7] = torch.nan
        twins.cpu.runner.decoder.embedding[7] = torch.nan
    bad = np.array([3, 7, 9], np.int32)
    for slot, tokens in ((0, prompt(12, 1)), (1, bad), (2, prompt(5, 2))):
        tokens = np.where((tokens == 7) & (slot != 1), 8, tokens).astype(np.int32)
        twins.add(slot, tokens)
    result = twins.device.step({0: 12, 1: 3, 2: 5}, [])
    assert result.nonfinite_prefills.tolist() == [1]
    assert runner.pool.isfinite().all()
    assert runner.graphs.num_replays > 0


@pytest.mark.parametrize("num_rows", [1, 9])
def test_tokens_of_prompts_stay_where_padding_of_decode_rows_is(num_rows: int) -> None:
    rows = torch.full((num_rows,), -1, dtype=torch.int32)
    rows[0] = 2
    column = torch.arange(4, dtype=torch.int32)
    table = torch.tensor([[5], [6], [7], [8]], dtype=torch.int32)
    ids, positions, seq_lens = (torch.full((num_rows,), 99, dtype=torch.int32) for _ in range(3))
    kv_slots = torch.full((num_rows,), 99)
    ops.step_prep(rows, column + 40, column.clone(), table, 64, ids, positions, kv_slots, seq_lens, keeps_padding=True)
    assert ids.tolist() == [42] + [99] * (num_rows - 1)
    assert positions.tolist() == [2] + [99] * (num_rows - 1)
    assert kv_slots.tolist() == [7 * 64 + 2] + [99] * (num_rows - 1)
    assert seq_lens.tolist() == [3] + [0] * (num_rows - 1)


class Forgetful(HostDevice):
    """Its graphs of steps with prompts lack what they do last in each layer."""

    def __init__(self) -> None:
        super().__init__()
        self.proves_itself = True

    def capture(self, launch: Callable[[], None]) -> Replay:
        with ops.record() as nodes:
            launch()
        names = [getattr(node, "func", node).__name__ for node in nodes]
        kept = [node for node, name in zip(nodes, names, strict=True) if name != "attn_prefill"]
        return lambda: [node() for node in kept] and None


def test_a_graph_that_is_not_the_step_is_found_at_the_start(
    folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    runner = CudaRunner(config_of(folder(), block_size=64), show_progress=False, device=Forgetful())
    runner.load()
    runner.allocate(8)
    assert not runner.graphs.is_on
    assert "launched kernel by kernel, not as graphs: replayed, its logits differ" in caplog.text
