"""Grammars in the scheduler actor, with a scripted model: who waits for one, which masks it is told, and how it ends."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import anyio
import numpy as np
import pytest

from actorllm.actors.constraints import CompileJob
from actorllm.actors.executor import FairExecutor
from actorllm.errors import PeerLostError
from actorllm.messages import INVALID, OVERLOADED, Abort, Drafted, LateInputs, StepFailed, StepPlan, StepResult, Unblock
from actorllm.text.grammar import GrammarCompiler
from actorllm.types.request_end import RequestEnd
from tests.actors.scheduler_bench import VOCAB, Bench, FakeLink, running, submit

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, Any]]:
    return "asyncio", {"use_uvloop": True}


EOS = 0
REGEX = {"kind": "regex", "text": "[0-9]{3}x", "source": "structured_outputs"}


class Aside:
    """Makes matchers when it is told to."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._is_open = False
        self.queue: FairExecutor[CompileJob] = FairExecutor("grammars", bool, has_room=lambda _: self._is_open)
        bench.actor._constraints._queue = self.queue
        runner = SimpleNamespace(
            report_progress=lambda: None, waker=lambda: bool, report_defect=bench.actor._runner.report_defect
        )
        bench.actor._runner = runner  # type: ignore[assignment]

    @property
    def num_waiting(self) -> int:
        return self.queue.statistics().num_waiting

    def finish(self) -> None:
        self._is_open = True
        while self.queue.statistics().num_waiting or self.queue.statistics().num_running:
            with self.queue._changed:
                self.queue._changed.notify_all()
        self._is_open = False
        self._bench.actor.wake()


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
        await bench.send(submit(1, grammar=REGEX, ignore_eos=False))
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
        assert allowed(late(bench)[-1]) == {EOS}
        assert bench.ends() == []
        await answer(bench, bench.plans[4], EOS)
        assert bench.ends() == [[1, "stop", None, None]]
        assert bench.text() == "777x"
        assert bench.tokens()[-1] == EOS
        (end,) = [end for o in bench.outputs for end in o.ends]
        assert end[10] == 1, "one token was computed in vain"
        assert late(bench)[-1].slots.size == 0, "of a row whose request has ended there is nothing to say"


async def test_siblings_go_on_together_and_an_abort_ends_who_waits() -> None:
    async with running() as bench:
        aside = Aside(bench)
        await bench.send(submit(1, grammar=REGEX, siblings=np.array([2, 3], np.int32)))
        assert aside.num_waiting == 1
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
        await bench.send(submit(2, grammar=REGEX, output=np.array([two] * 3 + [x, EOS], np.int32), ignore_eos=False))
        await bench.send(submit(3, grammar=REGEX, output=np.array([x], np.int32)))
        aside.finish()
        await bench.settle()
        assert allowed(late(bench)[0]) == {x}
        ends = bench.ends()
        assert [2, "stop", None, None] in ends
        (failed,) = [end for end in ends if end[1] == "error"]
        assert failed[0] == 3
        assert failed[3].startswith("structured_outputs: ")


async def test_a_thought_that_had_ended_does_not_end_its_request_again() -> None:
    """Of a request that has only a budget, what follows the thought is free, also after the scheduler was started again."""
    marks = {"start": "<", "end": ">", "forced": ">", "is_assumed": True, "budget": 2}
    grammar = {"kind": "free", "text": "", "source": "thinking_token_budget", "thought": marks}
    async with running() as bench:
        aside = Aside(bench)
        two, end = ids(bench, "2>")
        await bench.send(submit(1, grammar=grammar, output=np.array([two, two, end, two], np.int32), ignore_eos=False))
        await bench.send(submit(2, grammar=grammar, output=np.array([two, two], np.int32), ignore_eos=False))
        aside.finish()
        await bench.settle()
        assert bench.ends() == []
        (inputs,) = late(bench)[:1]
        assert len(inputs.slots) == 1, "nothing is asked of what is behind the thought"
        assert allowed(inputs) == {end}


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


async def test_after_its_end_what_ignores_it_is_free() -> None:
    async with running() as bench:
        aside = Aside(bench)
        await bench.send(submit(1, grammar=REGEX))
        aside.finish()
        await bench.settle()
        for number, token in enumerate([*ids(bench, "777x"), EOS]):
            await answer(bench, bench.plans[number], token)
        assert bench.ends() == []
        assert late(bench)[-1].slots.size == 0, "no mask: whatever is sampled is right"
        for number in range(5, 8):
            await answer(bench, bench.plans[number], *ids(bench, "z"))
        assert bench.ends() == [[1, "length", None, None]]


async def test_where_no_end_of_text_may_come_it_ends_without_one() -> None:
    async with running() as bench:
        aside = Aside(bench)
        await bench.send(submit(1, grammar=REGEX, ignore_eos=False, min_tokens=6))
        aside.finish()
        await bench.settle()
        for number, token in enumerate(ids(bench, "777x")):
            await answer(bench, bench.plans[number], token)
        assert bench.ends() == [[1, "stop", None, None]]
        assert bench.text() == "777x"


async def test_limits_that_are_reached_before_the_first_token_are_the_request_s_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(GrammarCompiler, "failure_of", staticmethod(lambda matcher: "too many states"))
    monkeypatch.setattr(
        GrammarCompiler,
        "masks",
        lambda self, made: (np.zeros((len(made), VOCAB // 32), np.uint32), [False] * len(made)),
    )
    async with running() as bench:
        aside = Aside(bench)
        await bench.send(submit(1, grammar=REGEX))
        await bench.send(submit(2, grammar=REGEX, output=np.array(ids(bench, "7"), np.int32)))
        aside.finish()
        await bench.settle()
        ends = {end[0]: end for output in bench.outputs for end in output.ends}
        told = {int(output.rids[e[0]]): e for output in bench.outputs for e in output.ends}
        assert len(ends) >= 1
        details = {rid: RequestEnd(*end).details for rid, end in told.items()}
        assert all(
            "structured_outputs: the grammar cannot go on here: too many states" in str(e) for e in told.values()
        )
        assert details[1] == {"kind": INVALID}
        assert details[2] is None
        compiler = bench.actor._constraints._compiler
        assert compiler is not None
        assert compiler.statistics()["num_cached"] == 0, "it is not used again"


async def test_jobs_of_requests_that_have_gone_are_dropped_and_told() -> None:
    async with running() as bench:
        aside = Aside(bench)
        await bench.send(submit(1, grammar=REGEX))
        await bench.send(submit(2, grammar=REGEX | {"text": "b"}))
        await bench.send(Abort(rids=np.array([1], np.int32)))
        await bench.send(submit(3, grammar=REGEX))  # while the job of the first is not dropped yet
        aside.finish()
        await bench.settle()
        aside.finish()
        await bench.settle()
        assert bench.actor.scheduler.statistics().num_blocked == 0
        assert not bench.actor._constraints.is_making
        before = bench.actor._constraints.statistics()["num_dropped"]
        await bench.send(submit(4, grammar=REGEX | {"text": "c"}))
        await bench.send(Abort(rids=np.array([4], np.int32)))
        aside.finish()
        await bench.settle()
        assert bench.actor._constraints.statistics()["num_dropped"] == before + 1
        assert not bench.actor._constraints.is_making


async def test_more_than_may_wait_is_refused_as_overload() -> None:
    async with running() as bench:
        aside = Aside(bench)
        aside.queue.max_jobs = 2
        for rid in (1, 2, 3):
            await bench.send(submit(rid, grammar=REGEX | {"text": f"{rid}"}))
        ((rid, reason, _, error),) = bench.ends()
        assert (rid, reason) == (3, "error")
        assert "2 grammars wait to be compiled" in error
        (told,) = [end for output in bench.outputs for end in output.ends]
        assert (RequestEnd(*told).details or {})["kind"] == OVERLOADED
        await bench.send(submit(4, grammar=REGEX | {"text": "1"}))
        assert aside.num_waiting == 2, "the same grammar is one job"


async def test_a_grammar_that_takes_too_long_fails_in_time_and_a_panic_fails_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    release = threading.Event()

    class Panic(BaseException):
        """As pyo3 raises it."""

    compile = GrammarCompiler.compile

    def slow(self: GrammarCompiler, grammar: Any, is_wanted: Any = bool) -> Any:
        if grammar["text"] == "slow":
            release.wait()
        if grammar["text"] == "panic":
            raise Panic("retry-limit-in-match over")
        return compile(self, grammar, is_wanted)

    monkeypatch.setattr(GrammarCompiler, "compile", slow)
    async with running() as bench:
        aside = Aside(bench)
        aside._is_open = True
        await bench.send(submit(2, grammar=REGEX | {"text": "panic"}))
        await bench.send(submit(3, grammar=REGEX))
        with anyio.fail_after(30):
            while not bench.ends() or not bench.plans:
                bench.actor.wake()
                await anyio.sleep(0.002)
        aside.queue.timeout_s = 0.05
        await bench.send(submit(1, grammar=REGEX | {"text": "slow"}))
        with anyio.fail_after(30):
            while len(bench.ends()) < 2:
                bench.actor.wake()
                await anyio.sleep(0.002)
        errors = {end[0]: end[3] for end in bench.ends()}
        assert errors[1] == "structured_outputs: it takes longer than 0.05 s to compile; make it smaller or simpler"
        assert errors[2] == "structured_outputs: it cannot be compiled: Panic: retry-limit-in-match over"
        grammars = bench.actor._constraints.statistics()
        assert (grammars["num_timeouts"], grammars["num_abandoned"]) == (1, 1)
        release.set()
        with anyio.fail_after(30):
            while bench.actor._constraints.statistics()["num_abandoned"]:
                await anyio.sleep(0.002)


async def test_a_grammar_is_made_beside_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    from actorllm.actors.actor import Runner

    threads: list[int] = []
    run = CompileJob.run
    monkeypatch.setattr(CompileJob, "run", lambda job: threads.append(threading.get_ident()) or run(job))
    async with running() as bench, anyio.create_task_group() as tasks:
        runner = Runner(bench.actor, lambda _: None)
        runner._tasks = tasks
        await bench.send(submit(1, grammar=REGEX))
        with anyio.fail_after(30):
            while not bench.plans:
                await anyio.sleep(0.002)
    assert threads
    assert threads != [threading.get_ident()]


# Drafts ---------------------------------------------------------------------------------------------------------------

DRAFTING = {
    "speculative_config": {
        "method": "ngram",
        "num_speculative_tokens": 3,
        "num_speculative_tokens_per_batch_size": [[1, 9, 3]],
    }
}


def int32(*values: int) -> Any:
    return np.array(values, np.int32)


async def begun(bench: Bench) -> Aside:
    """A request whose first token is to be a digit; the step of its second one is in flight and has not told its drafts."""
    aside = Aside(bench)
    await bench.send(submit(1, grammar=REGEX, ignore_eos=False))
    aside.finish()
    await bench.settle()
    await bench.send(StepResult(step=1, tokens=int32(*ids(bench, "7"))), bench.ranks[0])
    return aside


async def test_masks_wait_for_drafts_and_follow_them_as_far_as_the_grammar_does() -> None:
    async with running(**DRAFTING) as bench:
        await begun(bench)
        assert bench.plans[1].max_drafts == 3
        seven, eight, x = ids(bench, "78x")
        assert [m.step for m in late(bench)] == [1], "what the second step tries is not known yet"
        slot = bench.plans[0].new["slot"]
        await bench.send(Drafted(step=2, slots=slot, counts=int32(3), tokens=int32(eight, x, seven)), bench.ranks[0])
        told = late(bench)[-1]
        assert (told.step, told.counts.tolist()) == (2, [2]), "behind 78 there is no x"
        masks = LateInputs(step=2, slots=int32(0, 1), allowed=told.allowed)
        assert x not in allowed(masks, 0) | allowed(masks, 1)
        assert told.forced.tolist() == []
        await bench.send(
            StepResult(step=2, tokens=int32(eight, seven), counts=int32(2), num_drafted=int32(3)), bench.ranks[0]
        )
        await bench.send(Drafted(step=3), bench.ranks[0])
        told = late(bench)[-1]
        assert told.counts.tolist() == [1]
        assert allowed(told) == {x}
        assert told.forced.tolist()[0] == x


async def test_a_step_that_fails_before_it_tells_its_drafts_holds_up_no_other() -> None:
    async with running(**DRAFTING) as bench:
        aside = await begun(bench)
        await bench.send(StepFailed(step=2, error="planted"), bench.ranks[0])
        await bench.send(StepFailed(step=3, error="planted"), bench.ranks[0])
        await bench.send(submit(2, grammar=REGEX))
        aside.finish()
        await bench.settle()
        assert [m.step for m in late(bench)] == [1, 2, 3, 4]
        await bench.send(Drafted(step=3), bench.ranks[0])  # nothing waits for it any more
        assert bench.defects == []


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ({"slots": int32(5), "counts": int32(1), "tokens": int32(1)}, "drafts of slots [5] in a plan with grammars"),
        ({"slots": int32(0, 0), "counts": int32(1, 1), "tokens": int32(1, 1)}, "drafts of slots [0, 0]"),
        ({"slots": int32(0), "counts": int32(4), "tokens": int32(1, 1, 1, 1)}, "4 drafts, counted [4]"),
        ({"slots": int32(0), "counts": int32(2), "tokens": int32(1)}, "1 drafts, counted [2]"),
        ({"slots": int32(0), "counts": int32(1), "tokens": int32(VOCAB)}, "a draft outside the vocabulary"),
    ],
)
async def test_a_worker_whose_drafts_cannot_be_is_replaced(said: dict[str, Any], told: str) -> None:
    async with running(**DRAFTING) as bench:
        await begun(bench)
        await bench.send(Drafted(step=2, **said), bench.ranks[0])
        ((_, what),) = bench.defects
        assert what.startswith(f"contradicting its plans: step 2: {told}")
