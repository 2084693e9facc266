"""Updates of the weights through the front doors: streams of the new weights, what is kept of the old ones, what is refused."""

from __future__ import annotations

import ctypes
import os
import random
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
from safetensors.torch import save_file

from actorllm import LLM, AsyncLLM, LLMEngine, LoRARequest, SamplingParams
from actorllm.client.weight_memory import WeightFile
from actorllm.errors import CollectiveCallError, CorruptModelError, EngineError, InvalidParameterError
from actorllm.kvcache import prefix_index
from actorllm.model.updates.tensor_files import TensorFile
from actorllm.scheduling import prefix_cache
from actorllm.scheduling.prefix_cache import PrefixCache
from actorllm.types.weight_version import WeightVersionSpan
from tests.model.updates.weight_folders import ENGINE, PROMPT, STORYTELLER, changed, greedy, stream_of_fresh, write

pytestmark = pytest.mark.usefixtures("computed_as_asked")

M_MMAP_THRESHOLD = -3
"""Of malloc.h."""


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The storyteller, and two models like it."""
    root = tmp_path_factory.mktemp("weights")
    return [STORYTELLER, *(write(root / str(seed), changed(seed)) for seed in (1, 2))]


@pytest.fixture(scope="module")
def expected(folders: list[Path]) -> list[list[int]]:
    """What fresh engines say with each of them."""
    streams = [stream_of_fresh(folder) for folder in folders]
    assert len({tuple(stream) for stream in streams}) == len(streams), "each makes a difference"
    return streams


@pytest.fixture(scope="module")
def shared_llm() -> Iterator[LLM]:
    with LLM("storyteller", topology="inline", **ENGINE) as engine:
        yield engine


@pytest.fixture
def llm(shared_llm: LLM) -> Iterator[LLM]:
    yield shared_llm
    shared_llm.update_weights_from_disk(STORYTELLER, version="0")


def tell(llm: LLM, prompt: Any = PROMPT, num_tokens: int = 24, **more: Any) -> Any:
    (output,) = llm.generate(prompt, greedy(num_tokens), use_tqdm=False, **more)
    return output


def test_tokens_after_an_update_are_those_of_a_fresh_engine(
    llm: LLM, folders: list[Path], expected: list[list[int]]
) -> None:
    for number in (1, 2, 0, 1):
        version = llm.update_weights_from_disk(folders[number], version=f"v{number}")
        output = tell(llm)
        assert (version, llm.weight_version) == (f"v{number}",) * 2
        assert output.outputs[0].token_ids == expected[number]
        assert output.outputs[0].weight_versions == [WeightVersionSpan(0, 24, f"v{number}")]
        assert output.num_cached_tokens == 0, "no KV of other weights"
        assert tell(llm).num_cached_tokens > 0


def test_tensors_count_in_place_of_those_before_and_others_stay(
    llm: LLM, folders: list[Path], expected: list[list[int]], tmp_path: Path
) -> None:
    """Of float64, too, which the model computes in its own type."""
    llm.update_weights_from_tensors({name: value.double() for name, value in changed(1).items()})
    assert tell(llm).outputs[0].token_ids == expected[1]
    name = "model.layers.1.mlp.down_proj.weight"
    mixed = {**changed(1), name: changed(2)[name]}
    llm.update_weights_from_tensors({name: mixed[name]})
    assert tell(llm).outputs[0].token_ids == stream_of_fresh(write(tmp_path / "mixed", mixed))
    llm.update_weights_from_disk(folders[2])
    assert tell(llm).outputs[0].token_ids == expected[2], "tensors of before do not lie over another folder"


def test_a_state_dict_of_transformers_is_taken_as_it_is(
    llm: LLM, folders: list[Path], expected: list[list[int]]
) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folders[2], dtype=torch.float32)
    llm.update_weights_from_tensors(model.state_dict())
    assert tell(llm).outputs[0].token_ids == expected[2]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model.norm.weight": torch.ones(3)}, "'model.norm.weight' has shape"),
        ({"model.nrm.weight": torch.ones(3)}, "'model.nrm.weight'"),
        ({"model.norm.weight": torch.ones(256, dtype=torch.int32)}, "'model.norm.weight' is torch.int32"),
        ({"model.norm.weight": torch.full((256,), torch.nan)}, "'model.norm.weight' holds NaN"),
        (
            {"model.norm.weight": torch.full((256,), 1e300, dtype=torch.float64)},
            "holds NaN or infinity, as torch.float32",
        ),
    ],
)
def test_tensors_that_do_not_fit_change_nothing(
    llm: LLM, expected: list[list[int]], change: dict[str, Any], said: str
) -> None:
    before = llm.weight_version
    with pytest.raises(CorruptModelError, match=said):
        llm.update_weights_from_tensors(change)
    output = tell(llm)
    assert (llm.weight_version, output.outputs[0].token_ids) == (before, expected[0])


def test_folders_that_do_not_fit_change_nothing(llm: LLM, expected: list[list[int]], tmp_path: Path) -> None:
    tensors = changed(1)
    del tensors["model.norm.weight"]
    (tmp_path / "lacking").mkdir()
    save_file(tensors, tmp_path / "lacking" / "model.safetensors")
    (tmp_path / "empty").mkdir()
    (tmp_path / "pipe").mkdir()
    os.mkfifo(tmp_path / "pipe" / "model.safetensors")
    torn = write(tmp_path / "torn", changed(1))
    os.truncate(torn / "model.safetensors", 100_000)
    other = write(tmp_path / "other", changed(1))
    config = (other / "config.json").read_text().replace('"rms_norm_eps"', '"rms_norm_eps": 0.5, "old"')
    (other / "config.json").write_text(config)
    for folder, error, said in (
        ("lacking", CorruptModelError, "model.norm.weight"),
        ("empty", InvalidParameterError, "has no safetensors files"),
        ("pipe", CorruptModelError, "model.safetensors is no regular file"),
        ("nowhere", InvalidParameterError, "is no folder"),
        ("torn", CorruptModelError, "model.safetensors"),
        ("other", CorruptModelError, "describes another model"),
    ):
        with pytest.raises(error, match=said):
            llm.update_weights_from_disk(tmp_path / folder)
    for arguments in ({"running": "stop"}, {"version": ""}, {"version": "x" * 1000}, {"version": 3}):
        with pytest.raises(InvalidParameterError, match=next(iter(arguments))):
            llm.update_weights_from_disk(STORYTELLER, **arguments)  # type: ignore[arg-type]
    for transport in ("cuda_ipc", "nccl"):
        with pytest.raises(InvalidParameterError, match=r"is on cpu, .*'shm'"):
            llm.update_weights_from_tensors(changed(1), transport=transport)
    assert tell(llm).outputs[0].token_ids == expected[0]


def test_tensors_come_as_a_trainer_has_them(llm: LLM, expected: list[list[int]]) -> None:
    """Parameters, views and another precision, and a head that is tied to the embedding, which is not read."""
    given: dict[str, torch.Tensor] = {
        name: (torch.nn.Parameter(tensor), tensor.double(), tensor.t().contiguous().t())[
            i % 3 if tensor.dim() == 2 else 0
        ]
        for i, (name, tensor) in enumerate(changed(1).items())
    }
    assert not all(tensor.is_contiguous() for tensor in given.values())
    llm.update_weights_from_tensors(given | {"lm_head.weight": 2 * changed(1)["model.embed_tokens.weight"]})
    assert tell(llm).outputs[0].token_ids == expected[1]


def test_parts_count_together_by_the_verbs_of_vllm(llm: LLM, expected: list[list[int]]) -> None:
    tensors = list(changed(1).items())
    llm.init_weight_transfer_engine({"init_info": {}})
    llm.start_weight_update()
    llm.update_weights({"update_info": {"tensors": {tensors[0][0]: torch.ones(3)}}})
    llm.start_weight_update(is_checkpoint_format=True)  # the part that does not fit is forgotten
    for i in range(0, len(tensors), 5):
        llm.update_weights({"update_info": {"tensors": dict(tensors[i : i + 5])}})
        assert tell(llm).outputs[0].token_ids == expected[0], "nothing changes before all is there"
    llm.finish_weight_update("step-1")
    output = tell(llm)
    assert (llm.get_weight_version(), output.outputs[0].token_ids) == ("step-1", expected[1])
    llm.update_weight_version("other")
    assert tell(llm).outputs[0].weight_versions == [WeightVersionSpan(0, 24, "other")]
    assert tell(llm).num_cached_tokens > 0, "the same weights by another name"


@pytest.fixture
def copying_threads(monkeypatch: pytest.MonkeyPatch) -> list[threading.Thread]:
    """Where what stays of earlier tensors was copied."""
    threads: list[threading.Thread] = []
    right = TensorFile.without

    def without(self: TensorFile, names: Any) -> TensorFile:
        threads.append(threading.current_thread())
        return right(self, names)

    monkeypatch.setattr(TensorFile, "without", without)
    return threads


async def test_a_part_is_laid_over_those_before_it_beside_the_loop(copying_threads: list[threading.Thread]) -> None:
    async with AsyncLLM("storyteller", topology="inline", **ENGINE) as llm:
        await llm.start_weight_update()
        await llm.update_weights({"update_info": {"tensors": {"a": torch.ones(2), "b": torch.ones(2)}}})
        await llm.update_weights({"update_info": {"tensors": {"a": torch.ones(2)}}})
        await llm.shutdown_weight_transfer_engine()
    assert len(copying_threads) == 1
    assert copying_threads[0] is not threading.current_thread()


async def test_an_update_is_laid_over_those_before_it_beside_the_loops(copying_threads: list[threading.Thread]) -> None:
    """Also that of the engine, whose streams go on."""
    names = ("model.norm.weight", "model.layers.0.input_layernorm.weight")
    async with AsyncLLM("storyteller", topology="inline", **ENGINE) as llm:
        for given in (names, names[:1]):
            await llm.update_weights_from_tensors({name: changed(1)[name] for name in given})
    assert len(copying_threads) == 1
    assert "actorllm" not in copying_threads[0].name
    assert copying_threads[0] is not threading.current_thread()


async def test_what_an_update_that_fails_has_brought_is_closed_beside_the_loops(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It takes the system a while to take the memory back, and streams go on."""
    threads: list[threading.Thread] = []
    right = TensorFile.close

    def close(self: TensorFile) -> None:
        threads.append(threading.current_thread())
        right(self)

    async with AsyncLLM("storyteller", topology="inline", **ENGINE) as llm:
        with monkeypatch.context() as patch:
            patch.setattr(TensorFile, "close", close)
            with pytest.raises(CorruptModelError, match="has shape"):
                await llm.update_weights_from_tensors({"model.norm.weight": torch.ones(3)})
    assert threads
    assert not any("actorllm" in thread.name or thread is threading.current_thread() for thread in threads)


async def test_parts_that_are_forgotten_are_given_back_beside_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[threading.Thread] = []
    right = WeightFile.__del__

    def give_back(self: WeightFile) -> None:
        if self.fd >= 0:
            threads.append(threading.current_thread())
        right(self)

    monkeypatch.setattr(WeightFile, "__del__", give_back)
    async with AsyncLLM("storyteller", topology="inline", **ENGINE) as llm:
        for forget in (llm.start_weight_update, llm.shutdown_weight_transfer_engine):
            await llm.start_weight_update()
            await llm.update_weights({"update_info": {"tensors": {"a": torch.ones(2)}}})
            await forget()
    assert len(threads) == 2
    assert threading.current_thread() not in threads


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda llm: llm.update_weights({"update_info": {"tensors": {}}}), "call start_weight_update first"),
        (lambda llm: llm.finish_weight_update(), "call start_weight_update first"),
        (lambda llm: (llm.start_weight_update(), llm.finish_weight_update()), "call update_weights before"),
        (
            lambda llm: (llm.start_weight_update(), llm.update_weights({"update_info": {"names": []}})),
            "names=\\[\\] must be a list of 1 to",
        ),
        (lambda llm: (llm.start_weight_update(), llm.update_weights(3)), "must be a mapping"),
        (
            lambda llm: (llm.start_weight_update(), llm.update_weights({"files": []})),
            "must be a list of 1 to 1000 paths",
        ),
        (lambda llm: (llm.start_weight_update(), llm.update_weights({"files": ["/dev/zero"]})), "is no file"),
        (
            lambda llm: llm.start_weight_update(is_checkpoint_format=False),
            "is_checkpoint_format=False: tensors come by",
        ),
        (
            lambda llm: (llm.start_weight_update(), llm.update_weights({"files": [], "is_checkpoint_format": False})),
            "is_checkpoint_format=False: tensors come by",
        ),
        (lambda llm: llm.init_weight_transfer_engine({"init_info": {"backend": "nccl"}}), "master_address=None"),
        (lambda llm: llm.init_weight_transfer_engine({"init_info": {"master_port": 1}}), "master_port"),
        (lambda llm: llm.update_weight_version(""), "version=''"),
    ],
)
def test_verbs_out_of_order_and_other_backends_are_refused(llm: LLM, call: Any, said: str) -> None:
    llm.shutdown_weight_transfer_engine()
    with pytest.raises(InvalidParameterError, match=said):
        call(llm)


def test_several_sequences_tell_their_versions(llm: LLM, folders: list[Path]) -> None:
    llm.update_weights_from_disk(folders[1], version="one")
    params = SamplingParams(n=3, temperature=1.0, seed=1, max_tokens=7, ignore_eos=True)
    (output,) = llm.generate(PROMPT, params, use_tqdm=False)
    assert [one.weight_versions for one in output.outputs] == [[WeightVersionSpan(0, 7, "one")]] * 3


def test_an_omitted_version_in_block_hashes_and_kept_kv_would_be_seen(
    llm: LLM, folders: list[Path], expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hashes without it find KV of other weights that is not forgotten: the assertions above can fail."""
    whole = prefix_index.extra_key

    def without(salt: str | None = None, adapter: str | None = None, weights: str = "", kv: str = "") -> bytes:
        return whole(salt, adapter)

    monkeypatch.setattr(prefix_cache, "extra_key", without)
    monkeypatch.setattr("actorllm.client.submit.extra_key", without)
    llm.reset_prefix_cache()
    tell(llm)
    with monkeypatch.context() as patch:
        patch.setattr(PrefixCache, "reset", lambda self, running: None)
        llm.update_weights_from_disk(folders[1])
    assert tell(llm).num_cached_tokens > 0
    llm.update_weights_from_disk(folders[2])
    assert tell(llm).num_cached_tokens == 0, "KV of weights before is forgotten, whatever its hashes"
    llm.reset_prefix_cache()


@pytest.mark.parametrize("arguments", [{"quantization": "int8"}, {"dtype": "bfloat16"}])
def test_other_layouts_are_staged_as_they_are_loaded(arguments: dict[str, Any], folders: list[Path]) -> None:
    wanted = stream_of_fresh(folders[1], **arguments)
    with LLM("storyteller", topology="inline", **(ENGINE | arguments)) as llm:
        assert tell(llm).outputs[0].token_ids != wanted
        llm.update_weights_from_tensors(changed(1))
        assert tell(llm).outputs[0].token_ids == wanted


def test_adapters_are_added_to_the_new_weights(folders: list[Path], tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    from tests.model.adapters.lora_folders import linear_layers, shapes_of, write_adapter

    layers = shapes_of(linear_layers(AutoModelForCausalLM.from_pretrained(STORYTELLER)))
    write_adapter(tmp_path / "a", layers, seed=1, size=1.0, r=8)
    adapter = LoRARequest("a", 1, str(tmp_path / "a"))
    engine = ENGINE | {"enable_lora": True}
    with LLM(str(folders[1]), topology="inline", **engine) as fresh:
        wanted = tell(fresh, lora_request=adapter).outputs[0].token_ids
        base = tell(fresh).outputs[0].token_ids
    with LLM("storyteller", topology="inline", **engine) as llm:
        assert tell(llm, lora_request=adapter).outputs[0].token_ids != wanted
        llm.update_weights_from_disk(folders[1])
        assert tell(llm, lora_request=adapter).outputs[0].token_ids == wanted
        assert tell(llm).outputs[0].token_ids == base


def test_models_that_run_through_transformers_are_updated_too(folders: list[Path], expected: list[list[int]]) -> None:
    with LLM("storyteller", topology="inline", model_impl="transformers", **ENGINE) as llm:
        assert tell(llm).outputs[0].token_ids == expected[0]
        llm.update_weights_from_disk(folders[1])
        assert tell(llm).outputs[0].token_ids == expected[1]
        name = "model.layers.1.mlp.down_proj.weight"
        llm.update_weights_from_tensors({name: changed(2)[name]})
        llm.update_weights_from_tensors({key: value for key, value in changed(2).items() if key != name})
        assert tell(llm).outputs[0].token_ids == expected[2], "tensors of two updates count together"
        for tensors, said in {
            "model.norm.weight": "has shape",
            "model.norm.bias": "does not know",
            "model.embed_tokens.weight": "NaN or infinity",
        }.items():
            value = torch.ones(3) if "norm" in tensors else torch.full_like(changed(0)[tensors], float("nan"))
            with pytest.raises(CorruptModelError, match=said):
                llm.update_weights_from_tensors({tensors: value})
        assert tell(llm).outputs[0].token_ids == expected[2]


def drive(engine: LLMEngine, num_tokens: int) -> list[Any]:
    """Step until every open request has so many tokens, or has ended; the last output of each."""
    seen: dict[str, Any] = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            seen[output.request_id] = output
        if seen and all(len(one.outputs[0].token_ids) >= num_tokens or one.finished for one in seen.values()):
            break
    return [seen[name] for name in sorted(seen)]


@pytest.mark.parametrize("running", ["recompute", "keep", "abort"])
def test_running_requests_do_as_asked(folders: list[Path], running: Any) -> None:
    """Between two steps of LLMEngine, where it is known how many tokens there are."""
    engine = LLMEngine("storyteller", topology="inline", **ENGINE)
    try:
        engine.add_request("a", PROMPT, greedy(24))
        (output,) = drive(engine, 10)
        before = output.outputs[0].token_ids
        engine.update_weights_from_disk(folders[1], version="one", running=running)
        (output,) = drive(engine, 100)
        found = output.outputs[0]
        assert found.token_ids[: len(before)] == before
        if running == "abort":
            assert found.finish_reason == "abort"
            assert found.weight_versions == [WeightVersionSpan(0, len(found.token_ids), "0")]
            return
        assert found.weight_versions == [
            WeightVersionSpan(0, len(before), "0"),
            WeightVersionSpan(len(before), 24, "one"),
        ]
        known = output.prompt_token_ids + before
        fresh = stream_of_fresh(folders[1], {"prompt_token_ids": known}, 24 - len(before))
        if running == "recompute":
            assert found.token_ids[len(before) :] == fresh
        else:
            assert found.token_ids[len(before) :] != fresh, "it goes on with the KV that it has"
        engine.add_request("b", {"prompt_token_ids": known}, greedy(4))
        (output,) = drive(engine, 100)
        assert output.outputs[0].token_ids == fresh[:4], "nothing of mixed KV is found"
    finally:
        engine.shutdown()


def scored(folder: Path, prompt: list[int], streams: list[list[int]]) -> list[list[float]]:
    """Log-probabilities of tokens behind a prompt, by an engine that has these weights from the start."""
    prompts: list[Any] = [{"prompt_token_ids": [*prompt, *tokens]} for tokens in streams]
    with LLM(str(folder), topology="inline", **ENGINE) as fresh:
        outputs = fresh.generate(prompts, greedy(1, prompt_logprobs=0), use_tqdm=False)
    told = [
        zip(output.prompt_logprobs[len(prompt) :], tokens, strict=True)
        for output, tokens in zip(outputs, streams, strict=True)
    ]
    return [[by_id[token].logprob for by_id, token in one] for one in told]


def test_log_probabilities_of_siblings_are_of_the_version_that_sampled_each_token(folders: list[Path]) -> None:
    """Rollouts that an update divides: some have ended before it, some go on over it, some begin behind it."""
    engine = LLMEngine("storyteller", topology="inline", max_num_seqs=2, **ENGINE)
    params = SamplingParams(n=5, temperature=1.0, seed=3, max_tokens=12, ignore_eos=True, logprobs=0)
    try:
        engine.add_request("a", PROMPT, params)
        outputs: dict[int, Any] = {}
        num_steps = 0
        while engine.has_unfinished_requests():
            num_steps += 1
            if num_steps == 20:
                engine.update_weights_from_disk(folders[1], version="one")
            output: Any
            for output in engine.step():
                prompt = output.prompt_token_ids
                outputs |= {one.index: one for one in output.outputs}
    finally:
        engine.shutdown()
    assert len(outputs) == 5
    found = {tuple(span.version for span in one.weight_versions) for one in outputs.values()}
    assert found == {("0",), ("0", "one"), ("one",)}
    streams = [outputs[i].token_ids for i in range(5)]
    wanted = {version: scored(folder, prompt, streams) for version, folder in zip(("0", "one"), folders, strict=False)}
    for i, one in outputs.items():
        told = [by_id[token].logprob for by_id, token in zip(one.logprobs, one.token_ids, strict=True)]
        assert one.weight_versions[-1].end == 12
        for start, end, version in one.weight_versions:
            assert told[start:end] == pytest.approx(wanted[version][i][start:end], abs=1e-3)


async def test_streams_go_on_over_updates_and_one_runs_at_a_time(
    folders: list[Path], expected: list[list[int]]
) -> None:
    async with AsyncLLM("storyteller", topology="inline", **ENGINE) as llm:
        outputs: list[Any] = []
        has_begun = anyio.Event()

        async def listen() -> None:
            async for output in llm.generate(PROMPT, greedy(150)):
                outputs[:] = [output]
                has_begun.set()

        errors: list[Exception] = []

        async def update(number: int) -> None:
            try:
                await llm.update_weights_from_disk(folders[number], version=str(number))
            except EngineError as error:
                errors.append(error)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(listen)
            await has_begun.wait()
            tasks.start_soon(update, 1)
            tasks.start_soon(update, 2)
        assert len(errors) <= 1
        spans = outputs[-1].outputs[0].weight_versions
        assert spans[0].version == "0"
        assert [s.start for s in spans[1:]] == [s.end for s in spans[:-1]]
        assert spans[-1].end == 150
        number = int(llm.weight_version)
        async for output in llm.generate(PROMPT, greedy()):
            last = output
        assert last.outputs[0].token_ids == expected[number]


def test_memory_of_the_version_before_serves_the_next_one(llm: LLM, expected: list[list[int]]) -> None:
    """In the type that is computed with: what a worker keeps is a copy, or the memory would not be free."""
    updates: Any = llm._engine._weight_updates
    used = []
    for number in (1, 2, 0, 1, 2):
        llm.update_weights_from_tensors({name: value.float() for name, value in changed(number).items()})
        (file,) = updates._tensor_files
        used.append(os.stat(file.path).st_ino)
        assert tell(llm).outputs[0].token_ids == expected[number]
    assert used[2:] == used[:3]
    assert used[0] != used[1]
    with pytest.raises(CorruptModelError, match="has shape"):
        llm.update_weights_from_tensors(changed(1) | {"model.norm.weight": torch.ones(3)})
    assert tell(llm).outputs[0].token_ids == expected[2]
    assert updates.memory.num_kept_bytes > 0
    llm.update_weights_from_disk(STORYTELLER)
    assert updates.memory.num_kept_bytes == 0, "nothing tells that tensors come again"


def test_tensors_of_every_second_update_take_the_same_memory() -> None:
    """Nothing of a worker reads the file of a version before: its embeddings are a view of the file that counts."""
    with LLM("storyteller", topology="inline", **ENGINE) as engine:
        updates = engine._engine._weight_updates
        found = []
        for seed in (1, 2, 1, 2, 1):
            engine.update_weights_from_tensors(changed(seed))
            (path,) = updates.current.overlays
            found.append(os.stat(path).st_ino)
    assert found[0] != found[1]
    assert found == [*found[:2], *found[:2], found[0]]


def held_by_the_process() -> tuple[int, int]:
    """Its open descriptors, and resident bytes without those that the allocator keeps for later."""
    ctypes.CDLL(None).malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return len(os.listdir("/proc/self/fd")), pages * os.sysconf("SC_PAGE_SIZE")


def check_no_leak(llm: LLM, num_updates: int) -> None:
    tensors = [changed(seed) for seed in range(3)]
    some = [dict(list(one.items())[::2]) for one in tensors]

    def update(turn: int, kind: int) -> None:
        if kind == 0:
            llm.update_weights_from_disk(STORYTELLER)
        else:
            llm.update_weights_from_tensors((tensors if kind == 1 else some)[turn % 3])
        tell(llm, num_tokens=2)

    def held_after(num_updates: int) -> tuple[int, int]:
        for turn in range(num_updates):
            update(turn, random.Random(turn).randrange(3))
        update(0, 0)  # weights from tensors are kept in memory files, of which there may be several
        return held_by_the_process()

    open_files, size = held_after(12)
    open_files_later, size_later = held_after(num_updates)
    assert open_files_later <= open_files
    assert size_later < size + (64 << 20)


def test_updates_leak_nothing(llm: LLM) -> None:
    check_no_leak(llm, 50)


@pytest.mark.slow(reason="a thousand updates; the quick test has fifty")
@pytest.mark.timeout(1800)
def test_a_thousand_updates_leak_nothing(llm: LLM) -> None:
    # Tensors of a size of their own leave holes between others, which the allocator keeps. From here on they are mapped.
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 16)
    check_no_leak(llm, 1000)


@pytest.mark.slow(reason="ten thousand requests and two hundred updates")
@pytest.mark.timeout(900)
def test_no_stale_prefix_over_random_requests_with_updates_between(folders: list[Path]) -> None:
    """Every stream is that of an engine which has these weights and no prefix cache."""
    rng = random.Random(3)
    stems = [[rng.randrange(4000) for _ in range(80)] for _ in range(6)]
    prompts = [
        stem[: rng.randrange(17, 80)] + [rng.randrange(4000) for _ in range(rng.randrange(3))] for stem in stems * 5
    ]
    wanted = []
    for folder in folders:
        with LLM(str(folder), topology="inline", enable_prefix_caching=False, **ENGINE) as fresh:
            outputs = fresh.generate([{"prompt_token_ids": p} for p in prompts], greedy(4), use_tqdm=False)
            wanted.append([output.outputs[0].token_ids for output in outputs])
    num_cached = 0
    with LLM("storyteller", topology="inline", **ENGINE) as llm:
        for _ in range(200):
            number = rng.randrange(3)
            llm.update_weights_from_disk(folders[number])
            chosen = [rng.randrange(len(prompts)) for _ in range(50)]
            outputs = llm.generate([{"prompt_token_ids": prompts[i]} for i in chosen], greedy(4), use_tqdm=False)
            num_cached += sum(output.num_cached_tokens for output in outputs)
            assert [output.outputs[0].token_ids for output in outputs] == [wanted[number][i] for i in chosen]
    assert num_cached > 10_000


def test_a_trainer_finds_the_model_where_vllm_has_it(llm: LLM, expected: list[list[int]]) -> None:
    model = llm.llm_engine.model_executor.driver_worker.model_runner.model
    tensors = changed(1)
    assert model.load_weights(iter(tensors.items())) == set(tensors)
    assert tell(llm).outputs[0].token_ids == expected[1]
    for pair in changed(2).items():  # as trainers do that gather one parameter at a time
        model.load_weights([pair])
    assert tell(llm).outputs[0].token_ids == expected[2]
    worker = llm.llm_engine.model_executor.driver_worker.worker  # as wrappers of workers have it
    worker.model_runner.model.load_weights(weights=changed(1).items())
    assert tell(llm).outputs[0].token_ids == expected[1]
    with pytest.raises(AttributeError, match="no 'named_parameters' here: call a function on it by apply_model"):
        _ = model.named_parameters


def test_weights_that_come_after_the_start_are_read_by_vllms_two_calls(expected: list[list[int]]) -> None:
    with LLM("storyteller", topology="inline", load_format="dummy", **ENGINE) as engine:
        assert tell(engine).outputs[0].token_ids != expected[0]
        assert engine.collective_rpc("update_config", args=({"load_config": {"load_format": "auto"}},)) == [None]
        assert engine.collective_rpc("reload_weights") == [None]
        assert tell(engine).outputs[0].token_ids == expected[0]
        for overrides in (
            {"model_config": {}},
            {"load_config": {"device": "cpu"}},
            {"load_config": {"load_format": "pt"}},
        ):
            with pytest.raises(InvalidParameterError, match=r"update_config: .*load_format"):
                engine.collective_rpc("update_config", args=(overrides,))
        with pytest.raises(InvalidParameterError, match=r"use update_weights_from_disk\(folder\)"):
            engine.collective_rpc("reload_weights", args=["elsewhere"])


def test_weights_that_an_extension_of_the_worker_gives_the_model_are_a_version(
    folders: list[Path], expected: list[list[int]]
) -> None:
    """As trainers for vLLM do it; nothing of before is found in the prefix cache."""
    extension = "tests.api.worker_functions:WeightExtension"
    with LLM("storyteller", topology="inline", worker_extension_cls=extension, **ENGINE) as llm:
        assert tell(llm).outputs[0].token_ids == expected[0]
        path = str(folders[1] / "model.safetensors")
        with pytest.raises(CollectiveCallError, match="not here"):
            llm.collective_rpc("update_and_fail", args=(path,))
        assert (tell(llm).outputs[0].token_ids, llm.weight_version) == (expected[0], "0")
        assert llm.collective_rpc("update_weights_from_path", args=(path,)) == [len(changed(1))]
        output = tell(llm)
        assert output.outputs[0].token_ids == expected[1]
        assert output.outputs[0].weight_versions == [WeightVersionSpan(0, 24, "1")]
        name = "model.norm.weight"
        llm.collective_rpc("update_weight", args=(name, changed(2)[name]))
        llm.update_weights_from_tensors({key: value for key, value in changed(2).items() if key != name})
        assert tell(llm).outputs[0].token_ids == expected[2], "tensors of both updates count together"
        with pytest.raises(CorruptModelError, match="has shape"):
            llm.collective_rpc("update_weight", args=(name, torch.ones(3)))
        assert tell(llm).outputs[0].token_ids == expected[2]


@pytest.mark.slow(reason="two replicas, and a start of a worker")
async def test_weights_of_an_extension_outlive_its_worker(folders: list[Path], expected: list[list[int]]) -> None:
    options: dict[str, Any] = {
        "data_parallel_size": 2,
        "worker_extension_cls": "tests.api.worker_functions:WeightExtension",
    }
    async with AsyncLLM("storyteller", **ENGINE, **options) as llm:
        path = str(folders[1] / "model.safetensors")
        assert await llm.collective_rpc("update_weights_from_path", args=(path,)) == [len(changed(1))] * 2
        os.kill(llm._engine.pids["replica1/worker0"], signal.SIGKILL)
        for number in range(2):
            async for output in llm.generate(PROMPT, greedy(), data_parallel_rank=number):
                last = output
            assert last.outputs[0].token_ids == expected[1]
