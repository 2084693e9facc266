"""`RequestOutput`, `CompletionOutput` and `RequestMetrics` by themselves: fields, merging, names of both generations."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import pickle
from collections.abc import Callable

import pytest

from actorllm.actors.frontend import Delta
from actorllm.client.stream import Mailbox, RequestStream
from actorllm.errors import RequestFailedError
from actorllm.types.outputs import CompletionOutput, RequestOutput
from actorllm.types.params import RequestOutputKind
from actorllm.types.request_end import RequestEnd
from actorllm.types.request_metrics import RequestMetrics


def output_of(*completions: CompletionOutput, finished: bool = False) -> RequestOutput:
    return RequestOutput("r", "p", [1], outputs=list(completions), finished=finished)


def test_deltas_add_up() -> None:
    output = output_of(CompletionOutput(0, "a", [1], logprobs=[{1: -0.5}]), CompletionOutput(1, "x", [9]))
    later = CompletionOutput(0, "b", [2], cumulative_logprob=-1.5, logprobs=[{2: -1.0}], finish_reason="stop")
    later.stop_reason = 2
    output.add(output_of(later, CompletionOutput(2, "n", [5]), finished=True), aggregate=True)
    assert output.finished
    first, second, third = output.outputs
    assert (first.text, first.token_ids, first.cumulative_logprob) == ("ab", [1, 2], -1.5)
    assert (first.logprobs, first.finish_reason, first.stop_reason) == ([{1: -0.5}, {2: -1.0}], "stop", 2)
    assert (second.text, second.finished()) == ("x", False)
    assert third.index == 2


def test_cumulative_outputs_replace_each_other() -> None:
    output = output_of(CompletionOutput(0, "a", [1]), CompletionOutput(1, "x", [9]))
    output.add(output_of(CompletionOutput(1, "xy", [9, 8])), aggregate=False)
    assert [completion.text for completion in output.outputs] == ["a", "xy"]
    assert not output.finished


def test_metrics_answer_to_both_names() -> None:
    metrics = RequestMetrics(
        100.0, queued_ts=100.5, scheduled_ts=101.0, first_token_ts=102.0, last_token_ts=105.0, finished_time=106.0
    )
    assert (metrics.queued_time, metrics.first_scheduled_time) == (metrics.queued_ts, metrics.scheduled_ts)
    assert (metrics.first_token_time, metrics.last_token_time) == (metrics.first_token_ts, metrics.last_token_ts)
    assert metrics.time_in_queue == pytest.approx(1)
    assert metrics.intake_time == metrics.queue_time == pytest.approx(0.5)
    assert metrics.first_token_latency == metrics.time_to_first_token == pytest.approx(2)
    assert (metrics.scheduler_time, metrics.model_forward_time, metrics.model_execute_time) == (None, None, None)
    done = RequestMetrics(100.0, scheduler_time=0.1, model_forward_time=1.0, model_execute_time=1.1)
    assert (done.scheduler_time, done.model_forward_time, done.model_execute_time) == (0.1, 1.0, 1.1)


def test_what_has_not_happened_is_zero_or_none() -> None:
    metrics = RequestMetrics(100.0)
    assert metrics.queued_ts == metrics.scheduled_ts == metrics.first_token_ts == metrics.last_token_ts == 0.0
    assert metrics.first_token_latency == 0.0
    assert metrics.time_to_first_token is metrics.time_in_queue is metrics.first_scheduled_time is None
    assert metrics.intake_time is metrics.queue_time is None


def test_a_failed_request_has_metrics_as_well() -> None:
    mailbox = Mailbox()
    stream = RequestStream("r", None, RequestOutputKind.CUMULATIVE, 1.0, mailbox, lambda mailbox: None)
    error = RequestFailedError("the model's logits are not finite")
    error.end = RequestEnd(0, "error", None, "x", 1.0, 2.0, 3.0, 4.0, 1, 0, 0, 42)
    mailbox.fail(error)
    with pytest.raises(RequestFailedError, match="not finite") as raised:
        stream.take()
    metrics = raised.value.metrics
    assert metrics is not None
    assert (metrics.is_corrupted, metrics.num_nonfinite, metrics.num_preemptions) == (True, 42, 1)
    assert error.metrics is None, "an error may end several streams"


def test_who_takes_deltas_has_the_first_token_in_its_metrics() -> None:
    """As its consumer saw it: a scheduler that took over knows of no earlier token than its own first one."""
    mailbox = Mailbox()
    stream = RequestStream("r", None, RequestOutputKind.DELTA, 1.0, mailbox, lambda mailbox: None)
    mailbox.push(Delta([7], "a", None, 2.0))
    assert stream.take_deltas() == [(0, Delta([7], "a", None, 2.0))]
    end = RequestEnd(0, "length", None, None, 8.0, 8.5, 9.0, 9.5, 0, 0, 0, num_recoveries=1)
    mailbox.push(Delta([8], "b", end, 9.5))
    assert stream.take_deltas() is None
    output = stream.take()
    assert output is not None
    assert output.metrics is not None
    assert output.metrics.time_to_first_token == pytest.approx(1.0)
    assert output.metrics.scheduled_ts == output.metrics.first_token_ts


async def waits(stream: RequestStream) -> bool:
    """Whether `wait` waits for the next wake-up."""
    waiting = asyncio.ensure_future(stream.wait())
    for _ in range(5):
        await asyncio.sleep(0)
    has_waited = not waiting.done()
    stream.mailbox.wake()
    await waiting
    return has_waited


def test_a_stream_waits_only_where_there_is_nothing_to_take() -> None:
    """One wake-up may stand for several deltas, and for the end behind those that were taken."""

    async def check() -> None:
        mailbox = Mailbox()
        stream = RequestStream("r", None, RequestOutputKind.DELTA, 1.0, mailbox, lambda mailbox: None)
        await stream.wait()  # from here on it belongs to this loop
        assert await waits(stream)
        mailbox.push(Delta([7], "a", None, 2.0))
        assert not await waits(stream)
        mailbox.push(Delta([8], "b", RequestEnd(0, "length", None, None, 1.0, 1.0, 1.0, 1.0, 0, 0, 0), 2.0))
        assert stream.take_deltas() == [(0, Delta([7], "a", None, 2.0))]
        assert not await waits(stream), "the end has come"
        assert stream.take_deltas() is None

    asyncio.run(check())


def test_a_stream_of_one_output_waits_for_its_end() -> None:
    async def check() -> None:
        mailbox = Mailbox()
        stream = RequestStream("r", None, RequestOutputKind.FINAL_ONLY, 1.0, mailbox, lambda mailbox: None)
        await stream.wait()
        mailbox.push(Delta([7], "a", None, 2.0))
        assert await waits(stream)
        mailbox.fail(RequestFailedError("x"))
        assert not await waits(stream)

    asyncio.run(check())


def test_arguments_of_another_version_are_dropped_with_a_warning() -> None:
    with pytest.warns(UserWarning, match="RequestOutput has no num_spec_tokens, stage; what is given is dropped"):
        output = RequestOutput("7", None, [1], finished=True, num_spec_tokens=3, stage="x")
    assert (output.request_id, output.prompt_token_ids, output.finished) == ("7", [1], True)
    with pytest.raises(TypeError, match="missing"):
        RequestOutput("7")  # type: ignore[call-arg]


def streamed() -> RequestOutput:
    mailbox = Mailbox()
    mailbox.note_version(0, "v1")
    stream = RequestStream("r", "p", RequestOutputKind.DELTA, 1.0, mailbox, lambda mailbox: None)
    mailbox.push(Delta([7, 8], "ab", None, 2.0))
    output = stream.take()
    assert output is not None
    return output


@pytest.mark.parametrize(
    "of",
    [
        lambda output: output,
        copy.copy,
        copy.deepcopy,
        lambda output: pickle.loads(pickle.dumps(output)),
        dataclasses.replace,
    ],
)
def test_an_output_of_a_stream_has_every_field(of: Callable[[RequestOutput], RequestOutput]) -> None:
    """What a stream does not set is made when it is asked for, and that is nothing a program can tell."""
    output = of(streamed())
    (completion,) = output.outputs
    assert completion == CompletionOutput(0, "ab", [7, 8], weight_versions=[(0, 2, "v1")])  # type: ignore[list-item]
    assert output.metrics is not None
    assert output.metrics.time_to_first_token == pytest.approx(1.0)
    assert output.metrics.num_generation_tokens == 2
    assert output == RequestOutput("r", "p", [], outputs=[completion], metrics=output.metrics)
    assert repr(output) == repr(streamed())
    assert dataclasses.asdict(output)["multi_modal_placeholders"] == {}
    assert output.multi_modal_placeholders is output.multi_modal_placeholders
    assert not hasattr(output, "num_spec_tokens")


def test_what_an_output_says_stays_as_it_was_when_it_was_taken() -> None:
    mailbox = Mailbox()
    mailbox.note_version(0, "v1")
    stream = RequestStream("r", None, RequestOutputKind.DELTA, 1.0, mailbox, lambda mailbox: None)
    mailbox.push(Delta([7], "a", None, 2.0))
    first = stream.take()
    mailbox.note_version(1, "v2")
    mailbox.push(Delta([8], "b", None, 3.0))
    second = stream.take()
    assert first is not None
    assert second is not None
    assert first.outputs[0].weight_versions == [(0, 1, "v1")]
    assert second.outputs[0].weight_versions == [(0, 1, "v1"), (1, 2, "v2")]
    assert first.metrics is not None
    assert second.metrics is not None
    assert second.metrics.last_token_ts - first.metrics.last_token_ts == pytest.approx(1.0)
