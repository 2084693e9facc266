"""Logits processors of the application: what they see, what they may break, and that streams stay the same."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from actorllm import LLM, AsyncLLM, SamplingParams
from actorllm.actors.record_file import fresh_scheduler, read_recording
from actorllm.errors import ConfigError, EngineStartError, InvalidParameterError, RequestFailedError
from actorllm.messages import Submit
from actorllm.scheduling.telemetry.recording import replay
from actorllm.types.logits_processors.paths import load
from tests.api.logits_processors.changers import LEAVES, NoRepeats, Sharpened, Target

PATH = "tests.api.logits_processors.changers"
ARGUMENTS: dict[str, Any] = {"max_model_len": 128, "num_threads": 1, "dtype": "float32"}
PROMPT = "Once upon a time there was"


@pytest.fixture(scope="module")
def llm() -> Any:
    with LLM("storyteller", topology="inline", logits_processors=[NoRepeats, f"{PATH}:Target"], **ARGUMENTS) as engine:
        yield engine


@pytest.fixture(scope="module")
def plain() -> Any:
    with LLM("storyteller", topology="inline", **ARGUMENTS) as engine:
        yield engine


def params(extra: dict[str, Any] | None = None, **more: Any) -> SamplingParams:
    return SamplingParams(**({"max_tokens": 36, "temperature": 0, "ignore_eos": True} | more), extra_args=extra)


MIXED = [
    params({"target": 7}),
    params(),
    params({"no_repeats": True}),
    params({"no_repeats": True, "target": 9}, temperature=1, seed=4),
    params({"target": 11}, repetition_penalty=1.3, logprobs=2),
    params(temperature=1, seed=5),
]


def tokens_of(llm: LLM, asked: list[SamplingParams]) -> list[list[int]]:
    outputs = llm.generate([PROMPT] * len(asked), asked, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def test_each_request_gets_what_its_own_arguments_ask_for(llm: LLM, plain: LLM) -> None:
    together = tokens_of(llm, MIXED)
    assert together == [tokens_of(llm, [one])[0] for one in MIXED]
    assert together[0][2::3] == [7] * 12
    assert together[4][2::3] == [11] * 12
    assert len(set(together[2])) == 36
    without = [SamplingParams(max_tokens=36, temperature=t, ignore_eos=True, seed=5) for t in (0, 1)]
    assert [together[1], together[5]] == tokens_of(plain, without)
    assert len(set(together[1])) < 36, "the test would pass with a processor that does nothing"


def test_sequences_of_one_request_have_their_own_outputs(llm: LLM) -> None:
    (output,) = llm.generate([PROMPT], params({"no_repeats": True}, temperature=1, seed=1, n=3), use_tqdm=False)
    found = [list(one.token_ids) for one in output.outputs]
    assert all(len(set(one)) == 36 for one in found)
    assert len({tuple(one) for one in found}) == 3


def test_log_probabilities_are_those_of_the_model(llm: LLM, plain: LLM) -> None:
    (changed,) = llm.generate([PROMPT], params({"target": 7}, max_tokens=3, logprobs=1), use_tqdm=False)
    (as_ever,) = plain.generate([PROMPT], params(max_tokens=1, logprobs=1), use_tqdm=False)
    first, *_, forced = changed.outputs[0].logprobs
    assert {i: one.logprob for i, one in first.items()} == {
        i: one.logprob for i, one in as_ever.outputs[0].logprobs[0].items()
    }
    assert forced[7].logprob < -1, "0 is that of the changed logits"


def test_one_that_raises_ends_its_own_request_only(llm: LLM) -> None:
    asked = [*MIXED[:3], params({"target": -3}), *MIXED[3:]]
    expected = tokens_of(llm, MIXED)
    engine = llm.llm_engine
    for number, one in enumerate(asked):
        engine.add_request(str(number), PROMPT, one)
    found: dict[str, Any] = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            found[output.request_id] = output
    assert [list(found[str(i)].outputs[0].token_ids) for i in (0, 1, 2, 4, 5, 6)] == expected


def test_one_that_raises_system_exit_ends_its_request_and_no_loop(llm: LLM) -> None:
    with pytest.raises(RequestFailedError, match="SystemExit"):
        llm.generate([PROMPT], params({"target": LEAVES}), use_tqdm=False)


def test_an_error_that_came_with_the_last_tokens_ends_its_request(llm: LLM) -> None:
    """Tokens and error are there before the first step: the error is the output of the second."""
    engine = llm.llm_engine
    num_finished = engine.stats()["frontend"]["num_finished"]
    engine.add_request("late", PROMPT, params({"target": -3}))
    while engine.stats()["frontend"]["num_finished"] == num_finished:
        time.sleep(0.01)
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    assert [output.finished for output in outputs] == [False, True]
    assert len(outputs[0].outputs[0].token_ids) == 4
    assert outputs[1].outputs[0].finish_reason == "error"


def test_validate_params_refuses_a_request(llm: LLM) -> None:
    with pytest.raises(InvalidParameterError, match="no_repeats must be True or False"):
        llm.generate([PROMPT], params({"no_repeats": 3}), use_tqdm=False)


def test_one_that_leaves_the_most_likely_token_sees_scaled_logits(plain: LLM) -> None:
    """So does min_p, which this one is: at any temperature they give the same."""
    kinds: list[dict[str, Any]] = [{}, {"temperature": 0.5, "seed": 3}, {"temperature": 1.9, "seed": 3}]
    with LLM("storyteller", topology="inline", logits_processors=[Sharpened], **ARGUMENTS) as llm:
        found = tokens_of(llm, [params(**kind) for kind in kinds])
    assert found == tokens_of(plain, [params(**kind, min_p=0.5) for kind in kinds])
    assert found != tokens_of(plain, [params(**kind) for kind in kinds])


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_streams_go_on_unchanged_over_the_death_of_a_worker(llm: LLM) -> None:
    """The worker that replaces it is told of the output that its predecessors have made."""
    asked = [params(one.extra_args, max_tokens=60, temperature=1, seed=i) for i, one in enumerate(MIXED)]
    expected = tokens_of(llm, asked)
    async with AsyncLLM("storyteller", logits_processors=[NoRepeats, Target], **ARGUMENTS) as engine:
        streams = [engine.generate(PROMPT, one, request_id=str(i)) for i, one in enumerate(asked)]
        async for output in streams[0]:
            if len(output.outputs[0].token_ids) >= 5:
                break
        os.kill(engine.health().actors["worker0"].pid, signal.SIGKILL)
        found = []
        for stream in streams:
            async for output in stream:
                last = output
            found.append(list(last.outputs[0].token_ids))
        assert engine.health().num_recoveries == 1
    assert found == expected


PROGRAM = """
from tests.api.logits_processors.changers import Target

from actorllm import LLM, SamplingParams


class Mine(Target): ...


def main():
    with LLM("storyteller", logits_processors=[Mine], max_model_len=64, num_threads=1) as llm:
        params = SamplingParams(max_tokens=3, temperature=0, extra_args={"target": 17})
        print(llm.generate(["Once"], params, use_tqdm=False)[0].outputs[0].token_ids[2])

"""


def test_a_class_of_the_main_program(tmp_path: Path) -> None:
    """The worker runs the program again, without what stands behind its guard."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM + 'if __name__ == "__main__":\n    main()\n')
    done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.split() == ["17"], done.stderr


def test_a_main_program_without_a_guard_starts_no_engine_in_its_worker(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM + "main()\n")
    with pytest.raises(ConfigError, match='put what it does behind `if __name__ == "__main__":`'):
        load(f"{program}:Mine")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (NoRepeats, "must be a list"),
        ("tests:Target", "must be a list"),
        ([f"{PATH}.Target"], "must be written as 'module:Class'"),
        ([dict], "must be a subclass of LogitsProcessor"),
        ([f"{PATH}:Nothing"], "cannot be loaded: AttributeError"),
        (["nowhere:Target"], "cannot be loaded: ModuleNotFoundError"),
        (["json:JSONDecoder"], "is no subclass of LogitsProcessor"),
        ([f"{PATH}:Unbuildable"], "cannot be built: RuntimeError: it needs a licence"),
    ],
)
def test_what_is_no_processor_is_said_at_the_start(given: Any, words: str) -> None:
    with pytest.raises((ConfigError, EngineStartError), match=words):
        LLM("storyteller", topology="inline", logits_processors=given, **ARGUMENTS)


def test_vectors_have_no_logits() -> None:
    with pytest.raises(ConfigError, match="a model that makes vectors has no logits"):
        LLM("storyteller", runner="pooling", logits_processors=[Target], **ARGUMENTS)


def test_an_engine_without_processors_takes_extra_args_and_has_nothing_to_do_with_them(plain: LLM) -> None:
    asked = [params({"target": 7}), params()]
    first, second = tokens_of(plain, asked)
    assert first == second


def test_a_request_fails_with_what_was_raised(llm: LLM) -> None:
    with pytest.raises(RequestFailedError, match="the logits processor Target failed: RuntimeError: no token -3"):
        llm.generate([PROMPT], params({"target": -3}), use_tqdm=False)


def test_a_recording_has_the_arguments_and_replays_to_the_same_plans(tmp_path: Path) -> None:
    record = tmp_path / "run.bin"
    with LLM("storyteller", topology="inline", logits_processors=[Target], record=record, **ARGUMENTS) as llm:
        tokens_of(llm, [params({"target": 7}, max_tokens=4)])
    calls = list(read_recording(record))
    submits = [message for _, _, message in calls if isinstance(message, Submit)]
    assert any(b'"target":7' in submit.processor_params.tobytes() for submit in submits)
    plans = list(replay(calls, fresh_scheduler(record)))
    assert any(b'"target":7' in plan.new_processed.tobytes() for plan in plans)
