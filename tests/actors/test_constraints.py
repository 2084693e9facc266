"""Grammars in the scheduler actor, with a scripted model: who waits for one, which masks it is told, and how it ends."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import anyio
import numpy as np
import pytest

from actorllm.actors.constraints import Job
from actorllm.errors import PeerLostError
from actorllm.messages import Abort, LateInputs, StepPlan, StepResult, Unblock
from tests.actors.test_scheduler_actor import Bench, FakeLink, running, submit

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, Any]]:
    return "asyncio", {"use_uvloop": True}


REGEX = {"kind": "regex", "text": "[0-9]{3}x", "source": "structured_outputs"}


class Aside:
    """Runs what is to be done beside the loop, when it is told to."""

    def __init__(self, bench: Bench) -> None:
        self.waiting: list[Any] = []
        bench.actor._runner = SimpleNamespace(  # type: ignore[assignment]
            report_progress=lambda: None, work_aside=lambda function, then: self.waiting.append((function, then))
        )

    def finish(self) -> None:
        waiting, self.waiting = self.waiting, []
        for function, then in waiting:
            then(function())


def ids(bench: Bench, text: str) -> list[int]:
    tokenizer = bench.actor._tokenizer
    assert tokenizer is not None
    return [int(tokenizer.encode(character, add_special_tokens=False)[-1]) for character in text]


def late(bench: Bench) -> list[LateInputs]:
    return [m for m in bench.workers.sent if isinstance(m, LateInputs)]


def allowed(inputs: LateInputs, row: int = 0) -> set[int]:
    words = inputs.allowed.reshape(len(inputs.slots), -1)[row]
    return set(np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist())


async def answer(bench: Bench, plan: StepPlan, *tokens: int) -> None:
    await bench.send(StepResult(step=plan.step, tokens=np.array(tokens, np.int32)), bench.ranks[0])


async def test_a_request_waits_for_its_grammar_and_nobody_else_does() -> None:
    async with running() as bench:
        aside = Aside(bench)
        await bench.send(submit(1, grammar=REGEX))
        await bench.send(submit(2, max_tokens=2))
        assert bench.actor.scheduler.statistics().blocked_on == {"grammar": 1}
        await bench.send(Unblock(rid=1))  # nobody else can say that
        assert bench.actor.scheduler.statistics().num_blocked == 1
        assert bench.plans[0].new["slot"].size == 1
        aside.finish()
        await bench.settle()
        assert bench.actor.scheduler.statistics().num_blocked == 0


async def test_masks_follow_the_tokens_with_two_steps_in_flight() -> None:
    async with running() as bench:
        aside = Aside(bench)
        await bench.send(submit(1, grammar=REGEX))
        aside.finish()
        await bench.settle()
        assert len(bench.plans) == 2, "the second step is launched before the first token is known"
        assert [m.step for m in late(bench)] == [1]
        digits = set(ids(bench, "0123456789"))
        assert digits <= allowed(late(bench)[0])
        seven, x = ids(bench, "7x")
        for number in range(3):
            await answer(bench, bench.plans[number], seven)
            assert [m.step for m in late(bench)] == list(range(1, number + 3))
        assert allowed(late(bench)[-1]) == {x}
        await answer(bench, bench.plans[3], x)
        assert bench.ends() == [[1, "stop", None, None]]
        assert bench.text() == "777x"
        (end,) = [end for o in bench.outputs for end in o.ends]
        assert end[10] == 1, "one token was computed in vain"
        assert late(bench)[-1].slots.size == 0, "of a row whose request has ended there is nothing to say"


async def test_siblings_go_on_together_and_an_abort_ends_who_waits() -> None:
    async with running() as bench:
        aside = Aside(bench)
        await bench.send(submit(1, grammar=REGEX, siblings=np.array([2, 3], np.int32)))
        assert len(aside.waiting) == 1
        await bench.send(submit(4, grammar=REGEX))
        await bench.send(Abort(rids=np.array([4], np.int32)))
        aside.finish()
        await bench.settle()
        assert [4, "abort", None, None] in bench.ends()
        assert bench.actor.scheduler.statistics().num_forks == 2
        assert late(bench)[0].slots.size == 3


async def test_output_so_far_counts_and_output_at_its_end_ends() -> None:
    async with running() as bench:
        aside = Aside(bench)
        two, x = ids(bench, "2x")
        await bench.send(submit(1, grammar=REGEX, output=np.array([two] * 3, np.int32)))
        await bench.send(submit(2, grammar=REGEX, output=np.array([two] * 3 + [x], np.int32)))
        await bench.send(submit(3, grammar=REGEX, output=np.array([x], np.int32)))
        aside.finish()
        await bench.settle()
        assert allowed(late(bench)[0]) == {x}
        ends = bench.ends()
        assert [2, "stop", None, None] in ends
        (failed,) = [end for end in ends if end[1] == "error"]
        assert failed[0] == 3
        assert failed[3].startswith("structured_outputs: ")


async def test_after_the_death_of_the_workers_the_grammar_stands_where_the_tokens_do() -> None:
    async with running() as bench:
        aside = Aside(bench)
        await bench.send(submit(1, grammar=REGEX))
        aside.finish()
        await bench.settle()
        seven, x = ids(bench, "7x")
        await answer(bench, bench.plans[0], seven)
        bench.workers.lost = PeerLostError("killed")  # type: ignore[attr-defined]
        bench.actor.on_peer_lost(bench.workers)  # type: ignore[arg-type]
        bench.workers = FakeLink("workers")
        bench.actor.on_link(bench.workers)  # type: ignore[arg-type]
        await bench.settle()
        first, second = bench.plans
        await answer(bench, first, seven)
        await answer(bench, second, seven)
        assert allowed(late(bench)[-1]) == {x}
        assert bench.text() == "777"


async def test_what_the_mask_forbids_fails_the_request() -> None:
    """A worker that samples something else is broken; the grammar is not followed in silence."""
    async with running() as bench:
        aside = Aside(bench)
        await bench.send(submit(1, grammar=REGEX))
        aside.finish()
        await bench.settle()
        await answer(bench, bench.plans[0], *ids(bench, "x"))
        ((rid, reason, _, error),) = bench.ends()
        assert (rid, reason) == (1, "error")
        assert "not in the grammar" in error


async def test_a_grammar_is_made_beside_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    from actorllm.actors.actor import Runner

    threads: list[int] = []
    run = Job.run
    monkeypatch.setattr(Job, "run", lambda job: threads.append(threading.get_ident()) or run(job))
    async with running() as bench, anyio.create_task_group() as tasks:
        runner = Runner(bench.actor, lambda _: None)
        runner._tasks = tasks
        await bench.send(submit(1, grammar=REGEX))
        with anyio.fail_after(5):
            while not bench.plans:
                await anyio.sleep(0.002)
    assert threads
    assert threads != [threading.get_ident()]
