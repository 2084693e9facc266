"""`LLMEngine`: requests in, `step`, outputs out, in the caller's own loop."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from actorllm import (
    EngineArgs,
    EngineDeadError,
    LLMEngine,
    PoolingParams,
    RequestOutput,
    RequestOutputKind,
    SamplingParams,
)
from actorllm.clock import now
from actorllm.errors import (
    ConfigError,
    DuplicateRequestError,
    EngineShutdownError,
    InvalidParameterError,
    InvalidPromptError,
    UnknownParameterError,
)

PROMPTS = ["Once upon a time", "There was a king", "The fox said"]


@pytest.fixture(scope="module", params=["process", "inline"])
def engine(request: pytest.FixtureRequest) -> Iterator[LLMEngine]:
    arguments: dict[str, Any] = {"dtype": "float32", "num_threads": 1, "max_num_seqs": 8}
    made = LLMEngine.from_engine_args(EngineArgs("storyteller", topology=request.param, **arguments))
    yield made
    made.shutdown()


def short(num_tokens: int = 5, **arguments: Any) -> SamplingParams:
    return SamplingParams(**({"max_tokens": num_tokens, "ignore_eos": True, "seed": 1} | arguments))


def run(engine: LLMEngine) -> list[RequestOutput]:
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    return outputs


def final(outputs: list[RequestOutput]) -> dict[str, RequestOutput]:
    return {output.request_id: output for output in outputs if output.finished}


def is_idle(engine: LLMEngine) -> bool:
    scheduler = engine.stats()["scheduler"]["scheduler"]
    return bool(not scheduler["num_running"] and scheduler["kv"]["num_free"] == scheduler["kv"]["num_blocks"])


def test_the_loop_of_the_documentation(engine: LLMEngine) -> None:
    for number, prompt in enumerate(PROMPTS * 4):  # more than max_num_seqs
        assert engine.add_request(str(number), prompt, short(2 + number)) == str(number)
    assert engine.get_num_unfinished_requests() == 12
    ended = final(run(engine))
    assert {key: len(output.outputs[0].token_ids) for key, output in ended.items()} == {
        str(n): 2 + n for n in range(12)
    }
    assert ended["4"].prompt == PROMPTS[1]
    assert engine.get_num_unfinished_requests() == 0
    assert engine.step() == []
    assert is_idle(engine)


def test_the_same_text_as_from_the_other_front_doors(engine: LLMEngine) -> None:
    from actorllm import LLM

    engine.add_request("a", PROMPTS[0], short(20))
    stepped = final(run(engine))["a"]
    with LLM("storyteller", dtype="float32", topology="inline", num_threads=1) as llm:
        (output,) = llm.generate(PROMPTS[0], short(20), use_tqdm=False)
    assert stepped.outputs == output.outputs
    assert stepped.prompt_token_ids == output.prompt_token_ids


@pytest.mark.parametrize("kind", list(RequestOutputKind))
def test_output_kinds(engine: LLMEngine, kind: RequestOutputKind) -> None:
    engine.add_request("x", PROMPTS[0], short(6, output_kind=kind))
    outputs = run(engine)
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    tokens = [output.outputs[0].token_ids for output in outputs]
    if kind is RequestOutputKind.DELTA:
        assert sum(map(len, tokens)) == 6
    else:
        assert len(tokens[-1]) == 6
    assert kind is not RequestOutputKind.FINAL_ONLY or len(outputs) == 1


def test_several_sequences_and_stop_strings(engine: LLMEngine) -> None:
    engine.add_request("n", PROMPTS[0], short(30, n=3, stop=["."], output_kind=RequestOutputKind.FINAL_ONLY))
    (output,) = run(engine)
    assert [completion.index for completion in output.outputs] == [0, 1, 2]
    assert all("." not in completion.text for completion in output.outputs)


def test_abort_is_the_end_of_it(engine: LLMEngine) -> None:
    for name in "abc":
        engine.add_request(name, PROMPTS[0], short(500))
    while not engine.step():
        pass
    engine.abort_request("a")
    engine.abort_request(["b", "never heard of"])
    assert engine.get_num_unfinished_requests() == 1
    assert {output.request_id for _ in range(3) for output in engine.step()} <= {"c"}
    engine.add_request("a", PROMPTS[1], short(2))  # the id is free again
    engine.abort_request(request_ids=["c"], internal=False)
    assert final(run(engine))["a"].outputs[0].finish_reason == "length"
    deadline = time.monotonic() + 10
    while not is_idle(engine):
        assert time.monotonic() < deadline


def test_a_bad_request_is_refused_and_nothing_else(engine: LLMEngine) -> None:
    engine.add_request("good", PROMPTS[0], short())
    bad: list[tuple[Any, type[Exception], str]] = [
        (("x", [], short()), InvalidPromptError, "empty"),
        (("x", [4096], short()), InvalidPromptError, "4096"),
        (("x", "once " * 3000, short()), InvalidPromptError, "shorten"),
        (("good", PROMPTS[0], short()), DuplicateRequestError, "'good' is still running"),
        ((7, PROMPTS[0], short()), InvalidParameterError, "request_id=7"),
        (("x", PROMPTS[0], PoolingParams()), InvalidParameterError, "makes no vectors"),
        (("x", PROMPTS[0], None, "noon"), InvalidParameterError, "arrival_time='noon'"),
        (("x", PROMPTS[0], short(), None, "lora"), InvalidParameterError, "lora_request='lora' must be a LoRARequest"),
    ]
    for arguments, error, message in bad:
        with pytest.raises(error, match=message):
            engine.add_request(*arguments)
    with pytest.raises(UnknownParameterError, match="'prority'; did you mean 'priority'"):
        engine.add_request("x", PROMPTS[0], short(), prority=1)
    assert set(final(run(engine))) == {"good"}


def test_arrival_time_is_what_the_caller_says(engine: LLMEngine) -> None:
    arrived = time.time() - 100
    engine.add_request("x", PROMPTS[0], short(), arrived, priority=3)
    metrics = final(run(engine))["x"].metrics
    assert metrics is not None
    assert metrics.arrival_time == pytest.approx(arrived, abs=1e-3)
    assert metrics.first_token_latency > 99


def test_within_a_running_loop(engine: LLMEngine) -> None:
    async def main() -> list[RequestOutput]:
        engine.add_request("x", PROMPTS[0], short())
        return run(engine)

    assert asyncio.run(main())[-1].finished


def test_what_programs_ask_of_it(engine: LLMEngine) -> None:
    assert engine.get_tokenizer().encode(PROMPTS[0]) == engine._engine.prompts.tokenize(PROMPTS[0]).ids.tolist()
    assert engine.model_config.max_model_len == engine.vllm_config.model.max_model_len == 1024
    engine.check_health()
    engine.do_log_stats()


def test_configurations_and_the_end_by_the_names_that_programs_use(engine: LLMEngine) -> None:
    assert engine.scheduler_config.max_num_seqs == 8
    assert engine.cache_config.num_gpu_blocks == engine.vllm_config.cache.num_blocks
    assert (engine.parallel_config.world_size, engine.lora_config) == (1, None)
    other = LLMEngine("storyteller", topology="inline", num_threads=1)
    other.engine_core.shutdown()
    with pytest.raises(EngineShutdownError):
        other.check_health()


def test_inline_runs_on_no_thread_and_by_no_other_call() -> None:
    before = threading.active_count()
    engine = LLMEngine("storyteller", topology="inline", num_threads=1)
    engine.add_request("x", PROMPTS[0], short(3))
    assert threading.active_count() <= before
    assert engine._engine.pids == {}
    counts = []
    while engine.has_unfinished_requests():
        counts.append([len(output.outputs[0].token_ids) for output in engine.step()])
    assert counts == [[1], [2], [3]], "a step of the model for every call"
    engine.shutdown()
    engine.shutdown()
    with pytest.raises(EngineShutdownError):
        engine.add_request("x", PROMPTS[0], short())
    assert engine.step() == []


def test_a_step_that_fails_fails_its_requests() -> None:
    engine = LLMEngine("storyteller", topology="inline", num_threads=1)
    engine.add_request("x", PROMPTS[0], short(50))
    engine.add_request("y", PROMPTS[1], short(3))
    engine.step()
    stepper = engine._engine.stepper
    assert stepper is not None
    stepper._frontend._fail_gap(1, stepper._frontend._journal[1], 99)
    stepper._frontend._wake([engine._streams["x"]._mailbox])
    outputs = final(run(engine))
    assert outputs["x"].outputs[0].finish_reason == "error"
    assert "tokens are missing" in str(outputs["x"].outputs[0].stop_reason)
    assert len(outputs["y"].outputs[0].token_ids) == 3
    engine.shutdown()


def test_several_ranks_need_processes() -> None:
    from dataclasses import replace

    config = EngineArgs("storyteller", topology="inline").create_engine_config()
    with pytest.raises(ConfigError, match="tensor_parallel_size=2 needs topology='process'"):
        LLMEngine.from_vllm_config(replace(config, world_size=2))


def test_the_death_of_a_process_is_raised_by_step() -> None:
    """Once, and no request is left over for which another step would wait."""
    engine = LLMEngine("storyteller", num_threads=1, on_failure="raise")
    for name in "xyz":
        engine.add_request(name, PROMPTS[0], short(1000))
    engine.step()
    os.kill(engine._engine.pids["worker0"], signal.SIGKILL)
    with pytest.raises(EngineDeadError, match="worker0 was killed"):
        run(engine)
    assert not engine.has_unfinished_requests()
    assert engine.step() == []
    with pytest.raises(EngineDeadError):
        engine.check_health()
    engine.shutdown()


def broken(monkeypatch: pytest.MonkeyPatch, engine: LLMEngine) -> None:
    """Its scheduler raises in the next step."""

    def fail() -> None:
        raise RuntimeError("so it was asked")

    stepper = engine._engine.stepper
    assert stepper is not None
    monkeypatch.setattr(stepper._scheduler, "turn", fail)


def test_the_death_of_an_engine_that_steps_itself_is_raised_once(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = LLMEngine("storyteller", topology="inline", num_threads=1)
    engine.add_request("x", PROMPTS[0], short(1000))
    engine.step()
    broken(monkeypatch, engine)
    with pytest.raises(EngineDeadError, match="so it was asked"):
        run(engine)
    assert not engine.has_unfinished_requests()
    assert engine.step() == []
    engine.shutdown()


def test_a_drain_during_which_the_engine_dies_has_ended_nothing_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = LLMEngine("storyteller", topology="inline", num_threads=1)
    engine.add_request("x", PROMPTS[0], short(1000))
    engine.step()
    broken(monkeypatch, engine)
    stepper = engine._engine.stepper
    assert stepper is not None
    assert stepper.drain(now() + 5) is False
    engine.shutdown()
