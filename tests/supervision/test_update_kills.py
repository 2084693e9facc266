"""kill -9 in each phase of an update of the weights: it has changed everything or nothing, and every later process agrees."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from actorllm import AsyncLLM
from actorllm.errors import CorruptModelError, EngineDeadError, EngineError
from tests.api import worker_functions
from tests.model.updates.weight_folders import ENGINE, PROMPT, STORYTELLER, changed, greedy, stream_of_fresh, write

pytestmark = pytest.mark.timeout(240)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("weights") / "one", changed(1))


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, list[int]]:
    return {"0": stream_of_fresh(STORYTELLER), "one": stream_of_fresh(folder)}


async def tell(llm: AsyncLLM, **arguments: Any) -> Any:
    async for output in llm.generate(PROMPT, greedy(), **arguments):
        last = output
    return last.outputs[0]


class Killer:
    """Kills actors of an engine when an update comes to a point: before it asks something of the schedulers, or behind that."""

    def __init__(self, llm: AsyncLLM, point: str, victims: tuple[str, ...]) -> None:
        self._engine: Any = llm._engine
        self._point, self._victims = point, victims
        self._ask = self._engine.ask_all_schedulers
        self._engine.ask_all_schedulers = self.ask
        self.has_killed = False

    def kill(self) -> None:
        if not self.has_killed:
            self.has_killed = True
            for name in self._victims:
                os.kill(self._engine.pids[name], signal.SIGKILL)

    async def _ask_and_kill(self, verb: str, **arguments: Any) -> Any:
        for name in self._victims:  # it hears of nothing any more, and is asked
            os.kill(self._engine.pids[name], signal.SIGSTOP)
        outcome: list[Any] = []

        async def ask() -> None:
            try:
                outcome.append(await self._ask(verb, **arguments))
            except EngineError as error:
                outcome.append(error)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask)
            await anyio.lowlevel.checkpoint()
            self.kill()
        if isinstance(outcome[0], EngineError):
            raise outcome[0]
        return outcome[0]

    async def ask(self, verb: str, **arguments: Any) -> Any:
        if self._point == f"during {verb}" and not self.has_killed:
            return await self._ask_and_kill(verb, **arguments)
        if self._point == f"before {verb}":
            self.kill()
        answer = await self._ask(verb, **arguments)
        if self._point == f"after {verb}":
            self.kill()
        return answer


@asynccontextmanager
async def killed(point: str, victims: tuple[str, ...], **engine: Any) -> AsyncIterator[tuple[AsyncLLM, Killer]]:
    async with AsyncLLM("storyteller", **(ENGINE | engine)) as llm:
        await llm.start()
        yield llm, Killer(llm, point, victims)


POINTS = [f"{when} {verb}" for verb in ("stage_weights", "commit_weights") for when in ("before", "during", "after")]


@pytest.mark.parametrize("victims", [("worker0",), ("scheduler",), ("scheduler", "worker0")])
@pytest.mark.parametrize("point", POINTS)
@pytest.mark.slow(reason="eighteen engines and three kills of each; the quick test has one")
async def test_an_update_has_changed_everything_or_nothing(
    point: str, victims: tuple[str, ...], folder: Path, expected: dict[str, list[int]]
) -> None:
    """And a worker that dies later begins with what is committed."""
    await check(point, victims, folder, expected)


MORE = pytest.mark.slow(reason="an engine and a kill; the quick case has the worker")


@pytest.mark.parametrize(
    "victims",
    [("worker0",), pytest.param(("scheduler",), marks=MORE), pytest.param(("scheduler", "worker0"), marks=MORE)],
)
async def test_a_stream_goes_on_over_an_update_and_a_kill_in_it(victims: tuple[str, ...], folder: Path) -> None:
    """With tokens of the old weights, then with those of a fresh engine that knows what is before them."""
    length = 900
    async with killed("during commit_weights", victims, max_model_len=1000) as (llm, killer):
        outputs: list[Any] = []
        has_begun = anyio.Event()

        async def listen() -> None:
            async for output in llm.generate(PROMPT, greedy(length)):
                outputs[:] = [output]
                has_begun.set()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(listen)
            await has_begun.wait()
            await llm.update_weights_from_disk(folder, version="one")
            assert killer.has_killed
            assert not outputs[0].finished
    found, prompt = outputs[0].outputs[0], outputs[0].prompt_token_ids
    (_, middle, before), (start, end, behind) = found.weight_versions
    assert (before, behind, start, end) == ("0", "one", middle, length)
    known = [*prompt, *found.token_ids[:middle]]
    assert found.token_ids[:middle] == stream_of_fresh(STORYTELLER, PROMPT, middle, max_model_len=1000)
    fresh = stream_of_fresh(folder, {"prompt_token_ids": known}, 40, max_model_len=1000)
    assert found.token_ids[middle : middle + 40] == fresh


async def test_a_worker_dies_while_an_update_is_committed(folder: Path, expected: dict[str, list[int]]) -> None:
    async with killed("during commit_weights", ("worker0",)) as (llm, killer):
        assert (await tell(llm)).token_ids == expected["0"]
        await llm.update_weights_from_disk(folder, version="one")
        assert killer.has_killed
        assert (await tell(llm)).token_ids == expected["one"]


async def check(point: str, victims: tuple[str, ...], folder: Path, expected: dict[str, list[int]]) -> None:
    async with killed(point, victims) as (llm, killer):
        await tell(llm)  # its prefix is cached
        version = "one"
        try:
            await llm.update_weights_from_disk(folder, version="one")
        except EngineError as error:
            version = "0"
            said = str(error)
        if version == "0":
            assert "nothing was changed" in said
            assert "stage" in point
        assert killer.has_killed
        found = await tell(llm)
        assert found.weight_versions[-1].version == version == llm.weight_version
        assert found.token_ids == expected[version]
        os.kill(llm._engine.pids["worker0"], signal.SIGKILL)
        assert (await tell(llm)).token_ids == expected[version]
        await llm.update_weights_from_tensors(changed(0), version="back")
        assert (await tell(llm)).token_ids == expected["0"]
        os.kill(llm._engine.pids["worker0"], signal.SIGKILL)
        os.kill(llm._engine.pids["scheduler"], signal.SIGKILL)
        found = await tell(llm)
        assert (found.token_ids, found.weight_versions[-1].version) == (expected["0"], "back")


@pytest.mark.slow(reason="an engine, and five starts of its worker")
async def test_a_worker_dies_while_memory_of_versions_before_serves_the_next_ones(
    expected: dict[str, list[int]],
) -> None:
    """It never begins with what is being written there."""
    async with AsyncLLM("storyteller", **ENGINE) as llm:
        for seed in (0, 1, 0, 1):
            await llm.update_weights_from_tensors(changed(seed), version=str(seed))
            os.kill(llm._engine.pids["worker0"], signal.SIGKILL)
            found = await tell(llm)
            assert found.token_ids == expected["one" if seed else "0"]
            assert found.weight_versions[-1].version == str(seed)
        killer = Killer(llm, "during stage_weights", ("worker0",))
        with pytest.raises(EngineError, match="nothing was changed"):
            await llm.update_weights_from_tensors(changed(0), version="lost")
        assert killer.has_killed
        assert (await tell(llm)).token_ids == expected["one"]
        await llm.update_weights_from_tensors(changed(0), version="back")
        found = await tell(llm)
        assert (found.token_ids, found.weight_versions[-1].version) == (expected["0"], "back")


@pytest.mark.slow(reason="two replicas, and a start of a worker")
async def test_all_ranks_and_all_replicas_change_or_none(folder: Path, expected: dict[str, list[int]]) -> None:
    """Two replicas; a tensor that does not fit changes neither."""
    async with AsyncLLM("storyteller", data_parallel_size=2, **ENGINE) as llm:
        with pytest.raises(CorruptModelError, match="has shape"):
            await llm.update_weights_from_tensors({"model.norm.weight": changed(1)["model.norm.weight"][:5]})
        for number in range(2):
            assert (await tell(llm, data_parallel_rank=number)).token_ids == expected["0"]
        await llm.update_weights_from_disk(folder, version="one")
        for number in range(2):
            found = await tell(llm, data_parallel_rank=number)
            assert (found.token_ids, found.weight_versions[-1].version) == (expected["one"], "one")
        os.kill(llm._engine.pids["replica1/worker0"], signal.SIGKILL)
        assert (await tell(llm, data_parallel_rank=1)).token_ids == expected["one"]


@pytest.mark.parametrize("several", ["data_parallel_size", "tensor_parallel_size"])
@pytest.mark.slow(reason="two workers")
async def test_one_rank_that_cannot_use_the_weights_keeps_all_from_them(folder: Path, several: str) -> None:
    async with AsyncLLM("storyteller", **ENGINE, **{several: 2}) as llm:
        numbers = range(2 if several == "data_parallel_size" else 1)

        async def told() -> list[tuple[str, list[int]]]:
            found = [await tell(llm, data_parallel_rank=number) for number in numbers]
            return [(one.weight_versions[-1].version, one.token_ids) for one in found]

        before = await told()
        assert [version for version, _ in before] == ["0"] * len(numbers)
        assert await llm.collective_rpc(f"{worker_functions.__name__}:refuse_weights_once") == [False, True]
        with pytest.raises(CorruptModelError, match="planted"):
            await llm.update_weights_from_disk(folder, version="one")
        assert await told() == before
        await llm.update_weights_from_disk(folder, version="one")
        after = await told()
        assert [version for version, _ in after] == ["one"] * len(numbers)
        assert all(new != old for (_, new), (_, old) in zip(after, before, strict=True))


@pytest.mark.slow(reason="three replicas")
async def test_a_replica_that_is_added_later_has_the_version(folder: Path, expected: dict[str, list[int]]) -> None:
    async with AsyncLLM("storyteller", data_parallel_size=2, **ENGINE) as llm:
        await llm.update_weights_from_tensors(changed(1), version="one")
        await llm.scale(3)
        found = await tell(llm, data_parallel_rank=2)
        assert (found.token_ids, found.weight_versions[-1].version) == (expected["one"], "one")


@pytest.mark.slow(reason="two engines of two ranks, and a restart")
async def test_ranks_take_their_parts(folder: Path) -> None:
    """Sharded over two ranks, which are started again together."""
    prompts = {"tensor_parallel_size": 2}
    async with AsyncLLM(str(folder), **(ENGINE | prompts)) as fresh:
        wanted = (await tell(fresh)).token_ids
    async with AsyncLLM("storyteller", **(ENGINE | prompts)) as llm:
        assert (await tell(llm)).token_ids != wanted
        await llm.update_weights_from_tensors(changed(1))
        assert (await tell(llm)).token_ids == wanted
        os.kill(llm._engine.pids["worker1"], signal.SIGKILL)
        assert (await tell(llm)).token_ids == wanted


@pytest.mark.slow(reason="workers start again until the engine gives up")
async def test_a_folder_that_was_written_to_since_is_not_taken_for_its_version(folder: Path, tmp_path: Path) -> None:
    """A worker that is started again must not compute with other weights than the version says."""
    own = write(tmp_path / "own", changed(2))
    async with AsyncLLM("storyteller", **ENGINE) as llm:
        await llm.update_weights_from_disk(own, version="own")
        wanted = (await tell(llm)).token_ids
        (own / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
        await llm.reset_prefix_cache()
        assert (await tell(llm)).token_ids == wanted, "what runs has read it"
        os.kill(llm._engine.pids["worker0"], signal.SIGKILL)
        with pytest.raises(EngineDeadError, match="has changed since version 'own'"):
            await tell(llm)
