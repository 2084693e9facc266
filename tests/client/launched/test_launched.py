"""Ranks that torchrun has started: rank 0 schedules, every rank returns the same, and what does not fit is refused by name."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from actorllm import LLM, AsyncLLM, SamplingParams
from actorllm.client.launched.launched_engine import LaunchedEngine
from actorllm.client.launched.outcome import outcome_of, taken
from actorllm.config import EngineConfig
from actorllm.errors import ConfigError, EngineDeadError, EngineError, EngineOverloaded, InvalidParameterError
from actorllm.messages import LateInputs
from actorllm.model.launched.launched_runners import LeadingRunner
from actorllm.model.launched.plan_channel import PlanChannel, Told
from actorllm.model.parallel import Ranks
from actorllm.types.outputs import CompletionOutput, RequestOutput
from actorllm.types.weight_version import WeightVersionSpan
from tests.model.ranks import arguments, model_folder

PROGRAM = Path(__file__).with_name("program.py")


def environment(rank: int, port: int, size: int = 2) -> dict[str, str]:
    """As torchrun sets it."""
    told = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_PORT": port}
    path = {"PYTHONPATH": os.pathsep.join(sys.path), "MASTER_ADDR": "127.0.0.1"}
    return os.environ | {name: str(value) for name, value in told.items()} | path


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def ranks(tmp_path: Path, port: int) -> list[subprocess.Popen[bytes]]:
    return [
        subprocess.Popen(
            [sys.executable, str(PROGRAM), str(tmp_path / f"{rank}.json")],
            env=environment(rank, port),
            stdout=subprocess.PIPE,
        )
        for rank in range(2)
    ]


@pytest.mark.timeout(150)
def test_every_rank_returns_the_same_as_one_process(tmp_path: Path) -> None:
    started = ranks(tmp_path, free_port())
    alone = subprocess.run([sys.executable, str(PROGRAM), str(tmp_path / "alone.json"), "alone"], env=environment(0, 1))
    assert alone.returncode == 0
    assert [one.communicate() and one.returncode for one in started] == [0, 0]
    first, second, expected = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("0", "1", "alone"))
    assert first == second
    assert first[0] == expected[0]
    assert "generate(), chat() and encode() alone" in first[1]


@pytest.mark.timeout(150)
@pytest.mark.slow(reason="a quarter of a minute until all ranks have started; torchrun itself ends the others as well")
@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_is_killed_ends_the_others(tmp_path: Path, victim: int) -> None:
    started = ranks(tmp_path, free_port())
    for one in started:
        assert one.stdout is not None
        assert one.stdout.readline() == b"begun\n"
    os.kill(started[victim].pid, signal.SIGKILL)
    ends = [one.communicate() and one.returncode for one in started]
    assert ends[victim] == -signal.SIGKILL
    assert ends[1 - victim] not in (0, -signal.SIGKILL)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"tensor_parallel_size": 1}, "tensor_parallel_size=1, and the launcher has started WORLD_SIZE=2 ranks"),
        ({"pipeline_parallel_size": 2}, "is not supported with pipeline_parallel_size=2 yet"),
        ({"data_parallel_size": 2}, "is not supported with data_parallel_size=2 yet"),
        ({"max_replicas": 2}, "is not supported with max_replicas=2 yet"),
        ({"device": "cuda"}, "is not supported with device='cuda' yet"),
        ({"enable_lora": True}, "is not supported with enable_lora=True yet"),
        ({"enable_sleep_mode": True}, "is not supported with enable_sleep_mode=True yet"),
        ({"distributed_executor_backend": "threads"}, "distributed_executor_backend='threads' is not supported"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], told: str
) -> None:
    for name, value in environment(1, 29_500).items():
        monkeypatch.setenv(name, value)
    arguments = {"tensor_parallel_size": 2, "distributed_executor_backend": "external_launcher"} | given
    with pytest.raises(ConfigError, match=told):
        EngineConfig.from_arguments("storyteller", **arguments)


def test_an_engine_of_an_event_loop_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environment(0, 29_500).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="is for LLM, whose calls every rank makes"):
        AsyncLLM("storyteller", tensor_parallel_size=2, distributed_executor_backend="external_launcher")


def test_without_a_launcher_the_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(ConfigError, match=r"RANK='' in the environment is no number; start the program with torchrun"):
        EngineConfig.from_arguments(
            "storyteller", tensor_parallel_size=2, distributed_executor_backend="external_launcher"
        )


def test_outcomes_travel_as_they_are() -> None:
    output = RequestOutput.__new__(RequestOutput)
    one = CompletionOutput.__new__(CompletionOutput)
    for kind, made in ((RequestOutput, output), (CompletionOutput, one)):
        for field in dataclasses.fields(kind):
            object.__setattr__(made, field.name, None)
    object.__setattr__(one, "token_ids", (1, 2, 3))
    object.__setattr__(one, "logprobs", [{5: -math.inf, 6: -0.5}])
    object.__setattr__(one, "weight_versions", [WeightVersionSpan(0, 3, "0")])
    object.__setattr__(output, "outputs", [one])
    vector = torch.arange(5, dtype=torch.float32)
    body, value, error = outcome_of(lambda: [output, {"array": np.array([[1, 2]], np.int64), 7: vector}])
    assert error is None
    found, rest = taken(body)
    assert found.outputs[0].token_ids == (1, 2, 3)
    assert found.outputs[0].logprobs == [{5: -math.inf, 6: -0.5}]
    assert found.outputs[0].weight_versions[0].end == 3
    assert rest["array"].tolist() == [[1, 2]]
    assert torch.equal(rest[7], vector)
    assert value[0] is output


def test_vectors_travel(tmp_path: Path) -> None:
    with LLM(model_folder(tmp_path), **arguments(runner="pooling", topology="inline")) as llm:
        made = llm.encode([{"prompt_token_ids": [1, 2, 3]}], use_tqdm=False)
    body, _, _ = outcome_of(lambda: made)
    assert taken(body) == made
    assert made[0].outputs.array.size > 1


def test_an_exception_is_raised_on_every_rank() -> None:
    def fail() -> None:
        raise InvalidParameterError("max_tokens=0 must be positive")

    body, value, error = outcome_of(fail)
    assert value is None
    assert isinstance(error, InvalidParameterError)
    with pytest.raises(InvalidParameterError, match="max_tokens=0 must be positive"):
        taken(body)


def test_attributes_of_an_exception_travel_with_it() -> None:
    def fail() -> None:
        raise EngineOverloaded("3 requests wait\ud800", num_waiting_requests=3)

    body, _, _ = outcome_of(fail)
    with pytest.raises(EngineOverloaded, match=r"3 requests wait\\ud800") as caught:
        taken(body)
    assert caught.value.num_waiting_requests == 3
    assert caught.value.max_waiting_tokens is None


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (KeyboardInterrupt(), "KeyboardInterrupt"),
        ({1, 2}, "does not travel between ranks"),
        (EngineConfig, "does not travel between ranks"),
    ],
)
def test_every_call_has_an_outcome(value: Any, told: str) -> None:
    """The other ranks wait for it, and would take that of the next call for it."""

    def call() -> Any:
        if isinstance(value, BaseException):
            raise value
        return value

    body, _, error = outcome_of(call)
    assert error is not None
    with pytest.raises(EngineError, match=told):
        taken(body)


def test_one_rank_computes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environment(0, 29_500, 1).items():
        monkeypatch.setenv(name, value)
    engine = {"dtype": "float32", "num_threads": 1, "max_model_len": 128}
    with LLM("storyteller", distributed_executor_backend="external_launcher", **engine) as llm:
        (output,) = llm.generate("Once", SamplingParams(max_tokens=8, seed=1), use_tqdm=False)
        with pytest.raises(EngineError, match="weights are not updated on ranks that a launcher has started"):
            llm.update_weights_from_disk(llm.config.model.path)
    assert len(output.outputs[0].token_ids) == 8


def test_a_rank_that_leaves_a_call_leaves_for_good() -> None:
    """Its program may catch the exception. The others would wait for it until then."""

    class Follower:
        is_open = True

        def follow(self) -> bytes:
            assert self.is_open
            raise MemoryError

        def close(self) -> None:
            self.is_open = False

    engine, follower = LaunchedEngine.__new__(LaunchedEngine), Follower()
    vars(engine).update(rank=1, _follower=follower, _is_in_call=False, _has_left=False)
    with pytest.raises(MemoryError):
        engine.run(list)
    assert not follower.is_open
    with pytest.raises(EngineDeadError, match="rank 1 has left a call before it ended"):
        engine.run(list)


@pytest.mark.parametrize("half", ["sample", "choose"])
def test_every_rank_hears_of_late_inputs(monkeypatch: pytest.MonkeyPatch, half: str) -> None:
    """Backends that launch steps ahead choose tokens by a method of their own."""
    told: list[int] = []
    monkeypatch.setattr(PlanChannel, "tell", lambda channel, kind, body: told.append(kind))
    runner = SimpleNamespace(ranks=Ranks(), config=SimpleNamespace(world_size=2))
    setattr(runner, half, lambda handle, late: told.append(handle))
    getattr(LeadingRunner(cast("Any", runner)), half)(99, LateInputs(step=1, slots=np.zeros(1, np.int32)))
    assert told == [Told.LATE_INPUTS, 99]


def test_the_runner_tells_what_rows_with_grammars_try() -> None:
    """Else they would try nothing: their masks are made while the forward runs."""
    runner = SimpleNamespace(ranks=Ranks(), config=SimpleNamespace(world_size=2), tell_drafts=None)
    leading = LeadingRunner(cast("Any", runner))
    heard: list[Any] = []
    leading.tell_drafts = heard.append
    runner.tell_drafts("drafts")
    assert heard == ["drafts"]
    assert leading.tell_drafts == heard.append


GROUPS = """
import gc, os
from dataclasses import replace
import torch, torch.distributed as dist
from actorllm.config import EngineConfig
from actorllm.model.parallel import Ranks

dist.init_process_group("gloo")
config = replace(EngineConfig.from_arguments("storyteller"), world_size=1, is_launched=True)
for _ in range(3):
    ranks = Ranks._of_launcher(config, 0, "gloo")
    ranks.sum_(torch.ones(1))
    ranks.close()
    gc.collect()
    print(len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")))
dist.barrier()
dist.destroy_process_group()
"""


def test_a_group_beside_that_of_the_program_is_given_back() -> None:
    done = subprocess.run(
        [sys.executable, "-c", GROUPS], env=environment(0, free_port(), 1), capture_output=True, text=True, check=True
    )
    first, *rest = done.stdout.splitlines()
    assert rest == [first] * 2
