"""`actorllm calibrate`, on a recording whose truth is known and on an engine."""

from __future__ import annotations

import math
import re
from pathlib import Path

import anyio
import pytest

from actorllm import AsyncLLM, cli
from actorllm.actors.record_file import RecordFile
from actorllm.config import EngineConfig
from actorllm.errors import EngineShutdownError
from actorllm.scheduling.cost_model import LinearModel, Regime, load_model
from actorllm.scheduling.policy import PlanPolicy
from actorllm.scheduling.scheduler import Scheduler
from actorllm.scheduling.telemetry.recording import RecordedScheduler
from actorllm.slo.live.calibrate import exercise
from actorllm.slo.simulator import EngineShape, simulate
from actorllm.slo.workload import gamma_arrivals, lognormal_lengths, make_workload

TRUTH = LinearModel((Regime(math.inf, (0.004, 5e-5, 1e-4, 3e-7, 0.0, 1e-8)),))


def record(path: Path, num_requests: int) -> None:
    """A simulated run, in the file that an engine of this configuration would have recorded."""
    arguments = {"max_num_seqs": 32, "max_num_batched_tokens": 512, "enable_prefix_caching": False}
    config = EngineConfig.from_arguments("storyteller", **arguments).resolved(200)
    file = RecordFile(config, (), None)
    file.open_at(path)

    def recorded(number: int, policy: PlanPolicy) -> Scheduler:
        return RecordedScheduler(sink=file.write, policy=policy, **EngineShape.of(config).scheduler_arguments())

    lengths = lognormal_lengths(num_requests, (200, 700), (40, 150), longest=500)
    workload = make_workload(gamma_arrivals(num_requests, 25.0, 1.5), lengths)
    simulate(workload, EngineShape.of(config), TRUTH, make_scheduler=recorded, skip=False)
    file.close()


def test_from_a_recording(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record(tmp_path / "run.bin", 120)
    model, plot = tmp_path / "model.json", tmp_path / "plot.svg"
    options = ["--recording", str(tmp_path / "run.bin"), "--output", str(model), "--plot", str(plot), "--name", "mine"]
    assert cli.main(["calibrate", *options]) == 0
    out = capsys.readouterr().out
    assert re.search(r"MAPE  0\.0% on those held out", out)
    assert re.search(r"decode, 1 rows +\d+ +0\.0% ", out)
    assert re.search(r"with prompts, \d+ to \d+ tokens +\d+ +0\.0% ", out)
    assert "predicted ms against measured ms" in out
    assert "mine" in out
    found = load_model(str(model))
    assert found.seconds(100, 20, 9000, 0, 5000) == pytest.approx(TRUTH.seconds(100, 20, 9000, 0, 5000), rel=1e-3)
    svg = plot.read_text()
    assert svg.startswith("<svg")
    assert svg.count("<circle") > 100
    assert "http" not in svg.replace("http://www.w3.org/2000/svg", ""), "self-contained"
    assert cli.main(["calibrate", *options[:4], "--plot", str(tmp_path / "p.html")]) == 0
    assert "<!doctype html>" in (tmp_path / "p.html").read_text()


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--recording", "short.bin"], r"at least 100 steps and got \d+"),
        (["--recording", "short.bin", "--max-num-seqs", "4"], "max_num_seqs cannot be given with --recording"),
        (["--recording", "none.bin"], "'none.bin' cannot be read: No such file"),
        (["--recording", "noise.bin"], "'noise.bin' is none"),
        (["--recording", "empty.bin"], "'empty.bin' does not say of which engine it is"),
        (["--plot", "plot.png"], "must end in .svg or .html"),
        (["--output", "no/where.json"], "output='no/where.json' cannot be written"),
        (["--duration", "0"], "duration=0.0 must be a positive number of seconds"),
    ],
)
def test_bad_input(
    options: list[str],
    problem: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    record(tmp_path / "short.bin", 1)
    (tmp_path / "empty.bin").touch()
    (tmp_path / "noise.bin").write_bytes(b"\x08\0\0\0" + b"\xff" * 60)
    assert cli.main(["calibrate", *options]) == 2
    assert re.search(problem, capsys.readouterr().err)


def test_an_engine_is_run_at_several_batch_sizes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tmp_path / "model.json"
    small = ("--topology=inline", "--num-threads=1", "--max-model-len=96", "--max-num-seqs=4", "--seed=3")
    assert cli.main(["calibrate", *small, "--duration", "3", "--output", str(model)]) == 0
    out = capsys.readouterr().out
    assert "storyteller-calibrated" in out
    assert "hardly known" not in out, "prompts and rows came in many numbers"
    assert load_model(str(model)).seconds(0, 2, 100) > 0


async def test_an_engine_that_ends_meanwhile_says_why() -> None:
    llm = AsyncLLM("storyteller", topology="inline", num_threads=1, max_num_seqs=3)
    await llm.start()
    async with anyio.create_task_group() as group:

        async def stop() -> None:
            await llm.complete("Once")
            llm.shutdown()

        group.start_soon(stop)
        with pytest.raises(EngineShutdownError):
            await exercise(llm, 60)
