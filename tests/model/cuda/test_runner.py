"""The GPU's step, launched in its own order on CPU tensors, gives what the CPU worker gives (float32)."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from actorllm.errors import ConfigError, EngineError
from actorllm.messages import POOLING_CODES, LateInputs, StepPlan
from actorllm.model.cuda import mixed
from actorllm.model.cuda.device import HostDevice
from actorllm.model.cuda.graphs import MAX_MISSES, GraphPart
from actorllm.model.cuda.runner import GRAPH_BYTES, CudaRunner
from tests.model.cuda.rules import rules_of
from tests.model.cuda.twins import Twins, prompt
from tests.model.driver import int32

pytestmark = pytest.mark.timeout(120)


@pytest.mark.parametrize("family", ["Qwen3ForCausalLM", "Qwen2ForCausalLM", "MistralForCausalLM"])
def test_chunks_and_decode_steps_give_the_tokens_of_the_cpu(make_twins: Callable[..., Twins], family: str) -> None:
    """Prompts of several blocks in chunks, greedy and seeded, decode rows beside prompts and alone."""
    differences: dict[str, Any] = {"architectures": [family]}
    if family == "MistralForCausalLM":
        differences["sliding_window"] = 40
    twins = make_twins(differences)
    twins.add(0, prompt(70, 1))
    twins.add(3, prompt(5, 2), temperature=0.8, seed=2**63 + 5)
    twins.step({0: 60, 3: 5}, decode=[])
    twins.step({0: 10}, decode=[3])
    twins.add(1, prompt(20, 3), temperature=1.2, seed=7, sample_index=2)
    twins.step({1: 20}, decode=[3, 0])
    twins.step(decode=[3, 0, 1])
    for _ in range(3):
        twins.step()
    assert len(twins.tokens(0)) == 70 + 6


@pytest.mark.parametrize(("model_impl", "num_norms"), [("vllm", 0), ("transformers", 2 * (2 * 64 + 2 * 32) + 64)])
def test_both_count_the_weights_that_a_step_reads(
    make_twins: Callable[..., Twins], model_impl: str, num_norms: int
) -> None:
    """Not the embedding, of which a step reads a few rows. Modules are counted with their norms."""
    twins = make_twins({"model_type": "qwen3"}, model_impl=model_impl)
    qkv, output, gate_up, down, head = (128 + 2 * 64) * 64, 64 * 128, 2 * 96 * 64, 64 * 96, 300 * 64
    expected = 4 * (2 * (qkv + output + gate_up + down) + head + num_norms)
    assert (twins.cpu_runner.weight_bytes, twins.runner.weight_bytes) == (expected, expected)


def record_all(twins: Twins) -> None:
    while twins.runner.record_next():
        pass


def test_a_recorded_step_is_the_step(make_twins: Callable[..., Twins]) -> None:
    """What is recorded holds for other rows, lengths and blocks: it names no number of the step that it was made in."""
    twins = make_twins()
    twins.add(2, prompt(62, 1))
    twins.add(5, prompt(9, 2), temperature=0.7, seed=3)
    twins.step({2: 62, 5: 9}, decode=[])
    twins.step(decode=[2, 5])
    graphs = twins.runner.graphs
    graphs.want(GraphPart.HEAD, 2)
    graphs.want(GraphPart.HEAD, 4)
    record_all(twins)
    launched = graphs.num_launched
    for _ in range(3):  # over the border of a block
        twins.step()
    twins.add(0, prompt(30, 4), temperature=1.0, seed=4)
    twins.step({0: 30})
    twins.remove(5)
    twins.step(decode=[0, 2])
    twins.add(5, prompt(3, 5))
    twins.step({5: 3})
    twins.step(decode=[5, 0, 2])
    twins.step()
    assert graphs.num_launched == launched
    assert graphs.num_replays == 6 + 2, "six of decode rows alone, and two with prompts"


def test_a_size_that_is_missed_often_is_recorded_between_steps(make_twins: Callable[..., Twins]) -> None:
    twins = make_twins()
    twins.add(0, prompt(4))
    twins.step({0: 4}, decode=[])
    twins.step(decode=[0])
    for _ in range(MAX_MISSES):
        twins.step()
    assert (GraphPart.HEAD, 1) in twins.runner.graphs
    twins.step()
    twins.step()
    assert twins.runner.graphs.num_replays == 2


def test_sizes_are_recorded_the_smallest_and_the_largest_first(make_twins: Callable[..., Twins]) -> None:
    runner = make_twins(max_num_seqs=20).runner
    assert runner.graphs.sizes == (1, 2, 4, 8, 16, 20)
    order = []
    while (key := runner.graphs.next_wanted()) is not None:
        assert runner.record_next()
        order.append(key[1])
    assert order == [1, 20, 16, 8, 4, 2, *mixed.SIZES]


def test_a_size_that_cannot_be_recorded_is_launched(
    make_twins: Callable[..., Twins], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Every time, and the recording is tried once."""
    attempts = []

    def fail(self: HostDevice, launch: Callable[[], None]) -> None:
        attempts.append(1)
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(HostDevice, "capture", fail)
    twins = make_twins()
    twins.add(0, prompt(4))
    twins.step({0: 4}, decode=[])
    twins.step(decode=[0])
    for _ in range(2 * MAX_MISSES):
        twins.step()
    assert attempts == [1]
    assert "1 rows (head) cannot be recorded as a graph" in caplog.text
    assert "operation not permitted" in caplog.text
    record_all(twins)
    assert len(attempts) == len(twins.runner.graphs.sizes) + len(mixed.SIZES)
    assert not twins.runner.wants_to_record
    twins.step()
    assert twins.runner.statistics()["num_graphs_refused"] == len(attempts)


def test_a_size_that_cannot_be_launched_for_nobody_is_not_tried_again(
    make_twins: Callable[..., Twins], monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = make_twins().runner

    def fail(part: GraphPart, size: int) -> None:
        raise RuntimeError("out of resource")

    with monkeypatch.context() as patch:
        patch.setattr(runner.graphs, "_launch", fail)
        for _ in (*runner.graphs.sizes, *mixed.SIZES):
            with pytest.raises(RuntimeError, match="out of resource"):
                runner.record_next()
    assert not runner.record_next()


def test_nothing_is_recorded_with_enforce_eager(make_twins: Callable[..., Twins]) -> None:
    twins = make_twins(enforce_eager=True)
    twins.add(0, prompt(4))
    twins.step({0: 4}, decode=[])
    twins.step(decode=[0])
    assert not twins.runner.record_next()
    assert twins.runner.graphs.num_launched == 1


@pytest.mark.parametrize("is_recorded", [False, True])
def test_filters_are_those_of_the_cpu(make_twins: Callable[..., Twins], is_recorded: bool) -> None:
    twins = make_twins()
    parameters: list[dict[str, Any]] = [
        {"top_p": 0.6},
        {"top_k": 5},
        {"min_p": 0.2},
        {"top_k": 50, "top_p": 0.8},
        {"temperature": 0.0, "top_k": 3},
        {},
    ]
    for slot, how in enumerate(parameters):
        twins.add(slot, prompt(5 + slot, slot), **({"temperature": 1.5, "seed": 11 + slot} | how))
    twins.step({slot: 5 + slot for slot in range(6)}, decode=[])
    if is_recorded:
        twins.runner.graphs.want(GraphPart.LOGITS, 8)
        record_all(twins)
    twins.step(decode=range(6))
    for _ in range(6):
        twins.step()
    assert (twins.runner.graphs.num_replays > 0) == is_recorded


@pytest.mark.parametrize("is_recorded", [False, True])
def test_rules_are_those_of_the_cpu(make_twins: Callable[..., Twins], is_recorded: bool) -> None:
    """Penalties that remember, biases, allowed ids, bad words of one and several tokens, min_tokens: beside free rows."""
    twins = make_twins()
    twins.add(0, prompt(6, 1), temperature=1.0, seed=1)
    twins.step({0: 6}, decode=[], **rules_of(0, repetition_penalty=1.8, presence_penalty=0.5, frequency_penalty=0.7))
    twins.add(1, prompt(7, 2))
    likely = twins.step({1: 7}, decode=[0]).tokens.tolist()[1]
    twins.remove(1)
    twins.add(1, prompt(7, 2), stop_ids=[5, 6], min_tokens=4)
    rules = {"bias_ids": (likely, 9), "biases": (-2.0, 3.5), "bad_words": ((likely,), (9, 11)), "num_logprobs": 3}
    twins.step({1: 7}, **rules_of(1, repetition_penalty=1.3, **rules))
    twins.add(2, prompt(8, 3), temperature=0.9, seed=5)
    twins.step({2: 8}, decode=[1, 0], **rules_of(2, allowed_ids=tuple(range(40, 60))))
    twins.add(3, prompt(3, 4), temperature=0.9, seed=6)
    twins.step({3: 3}, **rules_of(3, allowed_ids=tuple(range(200)), num_logprobs=2))
    if is_recorded:
        for part in (GraphPart.FORWARD, GraphPart.CHOICE):
            twins.runner.graphs.want(part, 4)
        record_all(twins)
    twins.step(decode=[3, 1, 0, 2])
    for _ in range(5):
        twins.step()
    assert (twins.runner.graphs.num_replays > 0) == is_recorded


def test_more_edits_than_a_graph_has_room_for(
    make_twins: Callable[..., Twins], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("actorllm.model.cuda.sampling.MAX_EDITS", 4)
    twins = make_twins()
    twins.add(0, prompt(40, 1), temperature=1.0, seed=1)
    twins.step({0: 40}, decode=[], **rules_of(0, repetition_penalty=1.8))
    twins.step(decode=[0])
    twins.step()
    assert not twins.runner.graphs._misses.get((GraphPart.CHOICE, 1))


def test_logprobs_are_those_of_the_cpu(make_twins: Callable[..., Twins]) -> None:
    """Of sampled tokens and of prompts, few and many, of given ids, with and without rules."""
    twins = make_twins()
    twins.add(0, prompt(80, 1))
    twins.step({0: 70}, decode=[], **rules_of(0, num_logprobs=3, num_prompt_logprobs=2))
    twins.add(1, prompt(4, 2), temperature=0.8, seed=1)
    twins.step({0: 10, 1: 4}, **rules_of(1, num_logprobs=40, num_prompt_logprobs=0, bias_ids=(7,), biases=(4.0,)))
    twins.add(2, prompt(5, 3))
    twins.step({2: 5}, decode=[1, 0], **rules_of(2, num_logprobs=2, logprob_ids=(250, 3)))
    twins.step(decode=[2, 1, 0])
    twins.step()


@pytest.mark.parametrize("mode", ["raw_logits", "processed_logprobs", "processed_logits"])
def test_modes_of_logprobs_are_those_of_the_cpu(make_twins: Callable[..., Twins], mode: str) -> None:
    """Of filtered rows, greedy ones, those with edits, and one with a mask of a grammar."""
    twins = make_twins(logprobs_mode=mode)
    words = np.zeros((1, -(-300 // 32)), np.uint32)
    words[0, 4] = 0b1011

    def late(step: int) -> LateInputs:
        return LateInputs(step=step, slots=int32([3]), allowed=words.reshape(-1))

    twins.add(0, prompt(9, 1))
    twins.step({0: 9}, decode=[], **rules_of(0, num_logprobs=3, num_prompt_logprobs=2))
    twins.add(1, prompt(4, 2), temperature=0.8, top_k=7, top_p=0.9, seed=1)
    twins.step({1: 4}, decode=[0], **rules_of(1, num_logprobs=20))
    twins.add(2, prompt(5, 3), temperature=0.6, min_p=0.4, seed=2)
    twins.step({2: 5}, decode=[1, 0], **rules_of(2, num_logprobs=4, bias_ids=(7,), biases=(4.0,)))
    twins.add(3, prompt(6, 4), temperature=0.9, seed=3)
    rules = rules_of(3, num_logprobs=2, logprob_ids=(128, 250))
    twins.step({3: 6}, decode=[2, 1, 0], late=late, late_slots=int32([3]), **rules)
    twins.step(decode=[3, 2, 1, 0], late=late, late_slots=int32([3]))
    for part in (GraphPart.FORWARD, GraphPart.CHOICE):
        twins.runner.graphs.want(part, 4)
    record_all(twins)
    twins.step(late=late, late_slots=int32([3]))
    twins.remove(0)
    twins.step(decode=[2, 1])
    assert twins.runner.graphs.num_replays


def test_late_inputs_come_between_forward_and_sampling(make_twins: Callable[..., Twins]) -> None:
    twins = make_twins()
    words = np.zeros((1, -(-300 // 32)), np.uint32)
    words[0, 4] = 0b1011

    def late(step: int) -> LateInputs:
        return LateInputs(step=step, slots=int32([1]), allowed=words.reshape(-1))

    twins.add(0, prompt(6, 1), temperature=0.8, seed=1)
    twins.add(1, prompt(7, 2), temperature=0.9, seed=2)
    twins.step({0: 6, 1: 7}, decode=[], late=late, late_slots=int32([1]))
    for _ in range(3):
        result = twins.step(decode=[0, 1], late=late, late_slots=int32([1]))
        assert result.tokens[1] in (128, 129, 131)
    twins.runner.graphs.want(GraphPart.CHOICE, 2)
    twins.runner.graphs.want(GraphPart.FORWARD, 2)
    record_all(twins)
    assert twins.step(late=late, late_slots=int32([1])).tokens[1] in (128, 129, 131)
    twins.step()


def test_rows_with_nothing_to_choose_end_alone(make_twins: Callable[..., Twins]) -> None:
    twins = make_twins()
    twins.add(0, prompt(6, 1))
    twins.add(1, prompt(7, 2))
    everything = tuple((i,) for i in range(300))
    result = twins.step({0: 6, 1: 7}, decode=[], **rules_of(1, bad_words=everything))
    assert result.nonfinite_rows.tolist() == [1]
    assert result.nonfinite_counts.tolist() == [0]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_harms_no_one_else_and_is_cleared(make_twins: Callable[..., Twins], value: float) -> None:
    """Also where the next step has been launched before anybody knew."""
    twins = make_twins()
    for slot in range(3):
        twins.add(slot, prompt(70, slot))
    twins.step({0: 70, 1: 70, 2: 70}, decode=[])
    twins.step(decode=[0, 1, 2])
    runner, driver = twins.runner, twins.device
    pool = runner._pool.pool
    with torch.inference_mode():
        pool[:, driver.requests[1].blocks[0]] = value
    first = runner.execute(driver.plan({}, None))
    second = runner.execute(driver.plan({}, None))
    results = [runner.finish(handle) for handle in (first, second)]
    for result in results:
        assert result.nonfinite_rows.tolist() == [1]
        assert result.nonfinite_counts.tolist() == [1]
    assert torch.isfinite(pool[:, driver.requests[1].blocks[1]]).all()
    expected = [twins.cpu.step() for _ in results]
    for result, theirs in zip(results, expected, strict=True):
        assert result.tokens[[0, 2]].tolist() == theirs.tokens[[0, 2]].tolist()


def test_a_prompt_whose_states_are_not_finite_is_void_to_its_end(make_twins: Callable[..., Twins]) -> None:
    twins = make_twins()
    with torch.inference_mode():
        twins.runner.model.embedding[7] = float("nan")
    tokens = prompt(70, 3)
    tokens[5] = 7
    driver, runner = twins.device, twins.runner
    driver.add(0, tokens)
    driver.add(1, [3, 4, 5])
    result = driver.step({0: 64, 1: 3}, decode=[])
    assert result.nonfinite_prefills.tolist() == [0]
    assert torch.isfinite(runner._pool.pool).all()
    result = driver.step({0: 6}, decode=[1])
    assert result.nonfinite_rows.tolist() == [1]
    driver.remove(0)
    driver.add(0, [8, 9])
    assert driver.step({0: 2}).nonfinite_rows.size == 0


def test_forks_share_a_prompt_and_go_their_own_ways(make_twins: Callable[..., Twins]) -> None:
    twins = make_twins()
    twins.add(0, prompt(70, 1), temperature=1.2, seed=1)
    copies = [
        [driver.fork(slot, 0, temperature=1.2, seed=1, sample_index=slot) for slot in (1, 2)]
        for driver in (twins.cpu, twins.device)
    ]
    twins.step({0: 70}, decode=[])
    for driver, pairs in zip((twins.cpu, twins.device), copies, strict=True):
        sources, targets = zip(*pairs, strict=True)
        driver.pending["more"] = {"copy_sources": int32(sources), "copy_targets": int32(targets)}
    expected = twins.cpu.step(decode=[0, 1, 2], **twins.cpu.pending.pop("more"))
    result = twins.device.step(decode=[0, 1, 2], **twins.device.pending.pop("more"))
    assert result.tokens.tolist() == expected.tokens.tolist()
    twins.step()
    assert len(set(result.tokens.tolist())) > 1


@pytest.mark.parametrize("kind", ["last", "mean", "cls"])
def test_pooled_rows_have_vectors(make_twins: Callable[..., Twins], kind: str) -> None:
    twins = make_twins()
    twins.add(0, prompt(6, 1), pooling=POOLING_CODES[kind])
    twins.add(1, prompt(7, 2), temperature=1.0, seed=3)
    twins.step({0: 4}, decode=[])
    result = twins.step({0: 2, 1: 7}, decode=[])
    assert result.vector_rows.tolist() == [0]
    assert result.vectors.size == 64


def test_the_runner_finds_out_whether_it_can_do_anything(make_twins: Callable[..., Twins]) -> None:
    twins = make_twins()
    twins.add(0, prompt(6, 1))
    twins.step({0: 6}, decode=[])
    runner = twins.device.runner
    runner.check_itself()
    twins.step(decode=[0])  # it has disturbed nobody
    broken: Any = runner.model
    with torch.inference_mode():
        broken.lm_head.weight.fill_(torch.nan)
    with pytest.raises(EngineError, match="not finite, whatever the tokens"):
        runner.check_itself()


@pytest.mark.parametrize("call", ["execute", "check_itself", "record_next"])
@pytest.mark.parametrize("is_lost", [False, True])
def test_a_launch_that_fails_is_the_devices_fault_if_nothing_else_works_either(
    make_twins: Callable[..., Twins], monkeypatch: pytest.MonkeyPatch, call: str, is_lost: bool
) -> None:
    """Triton's errors say the same of a launch that is not possible and of a GPU that is gone."""
    twins = make_twins()
    twins.add(0, prompt(6, 1))
    twins.step({0: 6}, decode=[])
    runner = twins.runner
    if call == "record_next":
        runner.record_next()  # of a step that was launched already, which is not launched again

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered")

    monkeypatch.setattr("actorllm.model.cuda.ops.embed", fail)
    monkeypatch.setattr(HostDevice, "is_lost", is_lost)
    with pytest.raises(RuntimeError, match="an illegal memory access"):
        runner.execute(twins.device.plan({}, [0])) if call == "execute" else getattr(runner, call)()
    assert runner.is_torn == is_lost


def test_prefix_hits_read_the_blocks_of_others(make_twins: Callable[..., Twins]) -> None:
    twins = make_twins()
    tokens = prompt(70, 1)
    twins.add(0, tokens)
    twins.step({0: 70}, decode=[])
    twins.add(1, tokens, num_computed=64)
    for driver, count in ((twins.cpu, 4), (twins.device, 1)):
        columns, request = driver.pending["new"][-1], driver.requests[1]
        request.blocks[:count] = driver.requests[0].blocks[:count]
        columns[3][:count] = request.blocks[:count]
    twins.step({1: 6}, decode=[0])
    twins.step(decode=[0, 1])
    assert twins.tokens(1)[70:72] == twins.tokens(0)[70:72]


def test_blocks_are_copied_and_zeroed(make_runner: Callable[..., CudaRunner], folder: Callable[..., Path]) -> None:
    runner = make_runner(folder())
    pool = runner._pool.pool
    with torch.inference_mode():
        pool.normal_()
    before = pool.clone()
    runner.step(StepPlan(step=1, copy_sources=int32([1, 2]), copy_targets=int32([3, 4]), zero_blocks=int32([5])))
    assert torch.equal(pool[:, [3, 4]], before[:, [1, 2]])
    assert pool[:, 5].abs().amax() == 0
    runner.step(StepPlan(step=2, copy_sources=int32([1, 2]), copy_targets=int32([2, 1])))
    assert torch.equal(pool[:, [2, 1]], before[:, [1, 2]])


def test_a_step_is_launched_before_the_tokens_of_the_last_one_are_looked_at(make_twins: Callable[..., Twins]) -> None:
    """Depth 2, with a request that ends and one that takes its slot while results are under way."""
    twins = make_twins()
    twins.add(0, prompt(6, 1), temperature=1.0, seed=1)
    twins.add(1, prompt(9, 2))
    twins.step({0: 6, 1: 9}, decode=[], **rules_of(0, repetition_penalty=1.5))
    expected = [twins.cpu.step(decode=[0, 1]) for _ in range(2)]
    runner, driver = twins.runner, twins.device
    first = runner.execute(driver.plan({}, [0, 1]))
    assert first.waits_for  # the penalty needs the token before; here it is known
    runner.choose(first)
    second = runner.execute(driver.plan({}, None))
    results = [runner.finish(first)]
    runner.choose(second)
    results.append(runner.finish(second))
    assert [r.tokens.tolist() for r in results] == [r.tokens.tolist() for r in expected]
    for d in (twins.cpu, driver):
        d.remove(0)
        d.add(0, prompt(5, 3), temperature=1.0, seed=2)
    plan = driver.plan({0: 5}, [1])
    handle, third = runner.execute(plan), None
    third = runner.execute(driver.plan({}, [1, 0]))
    theirs = [twins.cpu.step({0: 5}, decode=[1]), twins.cpu.step(decode=[1, 0])]
    assert [runner.finish(h).tokens.tolist() for h in (handle, third)] == [r.tokens.tolist() for r in theirs]


def test_another_scheduler_finds_nothing_of_the_one_before(make_twins: Callable[..., Twins]) -> None:
    twins = make_twins()
    twins.add(0, prompt(6, 1))
    twins.step({0: 6}, decode=[])
    twins.step(decode=[0])
    for runner in (twins.cpu_runner, twins.runner):
        runner.forget_requests()
    fresh = Twins(twins.cpu_runner, twins.runner)
    fresh.add(0, prompt(8, 2))
    fresh.step({0: 8}, decode=[])
    fresh.step(decode=[0])


def test_wide_batches_and_products_of_torch_give_the_same(
    make_twins: Callable[..., Twins], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As above 32 rows, where norms and activations are launches of their own, and above 64, where logits are written."""
    monkeypatch.setattr("actorllm.model.cuda.linear.is_skinny", lambda *_: False)
    monkeypatch.setattr("actorllm.model.cuda.runner.MAX_HEAD_ROWS", 2)
    twins = make_twins({"architectures": ["Qwen2ForCausalLM"], "tie_word_embeddings": True})
    for slot in range(4):
        twins.add(slot, prompt(5 + slot, slot), temperature=float(slot), seed=slot)
    twins.step({slot: 5 + slot for slot in range(4)}, decode=[])
    twins.runner.graphs.want(GraphPart.LOGITS, 4)
    record_all(twins)
    twins.step(decode=range(4))
    twins.step()


@pytest.mark.parametrize(("max_logprobs", "num_rows"), [(0, 0), (1, 64), (32, 64), (33, 5 * 64), (-1, 5 * 64)])
def test_the_cache_is_sized_by_what_the_largest_steps_leave(
    folder: Callable[..., Path], make_runner: Callable[..., CudaRunner], max_logprobs: int, num_rows: int
) -> None:
    """Those with log-probabilities included: of 64 tokens of prompts at a time, many of which are sorted."""
    arguments = {"max_num_batched_tokens": 64, "gpu_memory_utilization": 0.5, "max_logprobs": max_logprobs}
    runner = make_runner(folder(vocab_size=60_000), **arguments)
    block = 2 * 2 * 2 * 64 * 32 * 4
    assert runner.block_bytes == block
    room = (1 << 29) - GRAPH_BYTES - num_rows * 60_000 * 4 + _profiled_bytes(runner)
    assert runner.profile_num_blocks() == room // block


def _profiled_bytes(runner: CudaRunner) -> int:
    """A device of the host measures nothing, so the cache of the profile counts as if it had not been there."""
    num_blocks, _ = runner._largest_steps()
    return num_blocks * runner.block_bytes


def test_a_runner_that_is_closed_holds_nothing(
    make_runner: Callable[..., CudaRunner], folder: Callable[..., Path]
) -> None:
    """Weights, cache and graphs go at once, though the name is still bound and nobody collects garbage."""
    runner = make_runner(folder())
    assert runner.record_next()
    held: list[Any] = [runner.model, runner._pool, runner.sampler, runner.state, runner._decode_rows, runner._attention]
    held += [runner.graphs, runner.model.embedding, runner._pool.pool]
    gone = [weakref.ref(one) for one in held]
    gc.collect()
    gc.disable()
    try:
        held.clear()
        runner.close()
        assert [one() for one in gone] == [None] * len(gone)
        runner.close()
    finally:
        gc.enable()


def test_a_cache_that_is_larger_than_what_is_free_is_refused(
    folder: Callable[..., Path], make_runner: Callable[..., CudaRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HostDevice, "foreign_bytes", lambda _: 1000)
    monkeypatch.setattr(HostDevice, "held_bytes", lambda _: 24)
    free = (1 << 30) - 1024
    assert make_runner(folder(), kv_cache_memory_bytes=free).profile_num_blocks() == free // 65536
    message = (
        "kv_cache_memory_bytes=1073741824 is more than the 1073740800 bytes that are free: of the GPU's 1073741824, other "
        "processes and the driver hold 1000 and the weights 24"
    )
    with pytest.raises(ConfigError, match=message):
        make_runner(folder(), kv_cache_memory_bytes=1 << 30).profile_num_blocks()
