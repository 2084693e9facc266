"""One of two ranks, as a program: its runner on the host's tensors must answer what the CPU's answers with one rank.

python -m tests.model.cuda.rank FOLDER RENDEZVOUS RANK
    [adapters | drafts | experts | whole-experts | quantized OPTIONS | by-kind OPTIONS]

OPTIONS: arguments of an engine, as JSON.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from actorllm.errors import EngineError
from actorllm.messages import LateInputs, StepPlan, StepResult
from actorllm.model.cpu import runner as cpu_runner
from actorllm.model.cpu.runner import CpuRunner
from actorllm.model.cuda.device import HostDevice, Replay
from actorllm.model.cuda.graphs import MAX_MISSES, GraphPart
from actorllm.model.cuda.linear import DeviceDense
from actorllm.model.cuda.prompt_products import TWO_KINDS
from actorllm.model.cuda.quantized import DeviceQuantized
from actorllm.model.cuda.runner import CudaRunner
from actorllm.model.quantization import form_of
from actorllm.types.quantization import INT8
from tests.api.knowing_drafter import STREAMS
from tests.model.cuda.adapted import LORA, fill, follow_adapters
from tests.model.cuda.conftest import config_of
from tests.model.cuda.dequantized import DequantizedByRank, follow, follow_kinds, rounds_prompts
from tests.model.cuda.mixtures import follow as follow_experts
from tests.model.cuda.rules import rules_of
from tests.model.cuda.twins import DeviceDriver, Twins, prompt
from tests.model.driver import Driver, int32


class RankTwins(Twins):
    """Log-probabilities come from the first rank."""

    def step(self, *args: Any, **more: Any) -> StepResult:
        if self.runner.rank == 0:
            return super().step(*args, **more)
        expected, result = self.cpu.step(*args, **more), self.device.step(*args, **more)
        assert result.tokens.tolist() == expected.tokens.tolist()
        assert result.nonfinite_rows.tolist() == expected.nonfinite_rows.tolist()
        assert result.nonfinite_prefills.tolist() == expected.nonfinite_prefills.tolist()
        return result


def main(folder: Path, rendezvous: str, rank: int, what: str = "", given: str = "{}") -> None:
    torch.set_num_threads(1)
    options: dict[str, Any] = LORA if what == "adapters" else {"enable_expert_parallel": what == "whole-experts"}
    options |= json.loads(given)
    config = config_of(folder, block_size=64, **options)
    if what == "drafts":
        draft(folder, rendezvous, rank)
        print("done")
        return
    runner = CudaRunner(
        dataclasses.replace(config, world_size=2, rendezvous=rendezvous),
        rank,
        show_progress=False,
        device=HostDevice(),
    )
    runner.load()
    assert runner.profile_num_blocks() > 0
    runner.allocate(24)
    if what in ("quantized", "by-kind"):
        vars(cpu_runner)["form_of"] = lambda model: DequantizedByRank(form_of(model, keeps_floats=True), 2)
    if what == "by-kind":
        is_integer = config.model.quantization == INT8
        rounds_prompts(cpu_runner, torch.int8 if is_integer else torch.uint8, num_ranks=2)
    cpu = CpuRunner(config_of(folder, block_size=16, **options), show_progress=False)
    cpu.load()
    cpu.allocate(96)
    twins = RankTwins(cpu, runner)
    if what:
        if what == "adapters":
            fill(twins, folder / str(rank), **json.loads((folder / "config.json").read_text()))
            follow_adapters(twins)
        elif what == "quantized":
            model: Any = runner.model
            layers = [part for layer in model.layers for part in layer.linears]
            assert {type(part) for part in (*layers, model.lm_head)} <= {DeviceQuantized, DeviceDense}
            assert sum(isinstance(part, DeviceQuantized) for part in layers) == len(layers)
            follow(twins)
        elif what == "by-kind":
            assert runner.scheme == TWO_KINDS
            follow(twins)
            follow_kinds(twins)
        else:
            follow_experts(twins)
        runner.close()
        print("done")
        return
    refused_by_one(runner)
    decode(twins)
    rules(twins)
    masks(twins)
    launched_ahead(twins)
    spoilt(runner)
    runner.close()
    print("done")


def draft(folder: Path, rendezvous: str, rank: int) -> None:
    """Streams of a runner alone, without drafts; only the first of two ranks knows them."""
    prompts = {0: prompt(70, 1), 1: prompt(5, 2), 3: prompt(61, 3)}
    sampling: dict[int, dict[str, Any]] = {
        0: {},
        1: {"temperature": 0.9, "seed": 5},
        3: {"temperature": 1.1, "seed": 7, "top_k": 30},
    }
    penalties = {"repetition_penalty": 1.3, "frequency_penalty": 0.4}

    def streams(driver: Any, most: int) -> dict[int, list[int]]:
        for slot, tokens in prompts.items():
            driver.add(slot, tokens, **sampling[slot])
            more = rules_of(slot, **penalties) if slot == 1 else {}
            driver.step({slot: len(tokens)}, decode=[s for s in prompts if s < slot], max_drafts=most, **more)
        decode: list[int] | None = list(prompts)
        while min(len(driver.requests[slot].tokens) - len(tokens) for slot, tokens in prompts.items()) < 24:
            driver.step(decode=decode, max_drafts=most)
            decode = None
        return {slot: driver.requests[slot].tokens[len(tokens) :] for slot, tokens in prompts.items()}

    cpu = CpuRunner(config_of(folder, block_size=16), show_progress=False)
    cpu.load()
    cpu.allocate(96)
    alone = Driver(cpu, num_blocks=96)
    expected = streams(alone, 0)
    known = [[tokens, expected[slot]] for slot, tokens in prompts.items()] if rank == 0 else []
    path = folder / f"streams-{rank}.json"
    path.write_text(json.dumps(known))
    os.environ[STREAMS] = str(path)
    drafts = {"method": "tests.api.knowing_drafter:KnowingDrafter", "num_speculative_tokens": 5}
    config = config_of(folder, block_size=64, speculative_config=drafts)
    runner = CudaRunner(
        dataclasses.replace(config, world_size=2, rendezvous=rendezvous),
        rank,
        show_progress=False,
        device=HostDevice(),
    )
    runner.load()
    runner.allocate(24)
    driver = DeviceDriver(runner, num_blocks=24)  # type: ignore[arg-type]
    found = streams(driver, 5)
    assert {slot: tokens[:24] for slot, tokens in found.items()} == {s: tokens[:24] for s, tokens in expected.items()}
    assert driver.num_steps < alone.num_steps - 5
    runner.close()


def refused_by_one(runner: CudaRunner) -> None:
    """What one rank cannot record is no graph of the other one either."""

    def fail(launch: Callable[[], None]) -> Replay:
        raise RuntimeError("operation not permitted when stream is capturing")

    runner.graphs.want(GraphPart.FORWARD, 8)
    if runner.rank == 1:
        runner.device.capture = fail  # type: ignore[method-assign]
    assert runner.record_next()
    vars(runner.device).pop("capture", None)
    assert (GraphPart.FORWARD, 8) not in runner.graphs
    assert runner.statistics()["num_graphs_refused"] == 1


def decode(twins: Twins) -> None:
    """Prompts in chunks, greedy and seeded, a prefix that is there already; from graphs, which are there from the start."""
    graphs = twins.runner.graphs
    assert not twins.runner.wants_to_record
    assert all((GraphPart.LOGITS, size) in graphs for size in graphs.sizes)
    twins.add(0, prompt(70, 1))
    twins.add(3, prompt(5, 2), temperature=0.8, seed=2**63 + 5)
    twins.step({0: 60, 3: 5}, decode=[])
    twins.step({0: 10}, decode=[3])
    same = prompt(70, 1)[:64] + prompt(6, 9)
    twins.add(1, same, temperature=1.2, seed=7, top_p=0.9, num_computed=64)
    for driver, count in ((twins.cpu, 4), (twins.device, 1)):
        columns, request = driver.pending["new"][-1], driver.requests[1]
        request.blocks[:count] = driver.requests[0].blocks[:count]
        columns[3][:count] = request.blocks[:count]
    twins.step({1: 6}, decode=[3, 0])
    launched = graphs.num_launched
    twins.step(decode=[3, 0, 1])
    for _ in range(3):
        twins.step()
    assert (graphs.num_launched, graphs.num_replays) == (launched, 4)
    twins.remove(0, 1, 3)


def rules(twins: Twins) -> None:
    """Sampled on the first rank, remembered on both; recorded by both after as many steps."""
    twins.add(2, prompt(6, 1), temperature=1.0, seed=1)
    wanted = {"repetition_penalty": 1.8, "presence_penalty": 0.5, "bias_ids": (9,), "biases": (3.5,), "num_logprobs": 3}
    twins.step({2: 6}, decode=[], **rules_of(2, num_prompt_logprobs=2, **wanted))
    twins.step(decode=[2])
    for _ in range(MAX_MISSES + 2):
        twins.step()
    graphs = twins.runner.graphs
    assert (GraphPart.FORWARD, 1) in graphs
    assert (GraphPart.CHOICE, 1) in graphs
    twins.remove(2)


def masks(twins: Twins) -> None:
    words = np.zeros((1, -(-300 // 32)), np.uint32)
    words[0, 4] = 0b1011

    def late(step: int) -> LateInputs:
        return LateInputs(step=step, slots=int32([1]), allowed=words.reshape(-1))

    twins.add(1, prompt(7, 2), temperature=0.9, seed=2)
    twins.step({1: 7}, decode=[], late=late, late_slots=int32([1]))
    result = twins.step(decode=[1], late=late, late_slots=int32([1]))
    assert result.tokens[0] in (128, 129, 131)
    twins.remove(1)


def launched_ahead(twins: Twins) -> None:
    """The next step's inputs are on every device before any host knows them."""
    twins.add(0, prompt(6, 1), temperature=1.0, seed=1)
    twins.add(5, prompt(9, 2))
    twins.step({0: 6, 5: 9}, decode=[])
    runner, driver = twins.runner, twins.device
    handles = [runner.execute(driver.plan({}, [5, 0])), runner.execute(driver.plan({}, None))]
    results = [runner.finish(handle).tokens.tolist() for handle in handles]
    assert results == [twins.cpu.step(decode=[5, 0]).tokens.tolist(), twins.cpu.step().tokens.tolist()]


def spoilt(runner: CudaRunner) -> None:
    """Each rank finds out about itself, with nobody else; and one that fails in a step is not to go on."""
    runner.check_itself()
    if runner.rank == 1:
        with torch.inference_mode():
            runner.model.norm.fill_(float("nan"))  # type: ignore[attr-defined]
        try:
            runner.check_itself()
        except EngineError:
            pass
        else:
            raise AssertionError("weights that are not finite were not noticed")
        assert not runner.is_torn
        try:
            runner.execute(StepPlan(step=99, decode_slots=int32([7])))
        except Exception:
            assert runner.is_torn
        else:
            raise AssertionError("a slot without a request was decoded")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), *sys.argv[4:])
