"""What a stream makes of its deltas is the same however many wait when it is asked, and with and without the short way."""

from __future__ import annotations

import asyncio
import copy
import gc
import pickle
import random
import weakref
from typing import Any

import pytest

from actorllm import RequestOutput, RequestOutputKind
from actorllm.actors.frontend import Delta
from actorllm.client.stream import Mailbox, RequestStream
from actorllm.types.lora_request import LoRARequest
from actorllm.types.request_end import RequestEnd

KINDS = pytest.mark.parametrize("kind", list(RequestOutputKind), ids=lambda kind: kind.name)


def new_stream(kind: RequestOutputKind) -> RequestStream:
    stream = RequestStream("a", "Once", kind, 1.0, Mailbox(), lambda mailbox: None)
    stream.prompt_token_ids = [7, 8]
    return stream


def deltas(draw: random.Random) -> list[Delta]:
    """Of one request: tokens, some without text, some that were joined, text without a token, and the end."""
    found, emitted = [], 2.0
    for number in range(draw.randrange(12)):
        emitted += draw.random()
        match draw.randrange(4):
            case 0:
                found.append(Delta([number], "", None, emitted))
            case 1:
                found.append(Delta([], "late", None, emitted))
            case 2:
                found.append(Delta([number, number], f"<{number}>", None, emitted, first_emitted=emitted - 0.1))
            case _:
                found.append(Delta([number], f"<{number}>", None, emitted))
    end = RequestEnd(0, "length", None, None, 1.1, 1.2, 2.0, emitted, 2, 0, 0)
    return [*found, Delta([99], "last", end, emitted + 1)]


def fields(output: RequestOutput | None) -> dict[str, Any] | None:
    """All that can be read of it, what is made when it is asked for, too."""
    if output is None:
        return None
    found = {name: getattr(output, name) for name in RequestOutput.__dataclass_fields__ if name != "outputs"}
    return found | {
        "sequences": [{name: getattr(one, name) for name in type(one).__dataclass_fields__} for one in output.outputs]
    }


@KINDS
@pytest.mark.parametrize("seed", range(20))
def test_the_short_way_makes_what_the_long_way_makes(kind: RequestOutputKind, seed: int) -> None:
    """Walks of the engine's pushes and the consumer's takes."""
    draw = random.Random(seed)
    short, long = new_stream(kind), new_stream(kind)
    long._is_plain = False
    streams = short, long
    if draw.random() < 0.5:
        for stream in streams:
            stream.lora_request = LoRARequest("adapter", 1, "folder")
    num_taken, text, whole = 0, "", ""
    for delta in deltas(draw):
        whole += delta.text
        version = str(draw.randrange(3))
        for stream in streams:
            stream.mailbox.note_version(num_taken, version)
            stream.mailbox.push(delta)
        if draw.random() < 0.7 or delta.end is not None:
            first, second = (fields(stream.take()) for stream in streams)
            assert first == second
            num_taken += 1
            if first is not None:
                text = (
                    first["sequences"][0]["text"]
                    if kind is not RequestOutputKind.DELTA
                    else text + first["sequences"][0]["text"]
                )
    assert short.has_ended
    assert text == whole
    assert [stream.take() for stream in streams] == [None, None]


@KINDS
def test_streams_with_more_than_text_go_the_long_way(kind: RequestOutputKind) -> None:
    def is_plain(num_sequences: int = 1, **more: Any) -> bool:
        mailbox = Mailbox(num_sequences=num_sequences)
        stream = RequestStream("a", None, kind, 1.0, mailbox, lambda mailbox: None, None, num_sequences, **more)
        return stream._is_plain

    assert is_plain() is (kind is not RequestOutputKind.FINAL_ONLY)
    assert not is_plain(2)
    assert not is_plain(has_logprobs=True)
    assert not is_plain(has_prompt_logprobs=True)


def test_a_second_task_that_reads_a_stream_is_refused_and_ends_nothing() -> None:
    """The task that came first gets everything."""

    async def main() -> None:
        aborted: list[Mailbox] = []
        mailbox = Mailbox()
        stream = RequestStream("a", None, RequestOutputKind.DELTA, 1.0, mailbox, aborted.append)
        first = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        for wait in (lambda: anext(stream), stream.wait):
            with pytest.raises(RuntimeError, match="two tasks wait for one stream"):
                await wait()
        mailbox.push(Delta([7], "seven", None, 2.0))
        mailbox.wake()
        assert (await first).outputs[0].text == "seven"
        assert not aborted

    asyncio.run(main())


def test_outputs_outlive_their_stream_and_travel() -> None:
    """What they look up when they are asked does not keep the stream, whose end is the end of its request."""
    stream = RequestStream("a", "Once", RequestOutputKind.DELTA, 1.0, Mailbox(), lambda mailbox: None)
    stream.prompt_token_ids = [7, 8]
    stream.mailbox.push(Delta([9], "nine", None, 2.0))
    output = stream.take()
    left = weakref.ref(stream)
    del stream
    gc.collect()
    assert left() is None
    for one in (output, copy.copy(output), copy.deepcopy(output), pickle.loads(pickle.dumps(output))):
        assert one is not None
        assert (one.request_id, one.prompt, one.prompt_token_ids, one.lora_request) == ("a", "Once", [7, 8], None)
        assert one.outputs[0].token_ids == [9]
        assert one.metrics is not None
        assert one.metrics.num_generation_tokens == 1
        assert one.metrics.last_token_ts - one.metrics.arrival_time == 1.0
