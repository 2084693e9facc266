"""A second policy in the shadow of the one that decides."""

from __future__ import annotations

import sys
import time
from concurrent.futures import Future
from typing import Any

import anyio
import numpy as np
import pytest

from actorllm import AsyncLLM, SamplingParams
from actorllm.config import EngineConfig
from actorllm.errors import ConfigError
from actorllm.messages import Submit
from actorllm.scheduling.cost_model import preset
from actorllm.scheduling.events import End
from actorllm.scheduling.sequence import Sequence
from actorllm.scheduling.telemetry import request_log
from actorllm.scheduling.telemetry.request_log import RequestLog
from actorllm.slo.live.shadow import Shadow
from actorllm.slo.simulator import EngineShape, SimulatedRun, simulate
from actorllm.slo.workload import Workload, assign_classes, make_workload, parse_mix, poisson_arrivals
from actorllm.types.objective import READINGS

MODEL = preset("a100-llama-3-8b")


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class FakeEngine:
    """Tells of a simulated run as a scheduler would: each request once it has ended."""

    is_running = True
    stepper: Any = None

    def __init__(self, config: EngineConfig, run: SimulatedRun) -> None:
        self.config = config
        self.watchers: dict[str, Any] = {}
        self.asked: list[bool] = []
        timeline, workload = run.timeline, run.workload
        self._now = 0.0
        self._end = float(timeline.end.max()) + 1
        self._rows = []
        for row in range(len(timeline)):
            kind = workload.classes[workload.class_ids[row]]
            values = [
                float(timeline.arrival[row]), float(timeline.arrival[row]), float(timeline.first_token[row]),
                float(timeline.last_token[row]), float(timeline.end[row]), int(timeline.num_prompt[row]),
                int(timeline.num_output[row]), int(timeline.num_output[row]), "length", list(kind.slo.to_fields()),  # type: ignore[union-attr]
                kind.is_latency_sensitive, kind.priority, None, kind.name, [],
            ]  # fmt: skip
            self._rows.append(values)
        self._rows.sort(key=lambda values: values[4])

    def ask_scheduler(self, verb: str, **arguments: Any) -> Future[Any]:
        answer: Future[Any] = Future()
        self.asked.append(arguments["is_on"])
        self._now = min(self._now + 5.0, self._end)
        rows = [values for values in self._rows if values[4] <= self._now]
        self._rows = self._rows[len(rows) :]
        oldest = min((values[1] for values in self._rows if values[1] <= self._now), default=None)
        policy = {"scheduling": "fcfs", "admission": None, "num_changes": 0}
        answer.set_result({"rows": rows, "oldest": oldest, "now": self._now, "num_dropped": 0, "policy": policy})
        return answer


class FakeFleet(FakeEngine):
    """Several of them behind a router, each with requests of its own."""

    def __init__(self, config: EngineConfig, runs: list[SimulatedRun]) -> None:
        super().__init__(config, runs[0])
        self._parts = [FakeEngine(config, run) for run in runs]

    def ask_scheduler(self, verb: str, **arguments: Any) -> Future[Any]:
        answer: Future[Any] = Future()
        self.asked.append(arguments["is_on"])
        answer.set_result(
            {number: part.ask_scheduler(verb, **arguments).result() for number, part in enumerate(self._parts)}
        )
        return answer


class FakeLLM:
    def __init__(self, engine: FakeEngine) -> None:
        self._engine = engine


def workload() -> Workload:
    rng = np.random.default_rng(2)
    lengths = rng.integers(50, 950, 150).astype(np.int32), rng.integers(2, 60, 150).astype(np.int32)
    made = make_workload(poisson_arrivals(150, 30.0, 3), lengths)
    return assign_classes(made, parse_mix("ls:0.5:ttft=0.8,tpot=0.1 be:0.5:e2e=30"), seed=1)


def kept(run: SimulatedRun) -> dict[str, int]:
    summary = run.evaluate().summary
    rates = {"tpot": summary["request_goodput"], "deadline": summary["actorllm_goodput_deadline"]}
    return {reading: round(rates[reading] * summary["duration"]) for reading in READINGS}


def wait_for(condition: Any) -> None:
    until = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_it_finds_what_a_run_with_that_policy_would() -> None:
    """A live engine that is exactly as simulated: its own policy gives what was measured, the other what it gives alone."""
    config = EngineConfig.from_arguments(
        "storyteller", max_num_seqs=32, enable_prefix_caching=False, max_num_batched_tokens=512
    ).resolved(3000)
    made = workload()
    runs = [simulate(made, EngineShape.of(config), MODEL, policy=policy) for policy in ("fcfs", "edf")]
    engine = FakeEngine(config, runs[0])
    with Shadow(FakeLLM(engine), "edf", step_model=MODEL, budget=1.0, interval_s=0.001) as shadow:
        wait_for(lambda: shadow.failure or (engine.watchers["shadow"]()["shadow"] or {}).get("num_ended") == 150)
        told, table = shadow.statistics(), shadow.report()
    assert told["failure"] is None
    for name, run in (("live", runs[0]), ("own", runs[0]), ("shadow", runs[1])):
        assert (told[name]["num_ended"], told[name]["num_promised"]) == (150, 150)
        assert told[name]["num_kept"] == kept(run)
        assert told[name]["mean_ttft_s"] == pytest.approx(float(run.timeline.ttft.mean()))
    assert kept(runs[0]) != kept(runs[1]), "else the test would tell nothing"
    scheduled = [run.timeline.scheduled for run in runs]
    assert told["decisions"]["num_started"] == {
        "sooner": int((scheduled[1] - scheduled[0] <= -1e-3).sum()),
        "later": int((scheduled[1] - scheduled[0] >= 1e-3).sum()),
        "alike": int((abs(scheduled[1] - scheduled[0]) < 1e-3).sum()),
    }
    by_one = told["decisions"]["num_kept_by_one"]
    assert by_one["shadow"] - by_one["own"] == kept(runs[1])["deadline"] - kept(runs[0])["deadline"]
    assert engine.asked[-1] is False, "the engine keeps nothing any more"
    assert not engine.watchers
    assert "edf (shadow)" in table


def test_each_replica_has_a_shadow_of_its_own() -> None:
    config = EngineConfig.from_arguments(
        "storyteller", max_num_seqs=32, enable_prefix_caching=False, max_num_batched_tokens=512, data_parallel_size=2
    ).resolved(3000)
    made = workload()
    parts = [made.select(np.arange(len(made)) % 3 != 0), made.select(np.arange(len(made)) % 3 == 0)]
    runs = {
        policy: [simulate(part, EngineShape.of(config), MODEL, policy=policy) for part in parts]
        for policy in ("fcfs", "edf")
    }
    engine = FakeFleet(config, runs["fcfs"])
    with Shadow(FakeLLM(engine), "edf", step_model=MODEL, budget=1.0, interval_s=0.001) as shadow:
        wait_for(lambda: shadow.failure or (engine.watchers["shadow"]()["shadow"] or {}).get("num_ended") == 150)
        told = shadow.statistics()
    assert told["failure"] is None
    for name, policy in (("live", "fcfs"), ("own", "fcfs"), ("shadow", "edf")):
        for number, run in enumerate(runs[policy]):
            assert told["replicas"][number][name]["num_kept"] == kept(run)
        assert told[name]["num_kept"] == {
            reading: sum(kept(run)[reading] for run in runs[policy]) for reading in READINGS
        }
    first = np.concatenate([run.timeline.ttft for run in runs["edf"]])
    assert told["shadow"]["mean_ttft_s"] == pytest.approx(float(first.mean()))


@pytest.mark.anyio
async def test_a_live_fleet() -> None:
    params = SamplingParams(max_tokens=6, ignore_eos=True, temperature=0)
    async with AsyncLLM("storyteller", num_threads=1, data_parallel_size=2, max_num_seqs=4) as llm:
        with anyio.fail_after(120):
            shadow = Shadow(llm, "srpf", budget=1.0, interval_s=0.02)
            done = 0
            while done < 2:
                async with anyio.create_task_group() as group:
                    for _ in range(4):
                        group.start_soon(llm.complete, "Once upon a time", params)
                told = (await llm.stats())["shadow"]
                assert told["failure"] is None
                each = [replica["shadow"] for replica in told["replicas"].values()]
                done = sum(1 for one in each if one is not None and one["num_ended"] > 0)
            await anyio.to_thread.run_sync(shadow.close)
    rows = shadow.report().splitlines()[1:4]
    assert len(rows) == 3
    assert not any("%" in row for row in rows), "nothing was promised, so nothing was kept"


@pytest.mark.anyio
async def test_a_live_engine(caplog: pytest.LogCaptureFixture) -> None:
    params = SamplingParams(max_tokens=12, ignore_eos=True, temperature=0)
    async with AsyncLLM("storyteller", topology="inline", num_threads=1, max_num_seqs=2) as llm:
        expected = (await llm.complete("Once upon a time", params)).outputs[0].text
        assert "shadow" not in await llm.stats()
        shadow = Shadow(llm, "srpf", budget=1.0, interval_s=0.02)
        with anyio.fail_after(60):
            num = 0
            while ((await llm.stats())["shadow"]["shadow"] or {"num_ended": 0})["num_ended"] < 20:
                output = await llm.complete("Once upon a time", params, slo=0.5, is_latency_sensitive=True)
                assert output.outputs[0].text == expected
                num += 1
        told = (await llm.stats())["shadow"]
        assert told["failure"] is None
        assert told["own"]["num_promised"] == told["own"]["num_ended"] >= 20
        assert told["own"]["num_preemptions"] == 0
        with pytest.raises(ConfigError, match="close that one first"):  # each would be told a part of the requests
            Shadow(llm, "edf")
        await llm.set_policy("edf")
        with anyio.fail_after(60):
            while (told := (await llm.stats())["shadow"])["own"] is None or told["own"]["policy"] != "edf":
                await llm.complete("Once upon a time", params)
        await anyio.to_thread.run_sync(shadow.close)
        assert "shadow" not in await llm.stats()
        with Shadow(llm, "srpf"):
            shadow.close()
            assert "shadow" in await llm.stats()


def test_a_policy_that_fails_is_told_and_the_engine_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    config = EngineConfig.from_arguments("storyteller").resolved(3000)
    engine = FakeEngine(config, simulate(workload(), EngineShape(5000), MODEL))
    monkeypatch.setattr(Shadow, "_simulate", lambda shadow, until: sys.exit("no licence"))
    with Shadow(FakeLLM(engine), "edf", step_model=MODEL, interval_s=0.001) as shadow:
        wait_for(lambda: engine.asked[-1:] == [False])
        assert shadow.failure == "policy 'edf' in the shadow: SystemExit: no licence"


def test_wrong_arguments() -> None:
    config = EngineConfig.from_arguments("storyteller").resolved(3000)
    engine = FakeEngine(config, simulate(workload(), EngineShape(5000), MODEL))
    wrong: list[dict[str, Any]] = [
        *({"budget": 0.0}, {"budget": "0.1"}, {"budget": True}, {"interval_s": 0.0}, {"interval_s": float("inf")}),
        *({"policy": 5}, {"admission": 5}),
    ]
    for arguments in wrong:
        with pytest.raises(ConfigError, match=f"shadow: {next(iter(arguments))}="):
            Shadow(FakeLLM(engine), **({"policy": "edf"} | arguments))
    with pytest.raises(ConfigError, match="did you mean 'edf'"):
        Shadow(FakeLLM(engine), "edg")
    engine.stepper = object()
    with pytest.raises(ConfigError, match="steps on the caller's"):
        Shadow(FakeLLM(engine), "edf")


def ended(rid: int, num_hashes: int = 0) -> End:
    hashes = np.zeros(32 * num_hashes, np.uint8)
    submit = Submit(rid=rid, arrival=0.0, prompt=np.zeros(9, np.int32), max_tokens=5, block_hashes=hashes)
    return End(
        Sequence((0, rid), submit, rid, submit.prompt, 14, frozenset(), frozenset(), queued=float(rid)), "length"
    )


def test_a_log_that_nobody_reads_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("MAX_ROWS", 10), ("MAX_HASHES", 40), ("MAX_TAKEN", 4)):
        monkeypatch.setattr(request_log, name, value)
    log = RequestLog(lambda: 1.0)
    for rid in range(15):
        log.add(ended(rid), 5)
    assert log.num_dropped == 5
    first = log.take([ended(99).sequence])
    assert [row[1] for row in first["rows"]] == [5.0, 6.0, 7.0, 8.0]
    assert (first["is_more"], first["oldest"]) == (True, 9.0), "a row that was not told yet is not known yet"
    log.take([])
    assert log.take([ended(99).sequence])["oldest"] == 99.0
    for rid in range(5):
        log.add(ended(rid, num_hashes=12), 5)
    assert len(log.take([])["rows"]) == 3
