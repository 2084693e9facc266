"""`collective_rpc` and `apply_model`: functions by their paths, on all ranks and replicas, with the results or errors of each."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
import torch

from actorllm import LLM, AsyncLLM, LLMEngine, SamplingParams
from actorllm.errors import CollectiveCallError, ConfigError, EngineError, InvalidParameterError
from tests.api import worker_functions
from tests.model.updates.weight_folders import ENGINE, PROMPT, greedy

HERE = worker_functions.__name__
NAN = float("nan")

pytestmark = pytest.mark.timeout(240)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    extension = f"{HERE}.Extension"  # as vLLM writes it
    with LLM("storyteller", topology="inline", worker_extension_cls=extension, **ENGINE) as engine:
        yield engine


def test_methods_of_an_extension_and_functions_at_a_path_are_called(llm: LLM) -> None:
    assert llm.collective_rpc("scaled_rank") == [1]
    assert llm.collective_rpc("scaled_rank", args=(5,)) == [2], "the worker of before: it keeps its state"
    assert llm.collective_rpc("scaled_rank", kwargs={"by": 3}) == [3]
    assert llm.collective_rpc("describe") == [{"device": "cpu", "ranks": 1, "layers": 4, "length": 256}]
    (told,) = llm.collective_rpc(f"{HERE}:echo", timeout=60, args=[1, "ä"], kwargs={"deep": {"a": [None, True]}})
    assert told == {"rank": 0, "replica": 0, "args": [1, "ä"], "kwargs": {"deep": {"a": [None, True]}}}


@pytest.mark.parametrize(
    "value",
    [
        *(None, True, -5, 2**63, 2.5, "text", b"\x00\xff", [], {}, {"$": ["tensor", 0]}, [float("inf")]),
        [torch.arange(6, dtype=torch.int32).reshape(2, 3), {"b": torch.full((2, 2), 1.5, dtype=torch.bfloat16).t()}],
        [torch.tensor(3.0, dtype=torch.float64), torch.empty(0, 4), torch.tensor([True, False])],
        [np.arange(6.0).reshape(3, 2)[:, ::-1], np.array(7, np.int16), np.float32(0.25)],
    ],
    ids=repr,
)
def test_values_come_back_as_they_were(llm: LLM, value: Any) -> None:
    (told,) = llm.collective_rpc(f"{HERE}:echo", args=(value,))
    assert same(told["args"][0], value)


def same(a: Any, b: Any) -> bool:
    if isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(b, dict):
        return bool(a.keys() == b.keys()) and all(same(a[key], b[key]) for key in b)
    if isinstance(b, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    if isinstance(b, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and np.array_equal(a, b)
    return bool(a == b)


def test_a_value_that_is_not_a_number_and_types_in_the_worker(llm: LLM) -> None:
    ((told,),) = [one["args"] for one in llm.collective_rpc(f"{HERE}:echo", args=(NAN,))]
    assert told != told
    kinds = llm.collective_rpc(f"{HERE}:types_of", args=(torch.zeros(1), np.zeros(1), (1, 2), b""))
    assert kinds == [["torch.Tensor", "numpy.ndarray", "builtins.list", "builtins.bytes"]]


def test_a_function_gets_the_model(llm: LLM) -> None:
    (row,) = llm.apply_model(f"{HERE}:embedding_row")
    assert row.dtype == torch.float32
    assert row.shape == (256,)
    assert llm.apply_model(f"{HERE}:module_name") == ["Decoder"]


def test_sets_travel_as_lists(llm: LLM) -> None:
    """`load_weights` returns one, which methods of trainers return in their turn."""
    assert llm.collective_rpc(f"{HERE}:returns_sets", args=({2, 1},)) == [[["a", "b"], [3], [1, 2]]]


def test_what_a_function_raises_is_told_and_harms_nothing(llm: LLM) -> None:
    before = llm.generate(PROMPT, greedy(), use_tqdm=False)[0].outputs[0].token_ids
    for path, said in {
        f"{HERE}:returns_an_object": "the result\\['value'\\]\\['worker'\\] is object, which does not travel",
        f"{HERE}:coroutine": "is a coroutine function",
        f"{HERE}:not_there": "no attribute 'not_there'",
        "not_a_module:f": "No module named 'not_a_module'",
        "scaled_rang": "has no method 'scaled_rang', .* did you mean 'scaled_rank'",
    }.items():
        with pytest.raises(CollectiveCallError, match=said) as caught:
            llm.collective_rpc(path)
        assert (caught.value.results, list(caught.value.errors)) == ([None], [0])
        assert "Traceback" in caught.value.__notes__[0]
    with pytest.raises(CollectiveCallError, match="50331648 at most travel"):
        llm.collective_rpc(f"{HERE}:many_bytes", args=(49 << 20,))
    assert llm.collective_rpc(f"{HERE}:many_bytes", args=(40 << 20,))[0].nbytes == 40 << 20
    assert llm.generate(PROMPT, greedy(), use_tqdm=False)[0].outputs[0].token_ids == before


def local_function() -> Any:
    return lambda worker: None


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"method": worker_functions.echo}, f"pass its path, method='{HERE}:echo'"),
        ({"method": worker_functions.Extension.scaled_rank}, f"method='{HERE}:Extension.scaled_rank'"),
        ({"method": local_function()}, "define it at the top of a module, and pass 'module:function'"),
        ({"method": 5}, "method=5 must be a path"),
        ({"method": "_make_calls"}, "must be the name of a method of the worker, or a path"),
        ({"method": "a:b:c"}, "must be the name of a method"),
        ({"method": "x" * 1001}, "method='x+.* must be the name of a method"),
        ({"method": "describe", "args": "abc"}, "args='abc' must be a tuple or a list"),
        ({"method": "describe", "kwargs": [1]}, r"kwargs=\[1\] must be a mapping"),
        ({"method": "describe", "kwargs": {"a": {1: 2}}}, r"\['a'\] has the key 1; keys of mappings must be texts"),
        ({"method": "describe", "args": (object(),)}, r"\['args'\]\[0\] is object, which does not travel"),
        ({"method": "describe", "args": (2**64,)}, "must be an integer of 64 bits"),
        ({"method": "describe", "args": ("\ud800",)}, "is no valid Unicode"),
        ({"method": "describe", "args": (bytes(49 << 20),)}, "pass the path of a file instead"),
        ({"method": "describe", "timeout": 0}, "timeout=0 must be a positive number of seconds"),
    ],
)
def test_bad_arguments_are_named_before_anything_is_called(llm: LLM, arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidParameterError, match=said):
        llm.collective_rpc(**arguments)


def test_a_value_that_contains_itself_is_refused(llm: LLM) -> None:
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(InvalidParameterError, match="nested more than 100 levels"):
        llm.collective_rpc("describe", args=endless)


def test_apply_model_takes_paths_only(llm: LLM) -> None:
    with pytest.raises(InvalidParameterError, match=f"func='{HERE}:module_name'"):
        llm.apply_model(worker_functions.module_name)  # type: ignore[arg-type]
    with pytest.raises(InvalidParameterError, match="must be 'module:function'"):
        llm.apply_model("describe")


def test_a_class_of_workers_has_a_state_of_its_own_and_engines_are_stepped_by_hand() -> None:
    engine = LLMEngine("storyteller", topology="inline", worker_cls=worker_functions.OwnWorker, **ENGINE)
    assert engine.collective_rpc("note", args=("a",)) == [["a"]]
    engine.add_request("one", PROMPT, greedy())
    engine.step()
    assert engine.collective_rpc("note", args=("b",)) == [["a", "b"]]
    assert engine.apply_model(f"{HERE}:module_name") == ["Decoder"]
    engine.shutdown()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"worker_cls": "not_a_module:Class"}, "worker_cls='not_a_module:Class' cannot be loaded"),
        ({"worker_cls": f"{HERE}:Extension"}, "must be a subclass of RankWorker"),
        ({"worker_cls": f"{HERE}:echo"}, "is function and no class"),
        ({"worker_cls": f"{HERE}:BrokenWorker"}, "BrokenWorker cannot be built: OSError: no such thing"),
        ({"worker_cls": 5}, "must be a class at the top of a module, or its path"),
        ({"worker_extension_cls": f"{HERE}:Taken"}, "defines 'get_model', which RankWorker has; rename it"),
        ({"worker_extension_cls": "Extension"}, "worker_extension_cls='Extension' must be a class"),
    ],
)
def test_classes_that_cannot_be_used_fail_the_start(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said), LLM("storyteller", topology="inline", **ENGINE, **arguments) as engine:
        engine.generate(PROMPT, SamplingParams(max_tokens=1), use_tqdm=False)


def test_modules_of_transformers_are_given_themselves() -> None:
    with LLM("storyteller", topology="inline", model_impl="transformers", **ENGINE) as engine:
        assert engine.apply_model(f"{HERE}:module_name") == ["LlamaForCausalLM"]


async def test_ranks_and_replicas_answer_in_order_with_the_errors_of_each() -> None:
    """Two replicas of one rank, then two ranks of one replica; a call between the tokens of a stream changes none."""
    async with AsyncLLM("storyteller", data_parallel_size=2, **ENGINE) as llm:
        told = await llm.collective_rpc(f"{HERE}:echo", args=("x",))
        assert [(one["replica"], one["rank"]) for one in told] == [(0, 0), (1, 0)]
        with pytest.raises(
            CollectiveCallError, match="on 1 of 2 ranks: replica 1, rank 0: LookupError: not here"
        ) as caught:
            await llm.collective_rpc(f"{HERE}:fails_on_the_second_rank")
        assert caught.value.results == ["done", None]
        assert caught.value.errors == {1: "LookupError: not here"}


async def test_calls_stand_between_steps_and_a_killed_worker_ends_one(tmp_path: Path) -> None:
    arguments: dict[str, Any] = {"tensor_parallel_size": 2, "worker_extension_cls": f"{HERE}:Extension"}
    async with AsyncLLM("storyteller", name=None, **arguments, **ENGINE) as llm:
        expected = [o async for o in llm.generate(PROMPT, greedy(48))][-1].outputs[0].token_ids
        answers: list[Any] = []

        async def call() -> None:
            for _ in range(5):
                answers[:] += await llm.collective_rpc(f"{HERE}:count_slots")

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(call)
            last = [o async for o in llm.generate(PROMPT, greedy(48))][-1]
        assert last.outputs[0].token_ids == expected
        assert len(answers) == 10
        assert await llm.collective_rpc("scaled_rank") == [1, 3]
        with pytest.raises(EngineError, match="a worker ended during the call"):
            await llm.collective_rpc(f"{HERE}:kill")
        assert [o async for o in llm.generate(PROMPT, greedy(48))][-1].outputs[0].token_ids == expected
        assert await llm.collective_rpc("scaled_rank") == [1, 3], "in the new processes"


async def test_a_call_goes_on_over_the_death_of_the_scheduler_and_is_not_made_twice() -> None:
    async with AsyncLLM("storyteller", worker_cls=f"{HERE}:OwnWorker", **ENGINE) as llm:
        await llm.start()
        engine: Any = llm._engine
        os.kill(engine.pids["scheduler"], signal.SIGSTOP)  # it hears of nothing
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lambda: llm.collective_rpc("note", args=("once",)))
            await anyio.lowlevel.checkpoint()
            os.kill(engine.pids["scheduler"], signal.SIGKILL)
        assert await llm.collective_rpc("note", args=("again",)) == [["once", "again"]]
