"""`LLM`: lists of prompts, from scripts and from within event loops."""

from __future__ import annotations

import asyncio
import json
import math
import queue
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import anyio
import numpy as np
import pytest

from actorllm import LLM, AsyncLLM, LLMEngine, RequestOutput, SamplingParams
from actorllm.errors import ConfigError, EngineError, EngineShutdownError, InvalidParameterError, InvalidPromptError

PROMPTS = ["Once upon a time", "There was a king", "The fox said"]


@pytest.fixture(scope="module", params=["process", "inline"])
def llm(request: pytest.FixtureRequest) -> Iterator[LLM]:
    with LLM("storyteller", dtype="float32", topology=request.param, num_threads=1) as engine:
        yield engine


def short(num_tokens: int = 5, **arguments: Any) -> SamplingParams:
    return SamplingParams(**({"max_tokens": num_tokens, "ignore_eos": True, "seed": 1} | arguments))


def generate(llm: LLM, prompts: Any, params: Any = None, **arguments: Any) -> list[RequestOutput]:
    return llm.generate(prompts, short() if params is None else params, **({"use_tqdm": False} | arguments))


def becomes_idle(llm: LLM, timeout_s: float = 10) -> bool:
    deadline = time.monotonic() + timeout_s
    while True:
        scheduler = llm.stats()["scheduler"]["scheduler"]
        if not scheduler["num_running"] and scheduler["kv"]["num_free"] == scheduler["kv"]["num_blocks"]:
            return True
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)


def test_outputs_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    prompts = [PROMPTS[i % 3] for i in range(20)]
    params = [short(20 - i, seed=i) for i in range(20)]  # the last ones end first
    outputs = generate(llm, prompts, params)
    assert [output.prompt for output in outputs] == prompts
    assert [len(output.outputs[0].token_ids) for output in outputs] == [20 - i for i in range(20)]
    assert all(output.finished for output in outputs)
    assert [output.outputs[0].finish_reason for output in outputs] == ["length"] * 20
    (alone,) = generate(llm, prompts[7], params[7])
    assert alone.outputs == outputs[7].outputs


def test_every_form_of_a_prompt(llm: LLM) -> None:
    (text,) = generate(llm, PROMPTS[0])
    ids = text.prompt_token_ids
    forms: list[Any] = [
        ids,
        [ids],
        np.array(ids),
        [np.array(ids, np.int32)],
        tuple(ids),
        {"prompt": PROMPTS[0]},
        {"prompt_token_ids": ids},
        [{"prompt": PROMPTS[0], "prompt_token_ids": None}],
        (PROMPTS[0],),
    ]
    for form in forms:
        (output,) = generate(llm, form)
        assert output.prompt_token_ids == ids
        assert output.outputs == text.outputs
    mixed = generate(llm, [PROMPTS[0], ids, {"prompt_token_ids": ids}, {"prompt": PROMPTS[0]}])
    assert [output.outputs for output in mixed] == [text.outputs] * 4


def test_token_ids_as_older_releases_of_vllm_take_them(llm: LLM) -> None:
    ids = [llm.get_tokenizer().encode(prompt) for prompt in PROMPTS[:2]]
    outputs = llm.generate(prompt_token_ids=ids, sampling_params=short(), use_tqdm=False)
    assert [output.outputs for output in outputs] == [output.outputs for output in generate(llm, PROMPTS[:2])]
    with pytest.raises(InvalidPromptError, match="both are given"):
        llm.generate("Once", short(), prompt_token_ids=ids)


def test_no_prompts_no_outputs(llm: LLM) -> None:
    assert generate(llm, []) == []


def test_default_parameters(llm: LLM) -> None:
    (output,) = llm.generate("Once", use_tqdm=False)
    assert 1 <= len(output.outputs[0].token_ids) <= 16


def test_parameters_are_not_changed(llm: LLM) -> None:
    params = short()
    before = SamplingParams(**{name: getattr(params, name) for name in params.__dataclass_fields__})
    generate(llm, PROMPTS, params)
    assert params == before


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ([short()], "1 sampling_params for 3 prompts"),
        ([short()] * 4, "4 sampling_params for 3 prompts"),
        ({"max_tokens": 3}, "not a mapping"),
        ([short(), None, short()], "NoneType"),
    ],
)
def test_parameters_that_do_not_fit(llm: LLM, params: Any, message: str) -> None:
    with pytest.raises(InvalidParameterError, match=message):
        generate(llm, PROMPTS, params)
    with pytest.raises(InvalidParameterError, match="2 priorities for 3 prompts"):
        generate(llm, PROMPTS, priority=[1, 2])
    with pytest.raises(InvalidParameterError, match=r"priority='high' must be a 64-bit integer|4 priorities for"):
        generate(llm, PROMPTS, priority="high")


@pytest.mark.parametrize("prompts", [b"bytes", 5, None, 1.5])
def test_what_is_no_prompt(llm: LLM, prompts: Any) -> None:
    with pytest.raises(InvalidPromptError, match=type(prompts).__name__):
        generate(llm, prompts)


@pytest.mark.parametrize("bad", [{"prompt_token_ids": []}, [4096], [-1], {"text": "Once"}, 7, None, [[1]]])
def test_one_bad_prompt_ends_the_call_and_nothing_else(llm: LLM, bad: Any) -> None:
    with pytest.raises(InvalidPromptError):
        generate(llm, [PROMPTS[0], bad, PROMPTS[1]], short(1000))
    assert becomes_idle(llm)
    assert len(generate(llm, PROMPTS)) == 3


def test_the_progress_bar(llm: LLM, capfd: pytest.CaptureFixture[str]) -> None:
    generate(llm, PROMPTS)
    assert capfd.readouterr().err == ""
    llm.generate(PROMPTS, short())
    captured = capfd.readouterr()
    assert "Processed prompts" in captured.err
    assert "3/3" in captured.err
    assert captured.out == ""


def test_within_a_running_loop(llm: LLM) -> None:
    async def main() -> list[RequestOutput]:
        return generate(llm, PROMPTS)

    assert [output.prompt for output in asyncio.run(main())] == PROMPTS


def test_from_several_threads_at_once(llm: LLM) -> None:
    expected = [output.outputs for output in generate(llm, PROMPTS)]
    seen: list[Any] = []
    threads = [
        threading.Thread(target=lambda: seen.append([output.outputs for output in generate(llm, PROMPTS)]))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [expected] * 4


def test_enqueue_now_and_wait_later(llm: LLM) -> None:
    expected = generate(llm, PROMPTS)
    assert llm.wait_for_completion(use_tqdm=False) == []
    ids = llm.enqueue(PROMPTS[:1], short(), None, None, False, None, None) + llm.enqueue(
        PROMPTS[1:], short(), priority=[2, 1]
    )
    with pytest.raises(InvalidParameterError, match="1 priorities for 3 prompts"):
        llm.enqueue(PROMPTS, short(), priority=[1])
    numbers = [int(request_id) for request_id in ids]
    assert numbers == list(range(numbers[0], numbers[0] + len(PROMPTS))), "as in vLLM, where programs sort by them"
    outputs = llm.wait_for_completion(RequestOutput, use_tqdm=False)
    assert [output.request_id for output in outputs] == ids
    assert [output.outputs for output in outputs] == [output.outputs for output in expected]
    llm.enqueue([PROMPTS[0], [4096]], short(900))
    with pytest.raises(InvalidPromptError):
        llm.wait_for_completion(use_tqdm=False)
    assert llm.wait_for_completion(use_tqdm=False) == []
    assert becomes_idle(llm)


def test_threads_that_wait_at_once_each_get_their_own(llm: LLM) -> None:
    """Both requests end in one step, and that wakes both threads."""
    expected = [output.outputs for output in generate(llm, PROMPTS[:1] * 2)]
    waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
    got: dict[int, list[RequestOutput]] = {}

    def wait(number: int) -> None:
        def bar(**arguments: Any) -> Any:
            waiting.put(number)  # it is made when the outputs are about to be waited for
            return MagicMock()

        got[number] = llm.wait_for_completion(use_tqdm=bar)

    engine = llm._engine
    engine.ask_scheduler("pause_generation", timeout=math.inf, mode="keep", clear_cache=False).result()
    threads = [threading.Thread(target=wait, args=(number,), daemon=True) for number in range(2)]
    for thread in threads:
        llm.enqueue(PROMPTS[0], short())
        thread.start()
        waiting.get(timeout=20)
    engine.all_handed_over().result()
    engine.ask_scheduler("resume_generation").result()
    for thread in threads:
        thread.join(20)
    assert [output.outputs for number in range(2) for output in got.get(number, [])] == expected


def test_conversations_now_and_answers_later(llm: LLM) -> None:
    conversations = [[{"role": "user", "content": text}] for text in PROMPTS]
    expected = llm.chat(conversations, short(), use_tqdm=False)
    ids = llm.enqueue_chat(conversations[0], short()) + llm.enqueue_chat(conversations[1:], short(), priority=[2, 1])
    outputs = llm.wait_for_completion(use_tqdm=False)
    assert [output.request_id for output in outputs] == ids
    assert [output.outputs for output in outputs] == [output.outputs for output in expected]


def test_what_makes_the_progress_bar_may_be_given(llm: LLM) -> None:
    made: list[dict[str, Any]] = []

    class Bar:
        def __init__(self, **arguments: Any) -> None:
            made.append(arguments)

        def update(self, n: int) -> None:
            made[0]["seen"] = made[0].get("seen", 0) + n

        def close(self) -> None:
            made[0]["is_closed"] = True

    generate(llm, PROMPTS, use_tqdm=Bar)
    assert (made[0]["total"], made[0]["seen"], made[0]["is_closed"]) == (3, 3, True)


def test_arguments_of_vllm_that_ask_for_nothing(llm: LLM) -> None:
    assert len(generate(llm, PROMPTS, lora_request=None, tokenization_kwargs={})) == 3
    assert len(generate(llm, PROMPTS, lora_request=[None] * 3)) == 3
    with pytest.raises(InvalidParameterError, match="2 lora_requests for 3 prompts"):
        generate(llm, PROMPTS, lora_request=[None, None])
    with pytest.raises(InvalidParameterError, match="lora_request='x' must be a LoRARequest, or None"):
        generate(llm, PROMPTS, lora_request=[None, None, "x"])
    with pytest.raises(InvalidParameterError, match="lora_request='x' must be a LoRARequest, or None"):
        generate(llm, PROMPTS, lora_request="x")
    with pytest.raises(InvalidParameterError, match="'lora_requests'; did you mean 'lora_request'"):
        generate(llm, PROMPTS, lora_requests=None)


def test_the_tokenizer_is_that_of_transformers(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    assert tokenizer is llm.get_tokenizer()
    assert (llm.model_config, llm.get_world_size()) == (llm.config.model, 1)
    assert tokenizer.encode(PROMPTS[0]) == generate(llm, PROMPTS[0])[0].prompt_token_ids


def test_within_a_running_trio_loop(llm: LLM) -> None:
    async def main() -> list[RequestOutput]:
        return generate(llm, PROMPTS)

    assert [output.prompt for output in anyio.run(main, backend="trio")] == PROMPTS


def test_greedy_and_seeded_requests_repeat(llm: LLM) -> None:
    for params in (short(12), short(12, temperature=0, seed=None)):
        first, second = (
            [output.outputs[0].token_ids for output in generate(llm, PROMPTS, params, priority=[3, 1, 2])]
            for _ in range(2)
        )
        assert first == second


def test_metrics_of_every_output(llm: LLM) -> None:
    for output in generate(llm, PROMPTS):
        assert output.metrics is not None
        assert output.metrics.finished_time is not None
        assert output.metrics.arrival_time <= output.metrics.finished_time <= time.time() + 1


def test_the_seed_of_the_engine_makes_a_run_repeatable_and_leaving_the_context_ends_it() -> None:
    texts: list[list[str]] = []
    for seed in (5, 5):
        with LLM("storyteller", dtype="float32", topology="inline", num_threads=1, seed=seed) as llm:
            outputs = generate(llm, ["Once"] * 2, SamplingParams(max_tokens=8, ignore_eos=True))
            texts.append([output.outputs[0].text for output in outputs])
    assert texts[0] == texts[1]
    assert texts[0][0] != texts[0][1]
    calls: list[Callable[[], object]] = [lambda: llm.generate("Once"), llm.stats]
    for call in calls:
        with pytest.raises(EngineShutdownError):
            call()
    llm.shutdown()


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_profile_of_the_worker_is_a_chrome_trace(tmp_path: Path) -> None:
    config = {"profiler": "torch", "torch_profiler_dir": str(tmp_path)}
    with LLM("storyteller", max_num_seqs=4, max_model_len=128, profiler_config=config) as llm:
        with pytest.raises(EngineError, match="no profile is under way"):
            llm.stop_profile()
        llm.start_profile("first")
        with pytest.raises(EngineError, match="under way already"):
            llm.start_profile("second")
        llm.generate("Once upon a time", SamplingParams(max_tokens=4), use_tqdm=False)
        llm.stop_profile()
    (file,) = tmp_path.iterdir()
    assert file.name == "first_rank0.json"
    events = json.loads(file.read_text())["traceEvents"]
    assert any("linear" in event.get("name", "") for event in events)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_profile_through_the_other_front_doors(tmp_path: Path) -> None:
    config = {"profiler": "torch", "torch_profiler_dir": str(tmp_path / "traces")}
    arguments: dict[str, Any] = {"topology": "inline", "num_threads": 1, "profiler_config": config}
    engine = LLMEngine("storyteller", **arguments)
    engine.start_profile("by-hand")
    engine.add_request("a", PROMPTS[0], short(2))
    while engine.has_unfinished_requests():
        engine.step()
    engine.stop_profile()
    assert engine.reset_prefix_cache()
    engine.shutdown()

    async def profile() -> None:
        async with AsyncLLM("storyteller", **arguments) as llm:
            await llm.start_profile()
            await llm.complete(PROMPTS[0], short(2))
            await llm.stop_profile()

    anyio.run(profile)
    names = sorted(file.name for file in (tmp_path / "traces").iterdir())
    assert len(names) == 2
    assert names[1] == "by-hand_rank0.json"
    assert names[0].removesuffix("_rank0.json").isdecimal(), "by the time, so that nothing is written over"


PROFILES: list[tuple[Any, str]] = [
    ("torch", "must be a mapping"),
    ({"profiler": "cuda"}, "profiler='cuda' is not supported"),
    ({"profiler": "torch"}, "torch_profiler_dir=None must be the folder"),
    ({"profiler": "torch", "torch_profile_dir": "/tmp"}, "did you mean 'torch_profiler_dir'"),
]


@pytest.mark.parametrize(("config", "message"), PROFILES, ids=[message for _, message in PROFILES])
def test_profiles_that_cannot_be_are_named(config: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM("storyteller", profiler_config=config)


def test_profiles_nobody_asked_for(llm: LLM, tmp_path: Path) -> None:
    for call in (llm.start_profile, llm.stop_profile):
        with pytest.raises(ConfigError, match="profiler_config"):
            call()
    config = {"profiler": "torch", "torch_profiler_dir": tmp_path}
    with LLM("storyteller", topology="inline", num_threads=1, profiler_config=config) as other:
        with pytest.raises(InvalidParameterError, match=r"profile_prefix='\.\./x'"):
            other.start_profile("../x")
        with pytest.raises(InvalidParameterError, match="max_iterations=3"):
            other.start_profile(max_iterations=3)


def test_the_engine_within_is_stepped_beside_calls_of_generate(llm: LLM) -> None:
    engine = llm.llm_engine
    assert engine is llm.llm_engine
    assert isinstance(engine, LLMEngine)
    assert engine.model_config is llm.model_config
    (whole,) = generate(llm, PROMPTS[0], short(8))
    engine.add_request("stepped", PROMPTS[0], short(8))
    taken = str(int(whole.request_id) + 1)
    engine.add_request(taken, PROMPTS[0], short(8))
    assert generate(llm, PROMPTS[1], short(2))[0].request_id == str(int(taken) + 1)
    engine.abort_request(taken)
    (between,) = generate(llm, PROMPTS[1], short(3))
    assert between.outputs[0].finish_reason == "length"
    outputs: list[RequestOutput] = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    assert [output.request_id for output in outputs] == ["stepped"] * len(outputs)
    assert outputs[-1].outputs == whole.outputs
    engine.add_request("bad", [1, 10**6], short(8))
    (failed,) = engine.step()
    assert failed.outputs[0].finish_reason == "error"
    assert "1000000" in str(failed.outputs[0].stop_reason)
