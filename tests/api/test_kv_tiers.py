"""KV tiers: tokens are the same with them and without, over preemptions, restarts, corrupt files, kills, sleep and new weights."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from actorllm import LLM, AsyncLLM, SamplingParams
from actorllm.config import EngineConfig
from actorllm.errors import ConfigError
from tests.api import worker_functions

OPTIONS: dict[str, Any] = {
    "dtype": "float32", "num_threads": 1, "max_model_len": 256, "max_num_seqs": 4, "block_size": 16,
    "skip_tokenizer_init": True,
}  # fmt: skip
INLINE = OPTIONS | {"topology": "inline"}
PARAMS = SamplingParams(temperature=0.8, seed=3, max_tokens=12, ignore_eos=True, detokenize=False)
PREFIX = [random.Random(5).randrange(3, 500) for _ in range(120)]


def prompt(number: int) -> Any:
    return {"prompt_token_ids": [*PREFIX, 10 + number, 20 + number, 7]}


def other(number: int, length: int = 100) -> Any:
    return {"prompt_token_ids": [random.Random(100 + number).randrange(3, 500) for _ in range(length)]}


def tokens(llm: LLM, prompts: list[Any]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in llm.generate(prompts, PARAMS, use_tqdm=False)]


def transfers(llm: LLM) -> dict[str, Any]:
    told: dict[str, Any] = llm.stats()["scheduler"]["scheduler"]["transfers"]
    return told


def wait_for_stores(llm: LLM, number: int) -> None:
    """What was used again is stored once there is nothing to compute."""
    while transfers(llm)["num_stored_blocks"] < number:
        time.sleep(0.01)


def disk(folder: Path, **more: Any) -> dict[str, Any]:
    return {"kv_disk_path": folder, "kv_disk_size": 0.05} | more


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    """Of `prompt(0)` and so on, without tiers."""
    with LLM("storyteller", **INLINE) as llm:
        return tokens(llm, [prompt(number) for number in range(4)])


def fill(folder: Path, expected: list[list[int]], **options: Any) -> None:
    """Have the prefix stored in a folder."""
    with LLM("storyteller", **INLINE | disk(folder) | options) as llm:
        for number in range(2):
            assert tokens(llm, [prompt(number)]) == expected[number : number + 1]
        wait_for_stores(llm, 7)


@pytest.mark.parametrize("topology", ["process", "inline"])
def test_a_restarted_engine_loads_what_was_stored(tmp_path: Path, expected: list[list[int]], topology: str) -> None:
    fill(tmp_path, expected)
    with LLM("storyteller", **OPTIONS | disk(tmp_path, topology=topology)) as llm:
        assert tokens(llm, [prompt(number) for number in range(4)]) == expected
        told = transfers(llm)
        assert (told["num_loads"], told["num_loaded_blocks"]) == (1, 7), "four requests follow one load"
        metrics = {metric.name: metric for metric in llm.get_metrics()}
        assert metrics["actorllm:kv_tier_loaded_blocks"].value == 7  # type: ignore[union-attr]


@pytest.mark.parametrize("dtype", ["auto", "int8"])
def test_preempted_requests_get_their_blocks_back(tmp_path: Path, dtype: str) -> None:
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=60, ignore_eos=True, detokenize=False)
    options = INLINE | {"max_num_seqs": 6, "kv_cache_dtype": dtype}

    def run(**more: Any) -> tuple[list[list[int]], dict[str, Any]]:
        with LLM("storyteller", **options | more) as llm:
            prompts = [other(number, 60) for number in range(8)]
            streams = [list(o.outputs[0].token_ids) for o in llm.generate(prompts, params, use_tqdm=False)]
            counts = llm.stats()["scheduler"]["scheduler"]
            return streams, counts

    plain, _ = run()
    tiered, counts = run(num_gpu_blocks_override=26, kv_offloading_size=0.05)
    assert tiered == plain
    assert counts["num_preemptions"] > 0
    assert counts["transfers"]["num_stored_blocks"] > 0


@pytest.mark.parametrize("what", ["noise", "cut", "index", "zeros"])
def test_a_corrupt_file_is_computed(tmp_path: Path, expected: list[list[int]], what: str) -> None:
    fill(tmp_path, expected)
    (path,) = tmp_path.iterdir()
    size = path.stat().st_size
    with path.open("r+b") as file:
        if what == "cut":
            os.truncate(path, size // 2)
        else:
            first, last = (4096, size // 50) if what == "index" else (size // 50, size)
            for at in range(first, last, 1024):
                file.seek(at)
                file.write(b"\0" * 1024 if what == "zeros" else random.Random(at).randbytes(300))
    with LLM("storyteller", **INLINE | disk(tmp_path)) as llm:
        assert tokens(llm, [prompt(number) for number in range(4)]) == expected


RANKS = OPTIONS | {"tensor_parallel_size": 2}


def test_ranks_keep_their_parts_of_a_block(tmp_path: Path, expected: list[list[int]]) -> None:
    both = disk(tmp_path, kv_disk_size=0.1, kv_offloading_size=0.05)
    with LLM("storyteller", **RANKS | both) as llm:
        for number in range(2):
            assert tokens(llm, [prompt(number)]) == expected[number : number + 1]
        wait_for_stores(llm, 7)
    with LLM("storyteller", **RANKS | both) as llm:
        assert tokens(llm, [prompt(number) for number in range(4)]) == expected
        assert transfers(llm)["num_loaded_blocks"] == 7
    paths = sorted(tmp_path.iterdir())
    assert len(paths) == 2
    size = paths[1].stat().st_size
    with paths[1].open("r+b") as file:  # behind the index, which is a small part of it
        for at in range(size // 50, size, 4096):
            file.seek(at)
            file.write(b"\1" * 64)
    with LLM("storyteller", **RANKS | both) as llm:
        assert tokens(llm, [prompt(number) for number in range(4)]) == expected
        assert transfers(llm)["num_loaded_blocks"] == 0, "the part of the other rank alone is nothing"
    with LLM("storyteller", **INLINE | both) as llm:
        assert tokens(llm, [prompt(2)]) == expected[2:3]
        assert transfers(llm)["num_loads"] == 0, "one rank alone has whole blocks, in another file"


def test_another_model_and_another_arithmetic_find_nothing(tmp_path: Path, expected: list[list[int]]) -> None:
    fill(tmp_path, expected)
    for options in ({"dtype": "bfloat16"}, {"kv_cache_dtype": "int8"}):
        with LLM("storyteller", **INLINE | disk(tmp_path) | options) as llm:
            found = tokens(llm, [prompt(2)])
            assert transfers(llm)["num_loads"] == 0
        with LLM("storyteller", **INLINE | options) as llm:
            assert tokens(llm, [prompt(2)]) == found


def test_files_of_other_models_go_when_there_is_no_room(tmp_path: Path, expected: list[list[int]]) -> None:
    fill(tmp_path, expected, kv_disk_size=0.001)
    (first,) = tmp_path.iterdir()
    with first.open("r+b") as file:  # as if all of its slots had been used
        os.posix_fallocate(file.fileno(), 0, first.stat().st_size)
    (tmp_path / "mine").write_text("mine")
    with LLM("storyteller", **INLINE | disk(tmp_path, kv_disk_size=0.001, block_size=32)) as llm:
        tokens(llm, [prompt(2)])
        assert not first.exists()
        assert len(list(tmp_path.iterdir())) == 2, "its own file, and what is none of ours"


def test_a_reset_forgets_what_the_tiers_have(tmp_path: Path, expected: list[list[int]]) -> None:
    fill(tmp_path, expected)
    with LLM("storyteller", **INLINE | disk(tmp_path)) as llm:
        llm.reset_prefix_cache()
        for number in range(3):
            assert tokens(llm, [prompt(number)]) == expected[number : number + 1]
        assert transfers(llm)["num_loads"] == 0
        wait_for_stores(llm, 7)
    with LLM("storyteller", **INLINE | disk(tmp_path)) as llm:
        assert tokens(llm, [prompt(3)]) == expected[3:]
        assert transfers(llm)["num_loaded_blocks"] == 7, (
            "what was stored before the reset is what these weights compute"
        )


def test_the_next_scheduler_finds_nothing_of_before_a_reset(tmp_path: Path, expected: list[list[int]]) -> None:
    fill(tmp_path, expected)

    async def go_on() -> int:
        async with AsyncLLM("storyteller", **OPTIONS | disk(tmp_path)) as engine:

            async def generate(number: int) -> list[int]:
                outputs = [output async for output in engine.generate(prompt(number), PARAMS)]
                return list(outputs[-1].outputs[0].token_ids)

            assert await generate(2) == expected[2]
            await engine.reset_prefix_cache()
            os.kill(engine._engine.pids["scheduler"], signal.SIGKILL)
            assert await generate(3) == expected[3]
            told = await engine.stats()
            return int(told["scheduler"]["scheduler"]["transfers"]["num_loads"])

    assert asyncio.run(go_on()) == 0


def test_weights_of_another_version_find_nothing(tmp_path: Path, expected: list[list[int]]) -> None:
    fill(tmp_path, expected)
    new = {"model.norm.weight": torch.full((256,), 1.5)}
    with LLM("storyteller", **INLINE) as llm:
        llm.update_weights_from_tensors(new)
        changed = tokens(llm, [prompt(number) for number in range(3)])
    with LLM("storyteller", **INLINE | disk(tmp_path)) as llm:
        llm.update_weights_from_tensors(new)
        assert [tokens(llm, [prompt(number)])[0] for number in range(3)] == changed
        assert transfers(llm)["num_loads"] == 0


def test_an_engine_that_slept_loads_again(tmp_path: Path, expected: list[list[int]]) -> None:
    fill(tmp_path, expected)
    with LLM("storyteller", **INLINE | disk(tmp_path, enable_sleep_mode=True)) as llm:
        for number in range(3):
            assert tokens(llm, [prompt(number)]) == expected[number : number + 1]
            llm.sleep()
            llm.wake_up()
        assert transfers(llm)["num_loads"] == 3


@pytest.mark.timeout(180)
def test_workers_and_schedulers_that_are_killed_change_no_token(tmp_path: Path, expected: list[list[int]]) -> None:
    """In the middle of stores and loads: each round stores new prefixes and kills one of the two."""

    async def run() -> None:
        options = disk(tmp_path, kv_offloading_size=0.02, max_num_seqs=8, num_gpu_blocks_override=40)
        async with AsyncLLM("storyteller", **OPTIONS | options) as engine:

            async def stream(number: int) -> list[int]:
                found: list[int] = []
                async for output in engine.generate(prompt(number), PARAMS):
                    found = list(output.outputs[0].token_ids)
                return found

            for victim in ("worker0", "scheduler"):
                before = await asyncio.gather(*(stream(number) for number in range(4)))
                running = [asyncio.create_task(stream(number)) for number in range(4)]
                await asyncio.sleep(0.02)
                os.kill(engine._engine.pids[victim], signal.SIGKILL)
                assert before == expected
                assert await asyncio.gather(*running) == expected

    asyncio.run(run())
    with LLM("storyteller", **INLINE | disk(tmp_path)) as llm:
        assert tokens(llm, [prompt(number) for number in range(4)]) == expected


@pytest.mark.timeout(180)
@pytest.mark.parametrize("call", ["pwritev", "preadv"])
def test_a_worker_that_dies_in_the_middle_of_a_block_changes_no_token(
    tmp_path: Path, expected: list[list[int]], call: str
) -> None:
    """While it stores the third block, or loads it; nobody finds what is half of one."""
    if call == "preadv":
        fill(tmp_path, expected)
    with LLM("storyteller", **OPTIONS | disk(tmp_path)) as llm:
        llm.collective_rpc(f"{worker_functions.__name__}:die_in_the_middle_of", args=(call, 3))
        first = llm._engine.pids["worker0"]
        for number in range(2):
            assert tokens(llm, [prompt(number)]) == expected[number : number + 1]
        while llm._engine.pids.get("worker0") in (None, first):
            time.sleep(0.01)
        for number in range(4):
            assert tokens(llm, [prompt(number)]) == expected[number : number + 1]
        if call == "preadv":
            assert transfers(llm)["num_loaded_blocks"] == 7, "by the next worker"
        wait_for_stores(llm, 0 if call == "preadv" else 5)
    with LLM("storyteller", **INLINE | disk(tmp_path)) as llm:
        assert tokens(llm, [prompt(number) for number in range(4)]) == expected
        assert transfers(llm)["num_loaded_blocks"] == 7


@pytest.mark.timeout(180)
def test_host_memory_outlives_workers_and_is_shared_by_replicas(expected: list[list[int]]) -> None:
    async def run() -> None:
        options = OPTIONS | {"kv_offloading_size": 0.02, "data_parallel_size": 2, "router": "round-robin"}
        async with AsyncLLM("storyteller", **options) as engine:

            async def stream(number: int) -> list[int]:
                found: list[int] = []
                async for output in engine.generate(prompt(number), PARAMS):
                    found = list(output.outputs[0].token_ids)
                return found

            async def counts(name: str) -> list[int]:
                """Of each replica; none while all are 0."""
                replicas = (await engine.stats())["scheduler"]["replicas"].values()
                found = [replica["scheduler"]["transfers"][name] for replica in replicas]
                return found if any(found) else []

            while any(one.state != "running" for one in engine._engine.health().replicas):
                await asyncio.sleep(0.05)  # the second one starts behind; a death in its start is no recovery
            while not await counts("num_stored_blocks"):
                assert await stream(0) == expected[0]
            while sum(await counts("num_stored_blocks")) < 7:
                await asyncio.sleep(0.01)
            for replica in engine._engine.health().replicas:
                os.kill(replica.pids["worker0"], signal.SIGKILL)
            while any(not one.num_recoveries or one.state != "running" for one in engine._engine.health().replicas):
                await asyncio.sleep(0.05)
            assert await asyncio.gather(*(stream(number) for number in range(4))) == expected
            assert min(await counts("num_loaded_blocks")) == 7
            assert sum(await counts("num_stored_blocks")) == 7

    asyncio.run(run())


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"kv_offloading_size": -1}, "from 0 to"),
        ({"kv_offloading_size": "4"}, "number of GiB"),
        ({"kv_offloading_backend": "lmcache"}, "leave it at 'native'"),
        ({"kv_disk_size": 1}, "needs kv_disk_path as well"),
        ({"kv_disk_path": "/tmp/x"}, "needs kv_disk_size as well"),
        ({"kv_offloading_size": 1, "enable_prefix_caching": False}, "enable_prefix_caching=False"),
        ({"kv_offloading_size": 1, "pipeline_parallel_size": 2}, "several stages"),
        ({"kv_offloading_size": 1, "tensor_parallel_size": 2, "nnodes": 2}, "ranks on several machines"),
        ({"kv_offloading_size": 1, "record": "/tmp/x"}, "record="),
        ({"kv_transfer_config": {"kv_connector": "LMCache", "kv_role": "kv_both"}}, "'LMCache' is not"),
        ({"kv_transfer_config": {"kv_connector": "OffloadingConnector", "kv_role": "kv_producer"}}, "kv_role"),
        ({"kv_transfer_config": {"kv_connector": "OffloadingConnector"}}, "cpu_bytes_to_use=None"),
        ({"kv_transfer_config": "{"}, "no JSON"),
    ],
)
def test_what_tiers_do_not_go_together_with_is_refused_by_name(arguments: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        EngineConfig.from_arguments("storyteller", **arguments)


def test_names_of_vllm() -> None:
    def size(**arguments: Any) -> int:
        return EngineConfig.from_arguments("storyteller", **arguments).cache.offloading_bytes

    connector = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}
    extra = {"kv_connector_extra_config": {"cpu_bytes_to_use": 1 << 30}}
    assert size() == size(swap_space=0) == 0
    assert size(kv_offloading_size=1) == size(swap_space=1) == size(kv_transfer_config=connector | extra) == 1 << 30
    with pytest.warns(UserWarning, match="swap_space=4 is taken and has no effect"):
        assert size(swap_space=4, enable_prefix_caching=False) == 0


def test_a_tier_that_is_too_small_says_what_it_needs(tmp_path: Path) -> None:
    with (
        pytest.raises(ConfigError, match=r"kv_disk_size=0.000100 \(GiB\) is too small"),
        LLM("storyteller", **INLINE | disk(tmp_path, kv_disk_size=0.0001)),
    ):
        pass


@pytest.mark.parametrize("name", ["kv_offloading_size", "swap_space"])
def test_a_tier_of_more_memory_than_there_is_is_refused(name: str) -> None:
    """Else the system would end a worker, once so many blocks were stored."""
    with pytest.raises(ConfigError, match=r"=100000 \(GiB\) is more than the \d+\.\d GiB that this machine has"):
        LLM("storyteller", **INLINE | {name: 100_000})


def test_a_folder_of_others_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with (
        pytest.raises(ConfigError, match="may be written to by other users"),
        LLM("storyteller", **INLINE | disk(tmp_path)),
    ):
        pass
