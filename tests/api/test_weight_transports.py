"""New weights by other ways than shared memory, through the front doors: a trainer that broadcasts, and memory of a GPU."""

from __future__ import annotations

import gc
import json
import os
import signal
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest
import torch

from actorllm import LLM, AsyncLLM
from actorllm.compat.weight_sender import WeightSender, handles_of, update_info_of
from actorllm.errors import CorruptModelError, EngineError, InvalidParameterError
from tests.api.trainer_program import Trainer
from tests.model.updates.shared_gpu import SharedGPU
from tests.model.updates.weight_folders import ENGINE, PROMPT, STORYTELLER, changed, greedy

pytestmark = pytest.mark.timeout(240)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def shared_llm() -> Iterator[LLM]:
    with LLM("storyteller", topology="inline", **ENGINE) as engine:
        yield engine


@pytest.fixture
def llm(shared_llm: LLM) -> Iterator[LLM]:
    yield shared_llm
    shared_llm.shutdown_weight_transfer_engine()
    shared_llm.update_weights_from_disk(STORYTELLER, version="0")


def tell(llm: LLM) -> tuple[str, list[int]]:
    (output,) = llm.generate(PROMPT, greedy(), use_tqdm=False)
    (span,) = output.outputs[0].weight_versions
    return span.version, output.outputs[0].token_ids


@pytest.fixture(scope="module")
def expected(shared_llm: LLM) -> list[list[int]]:
    """By shared memory."""
    streams = []
    for seed in (0, 1, 2):
        shared_llm.update_weights_from_tensors(changed(seed), version=str(seed))
        streams.append(tell(shared_llm)[1])
    assert len({tuple(stream) for stream in streams}) == 3
    shared_llm.update_weights_from_disk(STORYTELLER, version="0")
    return streams


# A trainer that broadcasts --------------------------------------------------------------------------------------------


def test_tensors_of_this_program_are_broadcast(expected: list[list[int]], llm: LLM) -> None:
    assert llm.update_weights_from_tensors(changed(1), transport="gloo", version="one") == "one"
    assert tell(llm) == ("one", expected[1])
    name = "model.norm.weight"
    llm.update_weights_from_tensors({key: value for key, value in changed(2).items() if key != name}, transport="gloo")
    llm.update_weights_from_tensors({name: changed(2)[name]}, transport="gloo", version="two")
    assert tell(llm) == ("two", expected[2]), "what is not given stays"
    with pytest.raises(CorruptModelError, match=r"'model.norm.weight' has shape"):
        llm.update_weights_from_tensors({name: torch.ones(3)}, transport="gloo")
    assert tell(llm) == ("two", expected[2])


def test_a_sender_updates_an_engine_of_its_program(expected: list[list[int]], llm: LLM) -> None:
    sender = WeightSender(llm, world_size=2, timeout_s=60)
    for seed in (1, 2):
        sender.update(changed(seed), version=f"step-{seed}")
        assert tell(llm) == (f"step-{seed}", expected[seed])
    with pytest.raises(CorruptModelError, match="has shape"):
        sender.update({"model.norm.weight": torch.ones(3)})
    assert tell(llm) == ("step-2", expected[2])
    sender.update(changed(1), version="again")
    assert tell(llm) == ("again", expected[1]), "the group has outlived what could not be used"
    sender.close()
    for sends in (sender.update, sender.send):
        with pytest.raises(InvalidParameterError, match="this WeightSender is closed; make another one"):
            sends(changed(2))
    with pytest.raises(InvalidParameterError, match="call start_weight_update first"):
        llm.finish_weight_update()  # a sender that is closed has begun none


def test_a_sender_whose_place_another_one_has_taken_disturbs_nothing(expected: list[list[int]], llm: LLM) -> None:
    first = WeightSender(llm, world_size=2, timeout_s=600)
    second = WeightSender(llm, world_size=2, timeout_s=600)
    with pytest.raises(EngineError, match="make another WeightSender"):
        first.update(changed(2))
    first.close()
    with pytest.raises(InvalidParameterError, match="this WeightSender is closed"):
        first.update(changed(2))
    second.update(changed(1), version="second")
    assert tell(llm) == ("second", expected[1])
    second.close()


def test_parts_say_what_vllms_trainers_say(expected: list[list[int]], llm: LLM) -> None:
    """The fields of its update_info, those of earlier releases with them."""
    sender = WeightSender(llm, world_size=2, timeout_s=60)
    llm.start_weight_update(is_checkpoint_format=True)
    of_vllm = {
        "packed": True,
        "packed_buffer_size_bytes": 1 << 30,
        "packed_num_buffers": 2,
        "is_checkpoint_format": True,
    }
    sending = threading.Thread(target=sender.send, args=(changed(1),))
    sending.start()
    llm.update_weights({"update_info": {**update_info_of(changed(1)), **of_vllm}})
    sending.join()
    llm.finish_weight_update("one")
    assert tell(llm) == ("one", expected[1])
    sender.close()


def test_groups_leave_nothing_behind(llm: LLM) -> None:
    """Neither those that were joined, nor those in which a rank was waited for in vain."""
    name, norm = "model.norm.weight", changed(0)["model.norm.weight"]
    known: list[tuple[int, int]] = []
    for _ in range(4):
        for _ in range(3):
            llm.update_weights_from_tensors({name: norm}, transport="gloo")
        sender = WeightSender(llm, world_size=2, timeout_s=60)
        sender.update({name: norm})
        sender.close()
        llm.start_weight_update()
        with pytest.raises(EngineError, match="has ended"):
            llm.update_weights({"update_info": update_info_of({name: norm})})
        llm.shutdown_weight_transfer_engine()
        gc.collect()
        for thread in threading.enumerate():
            if thread.name.startswith(("actorllm:send", "actorllm:trainer")):
                thread.join()
        known.append((len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))))
    assert all(last <= early for last, early in zip(known[-1], known[1], strict=True)), known


@asynccontextmanager
async def met(llm: AsyncLLM, num_ranks: int, timeout_s: float = 60) -> AsyncIterator[Trainer]:
    """A trainer that the ranks have met."""
    with await anyio.to_thread.run_sync(Trainer, 1 + num_ranks, timeout_s) as trainer:
        await llm.init_weight_transfer_engine({"init_info": trainer.init_info})
        await llm.start_weight_update()
        yield trainer


async def told(llm: AsyncLLM, number: int = 0) -> list[int]:
    async for output in llm.generate(PROMPT, greedy(), data_parallel_rank=number):
        last = output
    tokens: list[int] = last.outputs[0].token_ids
    return tokens


PART = {"update_info": update_info_of(changed(0))}


async def test_a_trainer_in_another_process(expected: list[list[int]]) -> None:
    """Steps go on while it is waited for. When it ends, or is silent, that is told, and nothing else changes."""
    async with AsyncLLM("storyteller", **ENGINE) as llm:
        async with met(llm, 1) as trainer:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(llm.update_weights, PART)
                while not llm._engine._rank_transfers._is_busy:
                    await anyio.sleep(0.001)
                assert await told(llm) == expected[0], "while nothing is sent"
                with pytest.raises(EngineError, match="weights are brought at this moment"):
                    await llm.update_weights(PART)
                trainer.send(1)
            assert await told(llm) == expected[0], "nothing counts before the end"
            await llm.finish_weight_update("one")
            assert (await told(llm), llm.weight_version) == (expected[1], "one")
            await llm.start_weight_update()
            trainer.kill()
            with pytest.raises(
                EngineError, match=r"the trainer at 127.0.0.1:\d+, or another rank of its group, has ended"
            ):
                await llm.update_weights(PART)
            with pytest.raises(InvalidParameterError, match="no tensor has come"):
                await llm.finish_weight_update()
        os.kill(llm._engine.pids["worker0"], signal.SIGKILL)
        assert await told(llm) == expected[1], "a worker that is started later has them"
        with pytest.raises(
            EngineError, match=r"a rank is not in the group of a trainer: .* init_weight_transfer_engine"
        ):
            await llm.update_weights(PART)

        sender = await sender_here(llm, timeout_s=1)
        with pytest.raises(EngineError, match=r"the trainer at 127.0.0.1:\d+ was silent for 1 s"):
            await llm.update_weights(PART)
        sender.close()
        assert (await told(llm), llm.weight_version) == (expected[1], "one")
        sender = await sender_here(llm, timeout_s=60)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(llm.update_weights, PART)
            await anyio.to_thread.run_sync(sender.send, changed(2))
        await llm.finish_weight_update("two")
        assert await told(llm) == expected[2]
        await llm.shutdown_weight_transfer_engine()


async def test_a_trainer_that_is_stopped_is_silent(expected: list[list[int]]) -> None:
    """The system keeps its connections, over which nothing comes any more."""
    async with AsyncLLM("storyteller", **ENGINE) as llm:
        async with met(llm, 1, timeout_s=4) as trainer:
            os.kill(trainer.process.pid, signal.SIGSTOP)
            with pytest.raises(EngineError, match=r"the trainer at 127.0.0.1:\d+ was silent for 4 s"):
                await llm.update_weights(PART)
        await llm.update_weights_from_tensors(changed(1), transport="gloo")
        assert await told(llm) == expected[1]


async def sender_here(llm: AsyncLLM, timeout_s: float) -> WeightSender:
    """A trainer in this process, which the rank has met. timeout_s: of the rank; the trainer waits long for it to come."""
    found: list[WeightSender] = []
    (sent, received) = anyio.create_memory_object_stream[int](1)

    async def meet() -> None:
        port = await received.receive()
        info = {"backend": "gloo", "master_address": "127.0.0.1", "master_port": port, "world_size": 2}
        await llm.init_weight_transfer_engine({"init_info": info | {"timeout_s": timeout_s}})

    def make() -> WeightSender:
        def tell(port: int) -> None:
            anyio.from_thread.run_sync(sent.send_nowait, port)

        return WeightSender(world_size=2, timeout_s=60, on_listening=tell)

    with sent, received:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(meet)
            found.append(await anyio.to_thread.run_sync(make))
    return found[0]


@pytest.mark.parametrize("several", ["tensor_parallel_size", "data_parallel_size"])
@pytest.mark.slow(reason="two workers, and two trainers")
async def test_all_ranks_take_part(several: str) -> None:
    async with AsyncLLM("storyteller", **ENGINE, **{several: 2}) as llm:
        numbers = range(2 if several == "data_parallel_size" else 1)
        wanted = []
        for seed in (1, 0):
            await llm.update_weights_from_tensors(changed(seed), version=str(seed))
            wanted.append([await told(llm, number) for number in numbers])
        assert wanted[0] != wanted[1]
        info = {"backend": "gloo", "master_address": "localhost", "master_port": 9, "world_size": 2}
        with pytest.raises(InvalidParameterError, match=r"world_size=2 is too small .* 2 ranks of this engine; give 3"):
            await llm.init_weight_transfer_engine({"init_info": info})
        async with met(llm, 2) as trainer:
            for seed, streams in ((1, wanted[0]), (0, wanted[1])):
                await llm.start_weight_update()
                trainer.send(seed)
                await llm.update_weights(PART)
                await llm.finish_weight_update(f"step-{seed}")
                assert [await told(llm, number) for number in numbers] == streams
            name = "replica1/worker0" if several == "data_parallel_size" else "worker1"
            async with anyio.create_task_group() as tasks:

                async def fail() -> None:
                    with pytest.raises(EngineError, match="nothing was changed"):
                        await llm.update_weights(PART)

                await llm.start_weight_update()
                tasks.start_soon(fail)
                while not llm._engine._rank_transfers._is_busy:
                    await anyio.sleep(0.001)
                os.kill(llm._engine.pids[name], signal.SIGKILL)
                trainer.kill()
        assert [await told(llm, number) for number in numbers] == wanted[1]
        await llm.update_weights_from_tensors(changed(1), transport="gloo")
        assert [await told(llm, number) for number in numbers] == wanted[0], "all are there again"


@pytest.mark.parametrize(
    ("info", "said"),
    [
        ({"backend": "gloo"}, "master_address=None must be the address of the trainer"),
        ({"master_address": "localhost"}, "master_port=None must be an integer from 1 to 65535"),
        (
            {"master_address": "localhost", "master_port": 9, "world_size": 2},
            "backend='nccl' is between GPUs, .*'gloo'",
        ),
        ({"backend": "gloo", "master_address": "localhost", "master_port": 9, "world_size": 1}, "world_size=1"),
        (
            {"backend": "gloo", "master_address": "localhost", "master_port": 9, "world_size": 3, "rank_offset": 3},
            "rank_offset=3 must be an integer from 1 to 2",
        ),
        (
            {"backend": "gloo", "master_address": "localhost", "master_port": 9, "world_size": 2, "timeout_s": 0},
            "timeout_s=0 must be a positive number",
        ),
        (
            {"backend": "gloo", "master_address": "localhost", "master_port": 9, "world_size": 2, "mastr": 0},
            "init_info has 'mastr', and backend='gloo' takes master_address",
        ),
        ({"nccl_unique_id_b64": "AAAA"}, "nccl_unique_id_b64 is not supported"),
        ({"backend": "glo"}, "backend='glo' must be one of .*did you mean 'gloo'"),
        ({"backend": "ipc", "packed": True}, "packed=True is not supported"),
    ],
)
def test_setups_that_are_none_are_refused(llm: LLM, info: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidParameterError, match=said):
        llm.init_weight_transfer_engine({"init_info": info})


def test_a_trainer_that_is_not_there_is_named(llm: LLM) -> None:
    info = {"backend": "gloo", "master_address": "localhost", "master_port": 9, "world_size": 2, "timeout_s": 1}
    with pytest.raises(EngineError, match="did not meet the trainer at localhost:9"):
        llm.init_weight_transfer_engine({"init_info": info})


def test_tensors_of_the_host_are_not_sent_between_gpus(llm: LLM) -> None:
    with pytest.raises(InvalidParameterError, match=r"'a' is on cpu, .* use transport='gloo', or 'shm'"):
        llm.update_weights_from_tensors({"a": torch.ones(2)}, transport="nccl")
    with pytest.raises(InvalidParameterError, match=r"'a' is on cpu, .* use transport='shm'"):
        llm.update_weights_from_tensors({"a": torch.ones(2)}, transport="cuda_ipc")
    with pytest.raises(
        InvalidParameterError, match=r"transport='tcp' must be one of 'shm', 'cuda_ipc', 'nccl', 'gloo'"
    ):
        llm.update_weights_from_tensors({"a": torch.ones(2)}, transport="tcp")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"names": []}, r"names=\[\] must be a list of 1 to"),
        ({"shapes": [[1]]}, "1 shapes; give one of each for every tensor"),
        ({"names": ["a", "a"]}, "names tensor 'a' twice"),
        ({"names": ["a", 3]}, "tensor name 3"),
        ({"dtype_names": ["float32", "complex64"]}, "'b' is 'complex64'; give one of float32"),
        ({"shapes": [[1], [-1]]}, r"'b' has shape \[-1\]; give a list of integers"),
        ({"shapes": [[1], [1 << 40, 1 << 40]]}, "'b' has shape .*; give a list of integers"),
        ({"more": 1}, "update_info has 'more'"),
        ({"ipc_handles_pickled": "gASV"}, "ipc_handles_pickled is not read, since a pickle may run code"),
        ({"ipc_handles": [1]}, r"ipc_handles=\[1\] must be a list of 2 mappings"),
        ({"ipc_handles": [{}, {}]}, "the handle of 'a' is {}; give a mapping from a GPU's UUID"),
        ({"ipc_handles": [{"GPU-1": b"pickled"}] * 2}, "the handle of 'a'"),
    ],
)
def test_parts_that_are_none_are_refused(llm: LLM, change: dict[str, Any], said: str) -> None:
    info = {"names": ["a", "b"], "dtype_names": ["float32", "torch.bfloat16"], "shapes": [[2], [3, 4]]}
    llm.start_weight_update()
    with pytest.raises(InvalidParameterError, match=said):
        llm.update_weights({"update_info": info | change})


def test_a_part_that_the_memory_does_not_hold_is_refused(llm: LLM) -> None:
    info = {"names": ["a"], "dtype_names": ["float32"], "shapes": [[1 << 45]]}
    llm.start_weight_update()
    with pytest.raises(EngineError, match=rf"the tensors have {1 << 47} bytes, of which \d+ are available"):
        llm.update_weights({"update_info": info})


# Memory of a GPU, with a stand-in for the calls of torch that need one --------------------------------------------------


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> SharedGPU:
    return SharedGPU(monkeypatch)


def on_gpu(gpu: SharedGPU, seed: int) -> dict[str, Any]:
    return {name: gpu.tensor(value) for name, value in changed(seed).items()}


def test_tensors_of_a_gpu_are_opened_by_a_rank(expected: list[list[int]], llm: LLM, gpu: SharedGPU) -> None:
    llm.update_weights_from_tensors(on_gpu(gpu, 1), transport="cuda_ipc", version="one")
    assert tell(llm) == ("one", expected[1])
    assert gpu.opened_on == [3] * len(changed(1)), "on the GPU of the rank, once each"
    llm.init_weight_transfer_engine({"init_info": {"backend": "ipc", "packed": False}})
    llm.start_weight_update()
    llm.update_weights(json.loads(json.dumps({"update_info": handles_of(on_gpu(gpu, 2))})))
    assert tell(llm) == ("one", expected[1])
    llm.finish_weight_update("two")
    assert tell(llm) == ("two", expected[2])


def test_memory_that_is_gone_or_of_another_gpu_changes_nothing(
    expected: list[list[int]], llm: LLM, gpu: SharedGPU
) -> None:
    info = handles_of(on_gpu(gpu, 1))
    llm.start_weight_update()
    others = [{"GPU-other": one[gpu.uuid]} for one in info["ipc_handles"]]
    with pytest.raises(
        InvalidParameterError, match=r"ipc_handles are of \['GPU-other'\], and the ranks are on GPU-1111"
    ):
        llm.update_weights({"update_info": info | {"ipc_handles": others}})
    with pytest.raises(InvalidParameterError, match=r"says? another tensor|say another tensor"):
        llm.update_weights({"update_info": info | {"ipc_handles": info["ipc_handles"][::-1]}})
    gpu._held.clear()
    with pytest.raises(
        EngineError, match="cannot be opened on the GPU, and nothing was changed; the trainer must keep it"
    ):
        llm.update_weights({"update_info": info})
    with pytest.raises(InvalidParameterError, match="no tensor has come"):
        llm.finish_weight_update()
    assert tell(llm) == ("0", expected[0])


def test_a_rank_on_a_cpu_opens_nothing(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        info = handles_of(on_gpu(SharedGPU(patch), 1))
    llm.start_weight_update()
    with pytest.raises(InvalidParameterError, match="computes on a CPU; use transport='shm'"):
        llm.update_weights({"update_info": info})
