"""Requests with adapters through the front doors: streams of merged weights, what is shared, kills, and what is refused."""

from __future__ import annotations

import json
import os
import runpy
import shutil
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest

from actorllm import LLM, AsyncLLM, BeamSearchParams, LLMEngine, LoRARequest, SamplingParams
from actorllm.actors.record_file import fresh_scheduler, read_recording
from actorllm.config import BUNDLED_MODELS
from actorllm.errors import ConfigError, InvalidParameterError, RequestFailedError
from actorllm.types import adapter_folder
from actorllm.types.adapter_folder import digest_of
from tests.api import worker_functions
from tests.model.adapters.lora_folders import linear_layers, merged, shapes_of, write_adapter

PROMPT = "Once upon a time there was a fox who lived in a forest, and every morning"
NUM_TOKENS = 24
NAMES = ("a", "b", "c")

Streams = dict[str | None, list[int]]


def greedy(num_tokens: int = NUM_TOKENS, **more: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, **more)


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders a, b and c, with adapters of the storyteller."""
    return tmp_path_factory.mktemp("adapters")


@pytest.fixture(scope="module")
def expected(adapters: Path) -> Streams:
    """The greedy streams of merged weights, by transformers; None: of the model itself."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(1)
    folder = str(BUNDLED_MODELS["storyteller"])
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    ids = AutoTokenizer.from_pretrained(folder)(PROMPT, return_tensors="pt").input_ids
    layers = shapes_of(linear_layers(model))
    streams: Streams = {}
    for seed, name in enumerate((None, *NAMES)):
        of_name = model
        if name is not None:
            of_name = merged(model, write_adapter(adapters / name, layers, seed=seed, size=1.0, r=8))
        with torch.inference_mode():
            output = ids
            for _ in range(NUM_TOKENS):
                logits = of_name(output, use_cache=False).logits[0, -1]
                output = torch.cat((output, logits.argmax()[None, None]), 1)
        streams[name] = output[0, ids.shape[1] :].tolist()
    assert len({tuple(stream) for stream in streams.values()}) == 4, "each adapter makes a difference"
    return streams


def request_of(adapters: Path, name: str | None, number: int = 1) -> LoRARequest | None:
    return None if name is None else LoRARequest(name, number, str(adapters / name))


ENGINE: dict[str, Any] = {"dtype": "float32", "num_threads": 1, "block_size": 16, "enable_lora": True}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("storyteller", topology="inline", max_loras=2, **ENGINE) as engine:
        yield engine


def tokens(outputs: list[Any]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def test_streams_are_those_of_merged_weights_whatever_runs_beside_them(
    llm: LLM, adapters: Path, expected: Streams
) -> None:
    """Three adapters and two slots: some wait for others."""
    names = [None, "a", "b", "c", "a", None, "c", "b"]
    loras = [request_of(adapters, name) for name in names]
    outputs = llm.generate([PROMPT] * len(names), greedy(), use_tqdm=False, lora_request=loras)
    assert tokens(outputs) == [expected[name] for name in names]
    assert [output.lora_request for output in outputs] == loras
    (alone,) = llm.generate(PROMPT, greedy(), use_tqdm=False, lora_request=loras[2])
    assert tokens([alone]) == [expected["b"]]


def test_a_model_of_transformers_gives_the_same_streams(adapters: Path, expected: Streams) -> None:
    names = [None, "a", "b", "c", "a"]
    with LLM("storyteller", topology="inline", max_loras=2, model_impl="transformers", **ENGINE) as engine:
        loras = [request_of(adapters, name) for name in names]
        outputs = engine.generate([PROMPT] * len(names), greedy(), use_tqdm=False, lora_request=loras)
        assert tokens(outputs) == [expected[name] for name in names]


def test_the_example_runs_adapters_in_one_batch(adapters: Path, expected: Streams) -> None:
    main = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "adapters.py"))["main"]
    folders = [str(adapters / name) for name in ("a", "b")]
    texts = main("storyteller", *folders, topology="inline", dtype="float32", num_threads=1)
    assert list(texts) == ["base", "a", "b"]
    assert len(set(texts.values())) == len(expected) - 1


def test_only_requests_of_one_content_share_what_is_cached(
    llm: LLM, adapters: Path, expected: Streams, tmp_path: Path
) -> None:
    """Under one number, one name and one path, two adapters are two; under others, one is one."""
    llm.reset_prefix_cache()
    shutil.copytree(adapters / "a", tmp_path / "x")

    def cached(lora: LoRARequest | None) -> int:
        (output,) = llm.generate(PROMPT, greedy(2), use_tqdm=False, lora_request=lora)
        return int(output.num_cached_tokens)

    same = LoRARequest("x", 1, str(tmp_path / "x"))
    assert [cached(None), cached(same), cached(None) > 0, cached(same) > 0] == [0, 0, True, True]
    assert cached(LoRARequest("y", 2, str(adapters / "a"))) > 0
    shutil.rmtree(tmp_path / "x")
    shutil.copytree(adapters / "b", tmp_path / "x")
    assert cached(same) == 0
    assert cached(LoRARequest("x", 1, str(adapters / "b"))) > 0


def test_several_sequences_of_a_prompt_have_the_adapter(llm: LLM, adapters: Path, expected: Streams) -> None:
    params = SamplingParams(n=3, temperature=1.0, top_k=1, max_tokens=NUM_TOKENS, ignore_eos=True)
    (output,) = llm.generate(PROMPT, params, use_tqdm=False, lora_request=request_of(adapters, "c"))
    assert [one.token_ids for one in output.outputs] == [expected["c"]] * 3


def test_preempted_requests_have_the_streams_of_their_adapters(adapters: Path, expected: Streams) -> None:
    names = [None, "a", "b", "a", None, "b", "a", "b"]
    few = {"num_gpu_blocks_override": 7, "max_model_len": 96, "max_num_seqs": 4}
    with LLM("storyteller", topology="inline", max_loras=2, **few, **ENGINE) as llm:
        loras = [request_of(adapters, name) for name in names]
        outputs = llm.generate([PROMPT] * len(names), greedy(), use_tqdm=False, lora_request=loras)
        assert llm.stats()["scheduler"]["scheduler"]["num_preemptions"] > 0
    assert tokens(outputs) == [expected[name] for name in names]


def test_vectors_are_those_of_merged_weights(adapters: Path, expected: Streams) -> None:
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = str(BUNDLED_MODELS["storyteller"])
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = AutoTokenizer.from_pretrained(folder)(PROMPT, return_tensors="pt").input_ids
    tensors = load_file(adapters / "a" / "adapter_model.safetensors")
    deltas = {  # lora_alpha is r, so they are not scaled
        name.removeprefix("base_model.model.").removesuffix(".lora_A.weight"): tensors[name.replace("lora_A", "lora_B")]
        @ a
        for name, a in tensors.items()
        if "lora_A" in name
    }
    wanted = {}
    with torch.inference_mode():
        for name, one in (("a", merged(model, deltas)), (None, model)):
            state = one.base_model(ids).last_hidden_state[0, -1]
            wanted[name] = state / state.norm()
    loras = [request_of(adapters, name) for name in ("a", None, "a")]
    with LLM("storyteller", runner="pooling", topology="inline", max_loras=2, **ENGINE) as llm:
        found = [output.outputs.embedding for output in llm.embed([PROMPT] * 3, lora_request=loras, use_tqdm=False)]
        (whole,) = llm.encode(PROMPT, pooling_task="embed", lora_request=loras[0], use_tqdm=False)
    for vector, name in zip([*found, whole.outputs.data], ("a", None, "a", "a"), strict=True):
        torch.testing.assert_close(torch.as_tensor(vector), wanted[name], rtol=0, atol=1e-5)
    assert (wanted["a"] - wanted[None]).norm() > 0.1


def test_a_grammar_and_an_adapter_go_together(llm: LLM, adapters: Path, expected: Streams) -> None:
    pytest.importorskip("llguidance")
    from actorllm.types.structured_outputs import StructuredOutputsParams

    choice = StructuredOutputsParams(choice=["the fox", "the king"])
    params = SamplingParams(temperature=0, max_tokens=8, structured_outputs=choice)
    (output,) = llm.generate(PROMPT, params, use_tqdm=False, lora_request=request_of(adapters, "a"))
    assert output.outputs[0].text in ("the fox", "the king")


def test_a_bad_adapter_fails_its_own_request(llm: LLM, adapters: Path, expected: Streams, tmp_path: Path) -> None:
    write_adapter(tmp_path / "wide", {"model.layers.0.self_attn.q_proj": (8, 8)})
    wrong = LoRARequest("wide", 7, str(tmp_path / "wide"))
    with pytest.raises(InvalidParameterError, match=r"lora_A of model\.layers\.0\.self_attn\.q_proj"):
        llm.generate([PROMPT] * 2, greedy(), use_tqdm=False, lora_request=[wrong, None])
    with pytest.raises(InvalidParameterError, match="is no folder"):
        llm.generate(PROMPT, greedy(), use_tqdm=False, lora_request=LoRARequest("none", 8, str(tmp_path / "none")))
    with pytest.raises(InvalidParameterError, match="2 lora_requests for 1 prompts"):
        llm.generate(PROMPT, greedy(), use_tqdm=False, lora_request=[None, None])
    with pytest.raises(InvalidParameterError, match="must be a LoRARequest"):
        llm.generate(PROMPT, greedy(), use_tqdm=False, lora_request="a")  # type: ignore[arg-type]
    outputs = llm.generate(PROMPT, greedy(), use_tqdm=False, lora_request=request_of(adapters, "a"))
    assert tokens(outputs) == [expected["a"]]


def test_an_engine_that_takes_none_says_so(adapters: Path, expected: Streams) -> None:
    with LLM("storyteller", dtype="float32", topology="inline", num_threads=1) as plain:
        with pytest.raises(InvalidParameterError, match="enable_lora=True"):
            plain.generate(PROMPT, greedy(), use_tqdm=False, lora_request=request_of(adapters, "a"))
        assert plain.generate(PROMPT, greedy(4), use_tqdm=False, lora_request=[None])


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"max_loras": 0}, "max_loras=0"),
        ({"max_loras": 4, "max_cpu_loras": 2}, "max_cpu_loras=2 is less than max_loras=4"),
        ({"max_lora_rank": 100_000}, "max_lora_rank=100000 must be at most"),
        ({"enable_lora": "yes"}, "enable_lora='yes'"),
    ],
)
def test_arguments_that_cannot_be_are_refused(arguments: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        LLM("storyteller", **({"enable_lora": True} | arguments))


def test_models_that_are_not_adapted_are_refused(tmp_path: Path) -> None:
    from transformers import BertConfig

    BertConfig(architectures=["BertModel"], vocab_size=50, num_hidden_layers=1).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="enable_lora=True: encoders are not adapted yet"):
        LLM(str(tmp_path), skip_tokenizer_init=True, enable_lora=True)


def test_a_stepped_engine_takes_adapters(adapters: Path, expected: Streams) -> None:
    engine = LLMEngine.from_engine_args(_engine_args())
    try:
        for i, name in enumerate(("a", None, "b")):
            engine.add_request(str(i), PROMPT, greedy(), lora_request=request_of(adapters, name))
        streams: dict[str, list[int]] = {}
        while engine.has_unfinished_requests():
            for output in engine.step():
                streams[output.request_id] = list(output.outputs[0].token_ids)
        assert streams == {"0": expected["a"], "1": expected[None], "2": expected["b"]}
    finally:
        engine.shutdown()


def _engine_args() -> Any:
    from actorllm import EngineArgs

    return EngineArgs(model="storyteller", topology="inline", **ENGINE)


async def test_streams_are_equal_after_kills(adapters: Path, expected: Streams) -> None:
    """The worker is killed, then the scheduler, in the middle of requests with adapters, some of which wait for a slot."""
    names = ["a", None, "b", "c", "a"]
    async with AsyncLLM("storyteller", max_loras=2, **ENGINE) as llm:
        streams = [
            llm.generate(PROMPT, greedy(stream_interval=1), lora_request=request_of(adapters, name)) for name in names
        ]
        victims = [(3, "worker0"), (9, "scheduler")]
        final: dict[int, Any] = {}
        for i, stream in enumerate(streams):
            async for output in stream:
                if i == 0 and victims and len(output.outputs[0].token_ids) >= victims[0][0]:
                    os.kill(llm._engine.pids[victims.pop(0)[1]], signal.SIGKILL)
                final[i] = output
        assert not victims
        assert [final[i].outputs[0].token_ids for i in range(len(names))] == [expected[name] for name in names]


async def test_a_worker_that_finds_the_folder_gone_fails_the_requests_of_that_adapter(
    adapters: Path, expected: Streams, tmp_path: Path
) -> None:
    """Those that named another folder with the same content go on."""
    shutil.copytree(adapters / "a", tmp_path / "a")
    async with AsyncLLM("storyteller", max_loras=2, **ENGINE) as llm:
        lost = llm.generate(PROMPT, greedy(200), lora_request=request_of(tmp_path, "a"))
        same = llm.generate(PROMPT, greedy(200), lora_request=request_of(adapters, "a"))
        other = llm.generate(PROMPT, greedy(), lora_request=request_of(adapters, "b"))
        await anext(lost)
        await anext(same)
        shutil.rmtree(tmp_path / "a")
        os.kill(llm._engine.pids["worker0"], signal.SIGKILL)
        with pytest.raises((InvalidParameterError, RequestFailedError), match="is no folder"):
            async for _ in lost:
                pass
        output = [output async for output in other][-1]
        assert output.outputs[0].token_ids == expected["b"]
        output = [output async for output in same][-1]
        assert output.outputs[0].token_ids[:NUM_TOKENS] == expected["a"]
        assert len(output.outputs[0].token_ids) == 200


@pytest.mark.parametrize("num_ranks", [2])
def test_streams_are_equal_with_tensor_parallel_ranks(adapters: Path, expected: Streams, num_ranks: int) -> None:
    names = ["a", None, "b"]
    with LLM("storyteller", tensor_parallel_size=num_ranks, **ENGINE) as llm:
        loras = [request_of(adapters, name) for name in names]
        outputs = llm.generate([PROMPT] * 3, greedy(), use_tqdm=False, lora_request=loras)
    assert tokens(outputs) == [expected[name] for name in names]


def test_a_recording_replays_with_the_slots_of_adapters(adapters: Path, expected: Streams, tmp_path: Path) -> None:
    from actorllm.scheduling.telemetry.recording import replay

    record = tmp_path / "run"
    with LLM("storyteller", topology="inline", record=str(record), max_loras=2, **ENGINE) as llm:
        loras = [request_of(adapters, name) for name in NAMES]
        llm.generate([PROMPT] * 3, greedy(), use_tqdm=False, lora_request=loras)
    recording = read_recording(record)
    plans = list(replay(recording, fresh_scheduler(record)))
    slots = [int(row["adapter_id"]) for plan in plans if plan.new_rows.size for row in plan.new]
    assert sorted(slots) in ([1, 1, 2], [1, 2, 2])


def test_adapters_are_added_listed_pinned_and_removed(adapters: Path, expected: Streams) -> None:
    with LLM("storyteller", topology="inline", max_loras=1, max_cpu_loras=2, **ENGINE) as llm:
        a, b, c = (LoRARequest(name, number, str(adapters / name)) for number, name in enumerate(NAMES, 1))
        assert llm.list_loras() == set()
        assert llm.add_lora(a)
        assert llm.add_lora(b)
        assert llm.list_loras() == {1, 2}
        assert llm.pin_lora(1)
        for lora in (c, b):
            assert tokens(llm.generate(PROMPT, greedy(), use_tqdm=False, lora_request=lora)) == [
                expected[lora.lora_name]
            ]
        assert llm.list_loras() == {1, 2}, "1 is pinned, and 3 was used before 2"
        assert llm.remove_lora(1)
        assert not llm.remove_lora(1)
        assert llm.list_loras() == {2}
        with pytest.raises(InvalidParameterError, match="lora_id=9 is no adapter of this program"):
            llm.pin_lora(9)
        with pytest.raises(InvalidParameterError, match="is no folder"):
            llm.add_lora(LoRARequest("none", 9, str(adapters / "none")))
        assert tokens(llm.generate(PROMPT, greedy(), use_tqdm=False, lora_request=a)) == [expected["a"]]
        assert llm.pin_lora(1)
        assert llm.pin_lora(2)
        for keep in (lambda: llm.add_lora(c), lambda: llm.pin_lora(3)):
            with pytest.raises(InvalidParameterError, match="max_cpu_loras=2 adapters, and all of them are pinned"):
                keep()
        assert llm.list_loras() == {1, 2}
        assert tokens(llm.generate(PROMPT, greedy(), use_tqdm=False, lora_request=c)) == [expected["c"]]


async def test_a_program_adds_an_adapter_while_others_are_computed(adapters: Path, expected: Streams) -> None:
    async with AsyncLLM("storyteller", topology="inline", **ENGINE) as llm:
        stream = llm.generate(PROMPT, greedy())
        assert await llm.add_lora(LoRARequest("a", 5, str(adapters / "a")))
        assert await llm.list_loras() == {5}
        assert [output async for output in stream][-1].outputs[0].token_ids == expected[None]
        assert await llm.remove_lora(5)
        assert await llm.list_loras() == set()


async def held(llm: AsyncLLM, folder: Path, pipe: Path, call: str = "read") -> None:
    """The workers do not read this adapter, or "put" it into its slot, before something comes through the pipe (`begun`)."""
    os.mkfifo(pipe)
    await llm.collective_rpc(f"{worker_functions.__name__}:hold_adapter", args=(call, str(folder), str(pipe)))


async def begun(pipe: Path) -> int:
    """The other end, as soon as a worker waits."""
    with anyio.fail_after(60):
        while True:
            try:
                return os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
            except OSError:
                await anyio.sleep(0.01)


@pytest.mark.parametrize("call", ["read", "put"])
async def test_steps_go_on_while_an_adapter_is_loaded(
    call: str, adapters: Path, expected: Streams, tmp_path: Path
) -> None:
    async with AsyncLLM("storyteller", **ENGINE) as llm:
        await held(llm, adapters / "a", tmp_path / "pipe", call)
        stream = llm.generate(PROMPT, greedy(), lora_request=request_of(adapters, "a"))
        end = await begun(tmp_path / "pipe")
        try:
            with anyio.fail_after(60):
                plain = [output async for output in llm.generate(PROMPT, greedy())][-1]
            assert (await llm.stats())["scheduler"]["adapters"]["num_waiting"] == 1
        finally:
            os.write(end, b".")
            os.close(end)
        assert plain.outputs[0].token_ids == expected[None]
        assert [output async for output in stream][-1].outputs[0].token_ids == expected["a"]


async def test_what_a_dead_scheduler_has_asked_for_changes_no_stream_of_the_next_one(
    adapters: Path, expected: Streams, tmp_path: Path
) -> None:
    """A worker that reads an adapter for it goes on reading, while another one gets the slot."""
    params = greedy(400, stream_interval=1)
    async with AsyncLLM("storyteller", max_loras=1, **ENGINE) as llm:
        b = request_of(adapters, "b")
        wanted = [output async for output in llm.generate(PROMPT, params, lora_request=b)][-1].outputs[0].token_ids
        assert wanted[:NUM_TOKENS] == expected["b"]
        await held(llm, adapters / "a", tmp_path / "pipe")
        lost = llm.generate(PROMPT, greedy(), lora_request=request_of(adapters, "a"))
        end = await begun(tmp_path / "pipe")
        lost.abort()
        os.kill(llm._engine.pids["scheduler"], signal.SIGKILL)
        seen: list[int] = []
        async for output in llm.generate(PROMPT, params, lora_request=b):
            if not seen:
                os.write(end, b".")
                os.close(end)
            seen = list(output.outputs[0].token_ids)
        assert seen == wanted


async def test_texts_do_not_wait_for_the_content_of_adapters(
    adapters: Path, expected: Streams, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many are read for the first time, which takes as long as their files are large."""
    begun, goes_on = threading.Event(), threading.Event()

    def slow(*content: Any) -> str:
        begun.set()
        assert goes_on.wait(120)
        return digest_of(*content)

    monkeypatch.setattr(adapter_folder, "digest_of", slow)
    async with AsyncLLM("storyteller", topology="inline", **ENGINE) as llm:
        adapted = [llm.generate(PROMPT, greedy(), lora_request=request_of(adapters, name)) for name in NAMES]
        try:
            assert await anyio.to_thread.run_sync(begun.wait, 60)
            with anyio.fail_after(30):
                plain = [output async for output in llm.generate(PROMPT, greedy())][-1]
        finally:
            goes_on.set()
        assert plain.outputs[0].token_ids == expected[None]
        for stream, name in zip(adapted, NAMES, strict=True):
            assert [output async for output in stream][-1].outputs[0].token_ids == expected[name]


def test_drafts_change_no_stream_of_an_adapter(adapters: Path, expected: Streams) -> None:
    speculation = {"method": "ngram", "num_speculative_tokens": 3}
    with LLM("storyteller", topology="inline", max_loras=2, speculative_config=speculation, **ENGINE) as llm:
        names = ["a", None, "b", "a"]
        loras = [request_of(adapters, name) for name in names]
        outputs = llm.generate([PROMPT] * 4, greedy(), use_tqdm=False, lora_request=loras)
    assert tokens(outputs) == [expected[name] for name in names]


def with_tokenizer(adapters: Path, folder: Path, **names: Any) -> LoRARequest:
    """Adapter "a" with the tokenizer of the storyteller, in which these fields differ."""
    shutil.copytree(adapters / "a", folder)
    own = BUNDLED_MODELS["storyteller"]
    shutil.copy(own / "tokenizer.json", folder)
    tree = json.loads((own / "tokenizer_config.json").read_text()) | names
    (folder / "tokenizer_config.json").write_text(json.dumps(tree))
    return LoRARequest("own", 9, str(folder))


def test_an_adapter_may_bring_its_chat_template_and_its_end_of_text(
    llm: LLM, adapters: Path, expected: Streams, tmp_path: Path
) -> None:
    stream = expected["a"]
    end = next(id for i, id in enumerate(stream) if i > 2 and id not in stream[:i])
    word = llm.get_tokenizer().convert_ids_to_tokens([end])[0]
    template = "{% for message in messages %}[{{ message.content }}]{% endfor %}"
    request = with_tokenizer(adapters, tmp_path / "own", eos_token=word, chat_template=template)
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS)
    plain, own = llm.generate([PROMPT] * 2, params, lora_request=[request_of(adapters, "a"), request], use_tqdm=False)
    assert plain.outputs[0].token_ids == stream
    assert own.outputs[0].token_ids == stream[: stream.index(end) + 1]
    assert (own.outputs[0].finish_reason, own.outputs[0].stop_reason) == ("stop", end)
    (whole,) = llm.generate(PROMPT, greedy(), lora_request=request, use_tqdm=False)
    assert whole.outputs[0].token_ids == stream, "ignore_eos"
    length = stream.index(end) + 1
    (found,) = llm.beam_search(PROMPT, BeamSearchParams(1, length, length_penalty=0.0), lora_request=request)
    best = found.sequences[0]
    assert (best.tokens[-length:], best.finish_reason, best.stop_reason) == (stream[:length], "stop", end)
    messages = [{"role": "user", "content": "Once"}, {"role": "user", "content": "upon"}]
    (answer,) = llm.chat(messages, params, lora_request=request, use_tqdm=False)
    assert answer.prompt == "[Once][upon]"
    (tmp_path / "own" / "generation_config.json").write_text(json.dumps({"eos_token_id": [stream[0], 10**9]}))
    (first,) = llm.generate(PROMPT, params, lora_request=request, use_tqdm=False)
    assert first.outputs[0].token_ids == stream[:1], "the file is read anew"


def test_a_tokenizer_with_other_texts_for_ids_is_refused_by_name(llm: LLM, adapters: Path, tmp_path: Path) -> None:
    request = with_tokenizer(adapters, tmp_path / "own")
    file = tmp_path / "own" / "tokenizer.json"
    tree = json.loads(file.read_text())
    words = tree["model"]["vocab"]
    first, second = [word for word in words if word.isalpha()][-2:]
    words[first], words[second] = words[second], words[first]
    file.write_text(json.dumps(tree))
    with pytest.raises(
        InvalidParameterError, match=r"tokenizer of the adapter .* as token \d+, which is .* in that of the"
    ):
        llm.generate(PROMPT, greedy(), lora_request=request, use_tqdm=False)
    assert llm.generate(PROMPT, greedy(2), use_tqdm=False)[0].outputs[0].token_ids
    file.write_text("{")
    with pytest.raises(InvalidParameterError, match=r"the tokenizer of the adapter .* cannot be used"):
        llm.generate(PROMPT, greedy(), lora_request=request, use_tqdm=False)
