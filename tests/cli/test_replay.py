"""`actorllm replay`, and policies of one's own on the command line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from actorllm import cli
from tests import programs

ROOT = Path(__file__).parents[2]
QUICK = ("--topology", "inline", "--num-threads", "1", "--max-model-len", "256")
FEW = ("--num-requests", "12", "--length-scale", "0.02", "--rate", "100")

POLICY = """
from actorllm.scheduling.policy import KeyPolicy


class LastFirst(KeyPolicy):
    def key(self, sequence, view):
        return (-sequence.arrival_index,)


class Broken(KeyPolicy):
    def key(self, sequence, view):
        raise RuntimeError("no key today")
"""


def test_the_sample_against_an_engine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "r.json"
    page, trace = tmp_path / "run.html", tmp_path / "trace.json"
    files = ("--output-json", str(file), "--save-detailed", "--report", str(page), "--timeline", str(trace))
    assert cli.main(["replay", *FEW, *QUICK, *files, "--policy", "edf"]) == 0
    html = page.read_text()
    assert "was watched from outside" not in html
    for section in ("What steps computed", "KV cache in use", "p99 gap of a request"):
        assert section in html
    events = json.loads(trace.read_text())["traceEvents"]
    arrows = [event for event in events if event["ph"] in "stf"]
    assert {event["id"] for event in arrows if event["ph"] == "f"} == set(range(12)), "of every request, and no warm-up"
    assert all(event["pid"] == (event["ph"] != "s") for event in arrows)
    assert min(event["ts"] for event in arrows) >= 0, "on the clock of the run"
    captured = capsys.readouterr()
    assert "12 finished, 0 failed, 0 aborted" in captured.out
    assert "sent late by" in captured.out
    for name in ("ls", "be", "all"):
        assert f"\n{name.rjust(5)}  " in captured.out
    result: dict[str, Any] = json.loads(file.read_text())
    for key in (
        *("backend", "model_id", "num_prompts", "request_rate", "duration", "completed", "failed"),
        *("total_input_tokens", "total_output_tokens", "request_throughput", "request_goodput", "output_throughput"),
        *("total_token_throughput", "max_output_tokens_per_s", "max_concurrent_requests"),
        *("input_lens", "output_lens", "ttfts", "itls", "latencies", "start_times", "queue_times", "errors"),
        *(f"{what}_{name}_ms" for what in ("mean", "median", "std", "p99") for name in ("ttft", "tpot", "itl", "e2el")),
        *("p99_client_queue_time_ms", "p99_e2el_including_client_queue_ms", "actorllm_classes"),
        *("actorllm_itl_p99s", "actorllm_p99_itl_p99_ms"),
    ):
        assert key in result, key
    assert result["completed"] == result["num_prompts"] == 12
    assert 0 <= result["actorllm_classes"]["ls"]["fluidity"] <= 1
    assert result["total_output_tokens"] == sum(result["output_lens"])
    assert 1 <= result["max_concurrent_requests"] <= 12


def test_what_is_too_long_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "t.csv"
    rows = [f"0.0{i},{size},3" for i, size in enumerate((10, 500, 20))]
    trace.write_text("\n".join(["arrived_at,num_prefill_tokens,num_decode_tokens", "x,1,1", *rows]))
    assert cli.main(["replay", str(trace), *QUICK, "--num-warmups", "0"]) == 0
    captured = capsys.readouterr()
    assert "2 finished" in captured.out
    assert "line 2: " in captured.err
    assert "1 of 3 requests are left out: longer than 256 tokens" in captured.err


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["nowhere.jsonl"], "trace 'nowhere.jsonl' does not exist"),
        (["--rate", "1", "--time-scale", "2"], "rate=1.0 and time_scale=2.0 both say"),
        (["--rate", "-1"], "rate=-1.0 must be a positive number"),
        (["--length-scale", "0"], "length_scale=0.0 must be positive"),
        (["--num-requests", "0"], "num_requests=0 must be at least 1"),
        (["--until", "-1"], "until=-1.0 must be a positive number of seconds"),
        (["--num-warmups", "-1"], "num_warmups=-1 must be 0 or more"),
        (["--mix", "a:1:tttf=3"], "did you mean 'ttft'"),
        (["--url", "http://127.0.0.1:9"], "127.0.0.1:9/v1/models does not answer"),
        (["--url", "http://127.0.0.1:9", "--max-num-seqs", "3"], "max_num_seqs cannot be given with --url"),
        (["--vocab-size", "30"], "are for a server"),
        (["--output-json", "no/where"], "output_json='no/where' cannot be written"),
        (["--step-model", "a100-llama-3"], "did you mean 'a100-llama-3-8b'"),
        (["--policy", "fcsf", *QUICK], "there is no scheduling policy 'fcsf'; did you mean 'fcfs'"),
    ],
)
def test_bad_input(options: list[str], problem: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["replay", *options]) == 2
    assert problem in capsys.readouterr().err


def run_in(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The command as it is installed: its own folder, and not the current one, is where Python looks for modules."""
    (folder / "bin").mkdir()
    script = folder / "bin" / "actorllm"
    script.write_text("import sys\nfrom actorllm.cli import main\nsys.exit(main())\n")
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return programs.run(
        [sys.executable, str(script), *arguments],
        capture_output=True,
        text=True,
        timeout=50,
        cwd=folder,
        env=environment,
    )


def test_a_policy_of_this_folder_reaches_the_scheduler_s_process(tmp_path: Path) -> None:
    (tmp_path / "my_policies.py").write_text(POLICY)
    few = ("--num-requests", "5", "--length-scale", "0.02", "--rate", "50", "--num-threads", "1")
    result = run_in(tmp_path, "replay", *few, "--policy", "my_policies:Broken")
    assert result.returncode == 0, result.stderr
    assert "5 finished" in result.stdout
    assert "policy failure: " in result.stderr
    assert "no key today" in result.stderr, "fcfs took its place, and the reason is told"


ADMISSION = """
from actorllm.scheduling.admission_policy import AdmissionPolicy


class Broken(AdmissionPolicy):
    def admit(self, sequence, joining, leaving, view):
        raise RuntimeError("nobody today")
"""


def test_an_admission_policy_of_this_folder_is_found_alone(tmp_path: Path) -> None:
    (tmp_path / "my_admissions.py").write_text(ADMISSION)
    few = ("--num-requests", "5", "--length-scale", "0.02", "--rate", "50", "--num-threads", "1")
    result = run_in(tmp_path, "replay", *few, "--admission-policy", "my_admissions:Broken")
    assert result.returncode == 0, result.stderr
    assert "5 finished" in result.stdout
    assert "nobody today" in result.stderr


@pytest.mark.parametrize("command", ["generate", "throughput"])
def test_every_command_that_builds_an_engine_takes_a_policy(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name = f"policies_of_{command}"
    (tmp_path / f"{name}.py").write_text(POLICY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])
    words = {
        "generate": ["generate", "Once", "--max-tokens", "3"],
        "throughput": ["bench", "throughput", "--num-prompts", "2", "--input-len", "3", "--output-len", "3"],
    }[command]
    assert cli.main([*words, *QUICK, "--policy", f"{name}:LastFirst"]) == 0
    assert cli.main([*words, *QUICK, "--policy", f"{name}:Lost"]) != 0
    assert f"scheduling policy '{name}:Lost' cannot be loaded: AttributeError" in capsys.readouterr().err


def test_a_class_of_main_has_to_be_inline(tmp_path: Path) -> None:
    """Its own error says so."""
    program = tmp_path / "program.py"
    program.write_text(
        "from actorllm import LLM, SamplingParams\n"
        "from actorllm.scheduling.policy import KeyPolicy\n"
        "class Mine(KeyPolicy): ...\n"
        "for topology in ('inline', 'process'):\n"
        "    llm = LLM('storyteller', topology=topology, scheduling_policy='__main__:Mine', num_threads=1)\n"
        "    print(len(llm.generate(['Once'], SamplingParams(max_tokens=2), use_tqdm=False)), flush=True)\n"
        "    llm.shutdown()\n"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    result = programs.run([sys.executable, str(program)], capture_output=True, text=True, timeout=50, env=environment)
    assert result.stdout == "1\n", result.stderr
    assert "scheduling policy '__main__:Mine' cannot be loaded" in result.stderr
    assert "use topology='inline', or a module of its own" in result.stderr
