"""The laboratory on the command line: what is printed, what is written, and what is told of bad input."""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import anyio
import pytest

from actorllm import AsyncLLM, cli
from actorllm.actors.record_file import read_recording
from actorllm.api.llm import LLM
from actorllm.cli.laboratory import ScenarioOptions, _print_sweep, progress
from actorllm.scheduling.policies.srpf import Srpf
from actorllm.scheduling.policy import Admit
from actorllm.slo.experiments import Point, Scenario, Variant
from actorllm.slo.experiments import point as point_module
from actorllm.types.params import SamplingParams
from tests.slo.made_results import results_of

SMALL = ("--workload", "synthetic", "--num-requests", "60")


def run(*arguments: str) -> None:
    assert cli.main(list(arguments)) == 0


def test_simulate_prints_figures_and_writes_what_is_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {name: tmp_path / name for name in ("run.json", "run.html", "trace.json", "run.csv")}
    run(
        "simulate", "--policy", "edf@512", "--rate", "3", *SMALL, "--output-json", str(files["run.json"]),
        "--report", str(files["run.html"]), "--timeline", str(files["trace.json"]), "--csv", str(files["run.csv"]),
    )  # fmt: skip
    out = capsys.readouterr().out
    assert out.startswith(
        "edf@512 at 3 requests/s, seed 0: 60 requests of synthetic, poisson arrivals, a100-llama-3-8b"
    )
    assert "short: 60 requests are too few to tell" in out
    assert "of the window without warm-up and drain; " in out
    told = json.loads(files["run.json"].read_bytes())
    assert told["completed"] == 60
    assert told["actorllm_made"]["point"]["seed"] == 0
    assert {"machine", "versions", "code", "configuration"} <= told["actorllm_made"].keys()
    assert len(files["run.csv"].read_text().splitlines()) == 61
    assert json.loads(files["trace.json"].read_bytes())["otherData"]["traced"] == 60
    assert "What steps computed" in files["run.html"].read_text()


def test_nothing_is_kept_where_nothing_was_promised(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.html"
    run("simulate", *SMALL, "--mix", "chat:0.5:ttft=9 batch:0.5", "--report", str(page))
    rows = {line.split()[0]: line.split()[2:4] for line in capsys.readouterr().out.splitlines() if line.strip()}
    assert rows["chat"] == ["100.0%", "100.0%"]
    assert rows["batch"] == ["-", "-"]
    assert "<td>nothing</td><td>" in page.read_text()
    run("simulate", *SMALL, "--mix", "batch:1", "--report", str(page))
    told = capsys.readouterr()
    assert "warning: no request is promised anything: each that ends counts as kept, at any rate" in told.err
    assert "100.0%" not in told.out
    assert "Nothing was promised to any of them." in page.read_text()
    assert "100%</td>" not in page.read_text()
    assert "kept their promise, by length" not in page.read_text()
    results = str(tmp_path / "sweep.jsonl")
    run("sweep", *SMALL, "--mix", "batch:1", "--policies", "fcfs", "edf", "--rates", "2", "--seeds", "1", "--targets", "0",
        "--num-processes", "0", "--results", results, "--report", str(page))  # fmt: skip
    assert capsys.readouterr().err.count("warning: no request is promised anything") == 1
    assert "<td>batch</td><td>–</td><td>–</td><td>–</td>" in page.read_text()
    assert "Nothing was promised to any request, so each that ends counts as kept" in page.read_text()
    assert "of the promises to the worst class" not in page.read_text()
    assert "requests kept their promise" not in page.read_text()


def test_what_else_takes_time(capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--failures", "workers:5:2", "--policy-cost", "0.001:1e-5", "--power", "75:400:2.5")
    run("simulate", "--rate", "3", *SMALL, *options)
    told = capsys.readouterr()
    assert "failures met" in told.err
    assert "ms in the mean" in told.err
    assert "energy by 75 W idle and 400 W busy: " in told.out
    assert "a million output tokens" in told.out
    run("simulate", *SMALL, "--policy-cost", "measured:2")
    assert "plans: " in capsys.readouterr().err
    for wrong in (("--policy-cost", "fast"), ("--failures", "disk:1:1"), ("--power", "5")):
        assert cli.main(["simulate", *SMALL, *wrong]) != 0
        assert wrong[1].partition(":")[0] in capsys.readouterr().err


def test_a_sweep_is_resumed_and_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results, page, table = tmp_path / "sweep.jsonl", tmp_path / "sweep.html", tmp_path / "points.csv"
    arguments = (
        "sweep", *SMALL, "--policies", "fcfs@512", "edf@512", "--rates", "2", "4", "--seeds", "1", "--targets", "0",
        "--results", str(results), "--num-processes", "0",
    )  # fmt: skip
    run(*arguments)
    size = results.stat().st_size
    run(*arguments, "--report", str(page))
    assert results.stat().st_size == size
    assert "Which policy keeps its promises" in page.read_text()
    page.unlink()
    run("report", str(results), "--output", str(page), "--csv", str(table))
    assert "edf@512" in page.read_text()
    assert len(table.read_text().splitlines()) == 5
    out = capsys.readouterr().out
    assert "MAX RATE" in out
    assert f"report: {page}" in out


def test_what_is_left_out_of_a_trace_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "bad.jsonl"
    rows = [
        f'{{"timestamp": {n * 1000}, "input_length": {100 if n % 2 else 900}, "output_length": 5}}' for n in range(10)
    ]
    rows[2:2] = ["{", '{"timestamp": 1}', '{"timestamp": 1, "input_length": -1, "output_length": 1}', "[]"]
    trace.write_text("\n".join(rows))
    given = ("--workload", str(trace), "--num-requests", "10", "--max-model-len", "512")
    too_long = "requests left out: 5 of 10 are longer than 512 tokens"
    run("simulate", *given)
    told = capsys.readouterr()
    assert f"{trace}: 14 rows of mooncake, 4 skipped\n  line 3: not JSON" in told.err
    assert too_long in told.err
    assert "seed 0: 5 of 10 requests of bad.jsonl" in told.out
    run("explain", "-1", *given)
    told = capsys.readouterr()
    assert "4 skipped" in told.err
    assert too_long in told.err
    run("sweep", *given, "--policies", "fcfs", "--rates", "2", "--seeds", "2", "--targets", "0", "--num-processes", "0",
        "--results", str(tmp_path / "sweep.jsonl"))  # fmt: skip
    assert "; 5 of 10 requests of bad.jsonl" in capsys.readouterr().out


def test_the_format_of_a_trace_can_be_said(tmp_path: Path) -> None:
    trace = tmp_path / "short.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 9, "output_length": 5, "hash_ids": [1]}\n' * 3)
    seen, told = (
        ScenarioOptions(workload=str(trace), format=format, block_tokens=size).scenario().trace()
        for format, size in ((None, None), ("timed", 8))
    )
    assert seen.report.format == "mooncake"
    assert told.report.format == "timed"
    assert told.workload.prefixes is not None
    assert told.workload.prefixes.block_tokens == 8


def forget_files() -> None:
    """As another process would not know them."""
    point_module._file_digest.cache_clear()
    point_module._trace.cache_clear()


@pytest.mark.parametrize("mix", ["ls:1:ttft=1", "trace"])
def test_results_are_read_without_the_trace(mix: str, tmp_path: Path) -> None:
    trace, results, page = tmp_path / "mine.jsonl", tmp_path / "sweep.jsonl", tmp_path / "page.html"
    rows = [f'{{"timestamp": {n * 500}, "input_length": 100, "output_length": 5}}\n' for n in range(20)]
    trace.write_text("".join(rows))
    run(
        "sweep", "--workload", str(trace), "--num-requests", "20", "--mix", mix,
        "--policies", "fcfs", "edf", "--rates", "2", "--seeds", "1",
        "--targets", "0", "--num-processes", "0", "--results", str(results),
    )  # fmt: skip
    run("report", str(results), "--output", str(page))
    with_runs = page.read_text()
    assert "not simulated again" not in with_runs
    trace.write_text("".join(rows[:10]))
    forget_files()
    run("report", str(results), "--output", str(page))
    assert "mine.jsonl&#x27; or the step-time model has changed since" in page.read_text()
    trace.rename(tmp_path / "moved.jsonl")
    forget_files()
    run("report", str(results), "--output", str(page), "--csv", str(tmp_path / "points.csv"))
    assert "mine.jsonl&#x27; cannot be read (No such file or directory)" in page.read_text()
    assert page.read_text().count("edf") > 2
    assert len((tmp_path / "points.csv").read_text().splitlines()) == 3


def test_explain_names_the_causes(capsys: pytest.CaptureFixture[str]) -> None:
    run("explain", "-1", "--policy", "fcfs@512", "--rate", "9", *SMALL)
    out = capsys.readouterr().out
    assert "MISSED ttft" in out
    assert "the prompts of others were served first" in out
    run("explain", "3", "--policy", "fcfs@512", "--rate", "1", *SMALL)
    assert capsys.readouterr().out.startswith("request 3 (")


def test_a_recording_says_itself_of_which_engine_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.bin"
    with LLM("storyteller", topology="inline", num_threads=1, record=str(file), scheduling_policy="edf") as llm:
        llm.generate(["Once upon a time"] * 3, SamplingParams(max_tokens=8, ignore_eos=True), use_tqdm=False)
        num_blocks = llm.config.cache.num_blocks
    assert any(call == "schedule" for call, _, _ in read_recording(file))
    run("explain", "2", "--recording", str(file), "--num-blocks", str(num_blocks))
    told = capsys.readouterr()
    assert told.out.startswith("request 2 (requests): ")
    assert "8 output tokens, finished" in told.out
    assert "first token" in told.out
    assert "warning" not in told.err
    assert "too few steps to fit step times to: what a step would have taken alone is not known" in told.out
    assert "the way to the client, and a client that reads late, are not in it" in told.out
    run("explain", "2", "--recording", str(file), "--model", "h200-llama-3-8b-roofline")
    assert "step times are those of 'h200-llama-3-8b-roofline', not fitted" in capsys.readouterr().out
    for arguments, message in [
        (
            ("--num-blocks", "2048"),
            f"num_blocks=2048 contradicts the recording {str(file)!r}, whose engine had {num_blocks}",
        ),
        (("--policy", "fcfs"), "policy='fcfs' contradicts the recording"),
        (("--policy", "edf@7"), "max_num_batched_tokens=7 contradicts the recording"),
        (("--policy", "edf+worst-case"), "admission='worst-case' contradicts the recording"),
        (("--rate", "3"), "rate=3.0 is of a simulation: a recording has its own requests"),
        (("--num-requests", "3"), "num_requests=3 is of a simulation"),
    ]:
        assert cli.main(["explain", "2", "--recording", str(file), *arguments]) == 2
        assert message in capsys.readouterr().err


def test_a_replay_that_is_not_what_happened_is_told_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The policy has changed since the engine ran."""
    file = tmp_path / "run.bin"
    with LLM("storyteller", topology="inline", num_threads=1, record=str(file), scheduling_policy="srpf") as llm:
        llm.generate(["Once upon a time"] * 3, SamplingParams(max_tokens=8, ignore_eos=True), use_tqdm=False)
    monkeypatch.setattr(Srpf, "admit", lambda self, sequence, view: Admit.WAIT)
    run("explain", "0", "--recording", str(file))
    assert (
        "warning: this is not what the engine did: step 1 was computed, and is not planned now"
        in capsys.readouterr().err
    )


def test_a_recording_is_reported_beside_another_policy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, page = tmp_path / "run.bin", tmp_path / "page.html"
    with LLM(
        "storyteller", topology="inline", num_threads=1, record=str(file), max_num_seqs=2, admission_policy="worst-case"
    ) as llm:
        params = [SamplingParams(max_tokens=40, ignore_eos=True, seed=seed) for seed in range(16)]
        llm.generate(["Once upon a time " * (1 + seed % 5) for seed in range(16)], params)
    run("report", str(file), "--output", str(page), "--shadow", "srpf+past-future")
    out, html = capsys.readouterr().out, page.read_text()
    for told in ("Measured under ", "Simulated under ", "requests sooner and ", "fcfs+worst-case", "srpf+past-future"):
        assert told in out
        assert told in html
    assert out.count("nothing was promised, mean TTFT") == 3
    assert (
        "By cross-validation: step times are fitted to this recording, without the 2 first of their kind; mean error"
        in html
    )
    assert cli.main(["report", str(file), "--output", str(page), "--shadow", "srpg"]) != 0
    assert "did you mean 'srpf'" in capsys.readouterr().err
    short = tmp_path / "short.bin"
    with LLM("storyteller", topology="inline", num_threads=1, record=str(short)) as llm:
        llm.generate("Once", params[0])
    assert cli.main(["report", str(short), "--output", str(page), "--shadow", "srpf"]) != 0
    assert "record a longer run" in capsys.readouterr().err


def test_a_recording_is_simulated_under_the_policies_that_decided(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`set_policy` changed the first one. An admission policy of the engine decides in its own simulation only."""
    file, page = tmp_path / "run.bin", tmp_path / "page.html"
    prompts = ["Once upon a time " * (1 + seed % 5) for seed in range(16)]
    params = [SamplingParams(max_tokens=40, ignore_eos=True, seed=seed) for seed in range(16)]
    engine: dict[str, Any] = {
        "topology": "inline",
        "num_threads": 1,
        "max_num_seqs": 8,
        "max_model_len": 128,
        "num_gpu_blocks_override": 14,
    }
    with LLM("storyteller", record=str(file), admission_policy="worst-case", **engine) as llm:
        llm.set_policy("srpf")
        llm.generate(prompts, params, use_tqdm=False)
    same = "It starts 0 requests sooner and 0 later"
    run("report", str(file), "--output", str(page), "--shadow", "srpf+worst-case")
    out = capsys.readouterr().out
    assert "Measured under 'fcfs+worst-case', from 0.0 s on 'srpf+worst-case': " in out
    assert same in out
    for other in ("fcfs+worst-case", "srpf"):
        run("report", str(file), "--output", str(page), "--shadow", other)
        assert same not in capsys.readouterr().out


def test_a_recording_and_results_of_a_policy_that_is_not_there_any_more(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = tmp_path / "gone_tomorrow.py"
    module.write_text(POLICY)
    monkeypatch.syspath_prepend(tmp_path)
    file, results, page = tmp_path / "run.bin", tmp_path / "sweep.jsonl", tmp_path / "page.html"
    name = "gone_tomorrow:Last"

    async def ask() -> None:
        own = {"topology": "inline", "num_threads": 1, "scheduling_policy": name}
        async with AsyncLLM("storyteller", record=str(file), **own) as llm:
            for request_id in (None, None, None, "my-own"):
                async for _ in llm.generate("The end", SamplingParams(max_tokens=50, ignore_eos=True), request_id):
                    pass

    anyio.run(ask)
    swept = ("--policies", "fcfs", name, "--rates", "2", "--seeds", "1", "--targets", "0", "--num-processes", "0")
    run("sweep", *SMALL, *swept, "--results", str(results))
    module.unlink()
    monkeypatch.delitem(sys.modules, "gone_tomorrow")
    importlib.invalidate_caches()
    capsys.readouterr()
    run("explain", "2", "--recording", str(file))
    told = capsys.readouterr()
    assert told.out.startswith("request 2 (requests): ")
    assert "50 output tokens, finished" in told.out
    assert "warning" not in told.err
    run("explain", "my-own", "--recording", str(file))
    assert capsys.readouterr().out.startswith("request 3 (requests): ")
    assert cli.main(["explain", "my-orn", "--recording", str(file)]) == 2
    assert "there is no request 'my-orn'; did you mean 'my-own'?" in capsys.readouterr().err
    extra = ("--csv", str(tmp_path / "rows.csv"), "--timeline", str(tmp_path / "trace.json"))
    run("report", str(file), "--output", str(page), *extra)
    assert "gone_tomorrow:Last" in page.read_text()
    assert "What steps computed" in page.read_text()
    assert (tmp_path / "rows.csv").read_text().splitlines()[-1].endswith(",my-own")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {event["id"] for event in events if event["ph"] == "f"} == {0, 1, 2, 3}
    run("report", str(results), "--output", str(page))
    html = page.read_text()
    assert html.count("is not simulated again for its timelines") == 1
    assert "No module named &#x27;gone_tomorrow&#x27;" in html
    assert html.count(f"{name}</td>") > 3, "its results are there"


POLICY = """
from actorllm.scheduling.policy import KeyPolicy
class Last(KeyPolicy):
    def key(self, sequence, view):
        return (-sequence.arrival_index,)
"""


def test_a_policy_in_the_folder_that_one_is_in(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "last_comes_first.py").write_text(POLICY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p not in ("", os.getcwd())])
    run("simulate", "--policy", "last_comes_first:Last", *SMALL)
    assert "last_comes_first:Last at 2 requests/s" in capsys.readouterr().out
    arguments = (
        "sweep",
        *SMALL,
        "--policies",
        "last_comes_first:Last",
        "--rates",
        "2",
        "--seeds",
        "1",
        "--targets",
        "0",
    )
    run(*arguments, "--results", "sweep.jsonl", "--num-processes", "1")


def test_requests_that_are_too_long_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    run("simulate", *SMALL, "--max-model-len", "1200")
    told = capsys.readouterr()
    (warning,) = [line for line in told.err.splitlines() if "left out" in line]
    num = int(warning.removeprefix("warning: requests left out: ").split()[0])
    assert "of 60 are longer than 1200 tokens (max_model_len)" in warning
    overall = [line for line in told.out.splitlines() if line.startswith("all ")]
    assert overall[0].split()[1] == str(60 - num)


def test_rows_that_cannot_be_used_are_told_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    good = '{"timestamp": 500, "input_length": 50, "output_length": 5}\n'
    Path("odd.jsonl").write_text(good * 3 + "[" * 100_000 + "\n" + good)
    told = "odd.jsonl: 5 rows of mooncake, 1 skipped\n  line 4: not JSON: lists or objects too deep in each other"
    options = ("--workload", "odd.jsonl", "--arrivals", "poisson", "--num-requests", "20")
    run("simulate", *options)
    assert capsys.readouterr().err.count(told) == 1
    run("sweep", *options, "--policies", "fcfs", "edf", "--rates", "2", "--targets", "0", "--num-processes", "0")
    assert capsys.readouterr().err.count(told) == 1


def test_a_sweep_prints_the_targets_that_it_searched(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    options = ("--policies", "fcfs", "--rates", "2", "--seeds", "1", "--num-processes", "0")
    run("sweep", *SMALL, *options, "--targets", "0.5", "0.975")
    head = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("MAX RATE"))
    assert head.split()[2:] == ["tpot", "@97.5%", "tpot", "@50%", "deadline", "@97.5%", "deadline", "@50%"]


def test_a_rate_at_which_the_backlog_grows_is_no_headline(capsys: pytest.CaptureFixture[str]) -> None:
    """Of `edf`, all that was tried keeps the target: at 4 while its backlog grows."""
    good_of = {
        "fcfs": {1.0: (1000, 1000), 2.0: (0, 0)},
        "edf": {1.0: (1000, 1000), 4.0: (1000, 1000)},
        "vtc": {2.0: (990, 990)},
    }
    _print_sweep(results_of(good_of, (0.9,), (("edf", 4.0), ("vtc", 2.0))), (0.9,))
    out = capsys.readouterr().out
    rows = {line.split()[0]: " ".join(line.split()[1:]) for line in out.splitlines()[1:]}
    assert rows["fcfs"] == "1.10 [1.10, 1.10] 1.10 [1.10, 1.10]"
    assert rows["edf"] == ">1.00* [1.00, 4.00] >1.00* [1.00, 4.00]"
    assert rows["vtc"] == "< 2.00 < 2.00"
    assert "* without rates at which the backlog grew" in out


def test_a_sweep_tells_each_warning_once_and_whose_it_is(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "stalls.py").write_text(STALLS)
    monkeypatch.chdir(tmp_path)
    policies = ("stalls:After,num=3", "stalls:After,num=40", "fcfs")
    options = ("--rates", "2", "3", "--seeds", "2", "--targets", "0", "--num-processes", "0", "--mix", "a:1:tpot=0.001")
    run("sweep", *SMALL, "--policies", *policies, *options, "--report", "page.html")
    told = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning: ")]
    stalled = [line for line in told if "wait for ever" in line]
    assert [line.partition(":")[2].split(" at ")[0].strip() for line in stalled] == list(policies[:2])
    assert all("(and 3 more runs)" in line for line in stalled)
    (impossible,) = [line for line in told if "tpot cannot be met by" in line]
    assert impossible.startswith("warning: class 'a': ")
    assert "(and 11 more runs)" in impossible
    assert "wait for ever" in (tmp_path / "page.html").read_text()


STALLS = """
from actorllm.scheduling.policy import Admit, KeyPolicy
class After(KeyPolicy):
    num = 0
    def admit(self, sequence, view):
        return Admit.ADMIT if sequence.arrival_index < self.num else Admit.WAIT
"""


@pytest.mark.parametrize("num_served", [0, 1, 20])
def test_a_policy_that_stalls_is_told_and_what_it_did_is_written(
    num_served: int, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "stalls.py").write_text(STALLS)
    monkeypatch.chdir(tmp_path)
    policy = f"stalls:After,num={num_served}"
    files = ("--output-json", "run.json", "--report", "run.html", "--timeline", "trace.json")
    run("simulate", "--policy", policy, *SMALL, *files)
    told = capsys.readouterr()
    left = 60 - num_served
    assert f"warning: policy '{policy}' plans nothing: {left} requests of replica 0 wait for ever" in told.err
    assert f"{left} requests never ended" in told.out
    found = json.loads((tmp_path / "run.json").read_bytes())
    assert (found["completed"], found["actorllm_num_unfinished"]) == (num_served, left)
    assert (found["request_goodput"] == 0) == (num_served == 0)
    assert "wait for ever" in (tmp_path / "run.html").read_text()
    assert json.loads((tmp_path / "trace.json").read_bytes())["otherData"]["requests"] == 60


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("simulate", "--policy", "fcsf"), "there is no scheduling policy 'fcsf'"),
        (("simulate", "--rate", "0"), "rate=0.0 and scale=1.0 must be positive"),
        (
            ("simulate", "--workload", "nowhere.csv"),
            "is none of sample, synthetic, sessions, agents, and not the path of a trace",
        ),
        (("simulate", "--format", "mooncak"), "trace format 'mooncak' is not known; did you mean 'mooncake'"),
        (("simulate", "--num-blocks", "10"), "10 blocks of 16 hold less than max_model_len=32768"),
        (("simulate", "--output-json", "/nowhere/x.json"), "cannot be written"),
        (("simulate", "--mix", "ls:0.5:tftt=1"), "'tftt' is not known"),
        (("simulate", "--seed", "-1"), "seed=-1 must be 0 or more"),
        (("simulate", "--view-interval", "-1"), "view_interval=-1.0 must be a number of seconds, 0 or more"),
        (("trace", "sample", "x.jsonl", "--seed", "-1"), "seed=-1 must be 0 or more"),
        (("sweep", "--empty-rates"), "rates is empty: name at least one"),
        (("sweep", "--seeds", "0"), "seeds=0 must be at least 1"),
        (("sweep", "--targets", "99"), "target=99.0 must be a share between 0 and 1"),
        (("report", "nowhere.jsonl"), "there is no results file"),
        (("explain", "99999", "--num-requests", "20"), "there is no request 99999: the run has 20"),
        (("explain", "0", "--recording", "nowhere.bin"), "there is no recording"),
    ],
)
def test_bad_input_is_one_line(
    arguments: tuple[str, ...],
    message: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(list(arguments)) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ("report", "run.json"),
        ("sweep", "--results", "run.json", *SMALL),
        ("report", "run.json", "--output", "run.json"),
    ],
)
def test_the_figures_of_a_run_are_no_results_of_a_sweep(
    arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run("simulate", *SMALL, "--output-json", "run.json")
    before = (tmp_path / "run.json").read_bytes()
    assert cli.main(list(arguments)) == 2
    assert "'run.json' holds no results of a sweep" in capsys.readouterr().err
    assert (tmp_path / "run.json").read_bytes() == before
    assert not (tmp_path / "report.html").exists()


def test_no_file_is_written_over_another_of_the_command(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run("sweep", *SMALL, "--policies", "fcfs", "--rates", "2", "--seeds", "1", "--targets", "0", "--num-processes", "0")
    before = (tmp_path / "sweep.jsonl").read_bytes()
    assert cli.main(["report", "sweep.jsonl", "--output", "./sweep.jsonl"]) == 2
    assert cli.main(["sweep", *SMALL, "--report", "sweep.jsonl"]) == 2
    assert cli.main(["simulate", *SMALL, "--output-json", "a", "--report", "a"]) == 2
    assert capsys.readouterr().err.count("name another file") == 3
    assert (tmp_path / "sweep.jsonl").read_bytes() == before


def test_a_policy_that_raises_is_told_and_the_others_are_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bad_luck.py").write_text(
        POLICY.replace("return (", "raise RuntimeError('bad luck')\n        return (")
    )
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        cli.main(["sweep", *SMALL, "--policies", "bad_luck:Last", "fcfs", "--rates", "2", "--seeds", "1", "--targets", "0",
                  "--num-processes", "0", "--report", "page.html"])  # fmt: skip
    told = capsys.readouterr()
    assert "failed: bad_luck:Last at 2 requests/s, seed 0: RuntimeError: bad luck" in told.err
    assert "bad luck" in (tmp_path / "page.html").read_text()


def test_a_search_claims_no_share_of_its_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """How many there will be is decided by what was found; of a grid all are known."""
    point = Point(scenario=Scenario(num_requests=5), variant=Variant.parse("fcfs@512"), rate=2.0)
    told = []
    for is_search in (True, False):
        with progress(is_search=is_search) as tell:
            tell(1, 4, point)
        told.append(capsys.readouterr().err)
    assert "at least 3 to come" in told[0]
    assert "%" not in told[0]
    assert "25%" in told[1]
    assert "1/4" in told[1]
    assert all("fcfs@512 at 2 requests/s, seed 0" in text for text in told)
