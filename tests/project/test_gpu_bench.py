"""bench/gpu.py cannot be run without a GPU, so it is walked through on a CPU: it must not rot until somebody has one."""

from __future__ import annotations

import functools
import json
import os
import statistics
import subprocess
import sys
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from multiprocessing import resource_tracker
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from triton.runtime import interpreter

from actorllm.model.cuda import ops
from actorllm.model.cuda.collectives import Collectives
from actorllm.model.cuda.decoder import Activations, ResidualStream
from actorllm.model.cuda.linear import DeviceDense
from actorllm_kernels import reference
from actorllm_kernels.configs import trying
from actorllm_kernels.skinny_gemm import SplitScratch
from tests import programs
from tests.project import gpu_processes

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench"))

import gpu  # noqa: E402
from gpu_stages import (  # noqa: E402
    apart,
    attention,
    capabilities,
    capability_cases,
    correctness,
    engine,
    prediction,
    products,
    readme,
    search,
    steps,
    tables,
    targets,
    verdict,
)
from gpu_stages.clock import Bench, interval  # noqa: E402
from gpu_stages.inputs import Paged  # noqa: E402
from gpu_stages.models import MODELS, TINY  # noqa: E402
from gpu_stages.record import Work  # noqa: E402

sys.path.remove(str(ROOT / "bench"))


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "bench" / "gpu.py"), *arguments], capture_output=True, text=True, check=False
    )


def test_an_interpreter_that_does_not_run_with_this_numpy_is_told_with_the_way_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert gpu.interpreter_problem() == ""
    patch = interpreter._patch_lang_tensor

    def as_in_3_6(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data))

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", as_in_3_6)
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--cpu-check"])
    assert gpu.main() == 2
    assert "install triton>=3.9, or numpy<2.4" in capsys.readouterr().err


def test_what_imports_it_keeps_its_environment() -> None:
    """Programs that the importer starts inherit it: with a PYTHONPATH, this suite would copy none of its own."""
    code = "import os, sys; sys.path.insert(0, 'bench'); import gpu; print(os.environ.get('PYTHONPATH'))"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = programs.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout == "None\n"


QUICK_STAGES = ("ceilings", "correctness", "decode", "prefill", "idle")


def test_the_kernels_are_checked_and_measured(tmp_path: Path) -> None:
    """The stages that the others depend on, and one with an engine; the slow test walks through all of them."""
    done = run("--cpu-check", "--work", str(tmp_path), "--run", ",".join(QUICK_STAGES))
    assert done.returncode == 0, done.stdout + done.stderr
    found = {name: json.loads((tmp_path / f"{name}.json").read_text()) for name in QUICK_STAGES}
    assert {name: one["problem"] for name, one in found.items()} == dict.fromkeys(QUICK_STAGES, "")
    assert found["correctness"]["found"]["num_wrong"] == 0
    assert found["decode"]["found"]["decode"][0]["GB/s"] > 0


@pytest.mark.slow(reason="a walk through 26 stages in Triton's interpreter takes a minute")
@pytest.mark.timeout(400)
def test_every_stage_runs_and_no_kernel_is_wrong(tmp_path: Path) -> None:
    work, result = tmp_path / "work", tmp_path / "gpu.json"
    done = run("--cpu-check", "--stage", "all", "--work", str(work), "--json", str(result))
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(result.read_text())
    assert found["correctness"]["num_wrong"] == 0
    assert found["decode"]["decode"][0]["GB/s"] > 0
    assert found["order"]["order"]
    assert found["quantized"]["faults"] == []
    assert {row["form"] for row in found["quantized"]["quantized"]} == {"fp8", "int8", "int4"}
    assert not found["order"]["wrong"]
    assert found["offline"]["offline"][0]["output tokens/s"] > 0
    assert not any(row["problem"] for row in found["peers"]["peers"])
    assert {row["stage"]: row["problem"] for row in found["stages"]} == dict.fromkeys(gpu.STAGES, "")
    page = result.with_suffix(".md").read_text()
    assert "Not measured" not in page
    assert "a walk through the script on a CPU" in page
    (work / "head.json").unlink()
    again = run("--cpu-check", "--work", str(work), "--stage", "next")
    assert again.returncode == 0, again.stderr
    assert "head ..." in again.stdout
    assert "ceilings ..." not in again.stdout, "what is there is not measured again"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--cpu-check", "--stage", "tail"], "--stage tail is none of hour, next, all, ceilings"),
        (["--cpu-check", "--models", "gpt"], "--models gpt: the models are tiny-qwen3"),
    ],
)
def test_bad_arguments_are_named(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu.py", *arguments])
    assert gpu.main() == 2
    assert message in capsys.readouterr().err


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    """Of a walk through the script."""
    return Bench(torch.device("cpu"), True)


# What survives of a measurement -----------------------------------------------------------------------------------------


def work_of(folder: Path, **changes: object) -> Work:
    here = {"machine": "H200", "sources": "a", "table": "b", "models": ["x"]} | changes
    return Work(folder, here, {name: stage.depends_on for name, stage in gpu.STAGES.items()})


def launching(work: Work, failing: Mapping[str, str] = {}, wrong: Collection[str] = ()) -> tuple[gpu.Launch, list[str]]:
    """Stages that find something at once, but for those whose process ends; and which were run."""
    ran: list[str] = []

    def launch(names: list[str]) -> str:
        for name in names:
            ran.append(name)
            if name in failing:
                return failing[name]
            work.write(name, {"wrong": "one is"} if name in wrong else {})
        return ""

    return launch, ran


def test_a_stage_that_fails_costs_nobody_else_the_results(tmp_path: Path) -> None:
    work = work_of(tmp_path)
    launch, ran = launching(work, {"steps": "its process ended with -9"})
    assert gpu.run_stages("all", work, launch) == 1
    assert ran == list(gpu.STAGES)
    assert set(work.results()) == set(gpu.STAGES) - {"steps"}
    assert {record.stage: record.problem for record in work.records() if record.problem} == {
        "steps": "its process ended with -9"
    }
    launch, ran = launching(work)
    assert gpu.run_stages("next", work, launch) == 0
    assert ran == [], "it is known that this one fails"
    assert gpu.run_stages("all", work, launch) == 0
    assert ran == ["steps"]


@pytest.mark.parametrize("gate", gpu.GATES)
def test_nothing_is_measured_of_kernels_that_are_wrong(
    tmp_path: Path, gate: str, capsys: pytest.CaptureFixture[str]
) -> None:
    work = work_of(tmp_path)
    launch, ran = launching(work, wrong=[gate])
    assert gpu.run_stages("all", work, launch) == 1
    assert ran == list(gpu.STAGES)[: list(gpu.STAGES).index(gate) + 1]
    assert f"{gate}: one is: no figure after this one would count" in capsys.readouterr().err
    assert gpu.run_stages("next", work, launch) == 1
    assert gpu.run_stages("peers", work, launch) == 0, "asked for by name"
    assert ran[-1] == "peers"
    assert gpu.run_stages("peers", work_of(tmp_path / "elsewhere"), launch) == 1, "shares are of the ceilings"


@pytest.mark.parametrize(
    ("change", "kept"),
    [
        ({"machine": "H100"}, set()),
        ({"sources": "z"}, {"ceilings"}),
        ({"models": ["y"]}, {"ceilings", "correctness", "capabilities", "small", "decode", "prefill", "descriptors"}),
        ({"table": "z"}, {"ceilings", *(name for name in gpu.STAGES if name.startswith("search-"))}),
    ],
)
def test_results_of_something_else_do_not_count(tmp_path: Path, change: dict[str, object], kept: set[str]) -> None:
    work = work_of(tmp_path)
    gpu.run_stages("all", work, launching(work)[0])
    work = work_of(tmp_path, **change)
    assert set(work.results()) == kept
    launch, ran = launching(work)
    gpu.run_stages("all", work, launch)
    assert set(ran) == set(gpu.STAGES) - kept


def test_a_process_that_does_not_end_is_ended() -> None:
    assert gpu.run_apart([sys.executable, "-c", "import signal; signal.pause()"], 0.1) == "it was ended after 0.1 s"
    assert gpu.run_apart([sys.executable, "-c", "raise SystemExit(3)"], 60) == "its process ended with 3"
    assert gpu.run_apart([sys.executable, "-c", ""], 60) == ""


def test_a_stage_that_raises_says_so_in_its_record(
    tmp_path: Path, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> dict[str, Any]:
        raise ValueError("no room\nfor that")

    monkeypatch.setitem(gpu.STAGES, "peers", gpu.Stage(broken))
    work = work_of(tmp_path)
    assert gpu.run_here(["peers"], bench, [], work) == 0
    assert [record.problem for record in work.records()] == ["ValueError: no room"]


def test_what_decides_the_speed_today_is_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho '570.1, 1980 MHz, 1980 MHz, 3201 MHz, 700.00 W, Enabled, 34'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    found = gpu.nvidia_smi("GPU-1")
    assert (found["driver_version"], found["power.limit"], found["ecc.mode.current"]) == (
        "570.1",
        "700.00 W",
        "Enabled",
    )
    program.unlink()
    assert gpu.nvidia_smi("GPU-1") == {}


# What is measured -------------------------------------------------------------------------------------------------------


def test_a_gpu_that_is_lost_ends_the_checks(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(*_: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(correctness, "checks", lambda _: iter([("one", lost, 1.0), ("two", lambda _: 0.0, 1.0)]))
    assert [row["kernel"] for row in correctness.run(bench)["checks"]] == ["one", "two"]
    monkeypatch.setattr(Bench, "synchronize", lost)
    found = correctness.run(bench)
    assert [row["kernel"] for row in found["checks"]] == ["one"], "what came after it would look wrong as well"
    assert found["wrong"] == "wrong kernels: one"


@pytest.mark.parametrize("edge", ["last", "first", "page"])
def test_attention_that_leaves_out_a_key_is_found_wrong(edge: str) -> None:
    torch.manual_seed(0)
    cache = Paged.make([3001], 8, 128, 64, torch.device("cpu")).sharpen()
    q, (keys, values) = 2 * torch.randn(1, 16, 128).double(), (x.double() for x in cache.sequence(0))
    whole = reference.attention(q, keys, values, 128**-0.5)
    assert correctness.off_by_row(whole.to(torch.bfloat16), whole) < correctness.ATTENTION_TOLERANCE
    left = {"last": slice(3000), "first": slice(1, 3001), "page": slice(64, 3001)}[edge]
    less = reference.attention(q, keys[left], values[left], 128**-0.5)
    assert correctness.off_by_row(less, whole) > 4 * correctness.ATTENTION_TOLERANCE


def test_a_token_that_dependent_launches_change_is_wrong(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    found = {False: [[1, 2], [3, 4], [5, 6]], True: [[1, 2], [3, 5], [5, 6]]}
    monkeypatch.setattr(
        steps,
        "tokens_of",
        lambda _, __, uses_pdl: [("prompts", torch.ones(1, 2)), ("batch 2", torch.tensor(found[uses_pdl]))],
    )
    result = steps.order(bench, [TINY["tiny-llama"]])
    assert result["wrong"] == "dependent launches give other tokens: tiny-llama, batch 2"
    assert [row["first difference"] for row in result["order"]] == [None, 1]


def test_the_workload_is_that_of_nano_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = engine.workload(Bench(torch.device("cpu"), False), MODELS["Qwen3-0.6B"])
    assert (sum(len(ids) for ids, _ in requests), sum(n for _, n in requests)) == (142827, 133966)


def test_an_engine_is_measured_once_all_its_graphs_are_recorded() -> None:
    with pytest.raises(RuntimeError, match="cannot be recorded as a graph"):
        engine.is_settled({"workers": [{"num_graphs_wanted": 0, "num_graphs_refused": 1}]})
    assert not engine.is_settled({"workers": [{"num_graphs_wanted": 2, "num_graphs_refused": 0}]})
    assert engine.is_settled({"workers": [{"num_graphs_wanted": 0, "num_graphs_refused": 0}, {}]})


def test_the_timed_steps_have_the_context_that_their_limit_is_of(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = []
    with steps.runner_of(bench, TINY["tiny-llama"]) as runner:
        run = runner.graphs.run

        def noted(*key: Any) -> None:
            run(*key)
            lengths.append(int(runner._decode_rows.seq_lens[0]))

        def rounds(_: Bench, call: Callable[[], None], before: Callable[[], None]) -> list[float]:
            lengths.clear()
            for _ in range(3):
                before()
                call()
            return [1.0]

        monkeypatch.setattr(runner.graphs, "run", noted)
        monkeypatch.setattr(Bench, "samples", rounds)
        monkeypatch.setattr(Bench, "pick", lambda _, real, tiny: real if real == steps.STEPS else tiny)
        steps.step_samples(bench, runner, 2, 40)
        assert runner._pool.pool[:, :1].any(), "zeros would be no work"
    assert len(lengths) == 3 * steps.STEPS
    assert statistics.mean(lengths) == pytest.approx(40, abs=0.5)


def test_the_other_way_of_a_product_is_what_the_decoder_launches(bench: Bench) -> None:
    """Or the table would be decided by launches that nobody makes."""
    shape, rows = TINY["tiny-llama"], 3
    weights = {name: (outputs, inputs) for name, outputs, inputs in shape.linears}

    def names(launch: Callable[[], None]) -> list[str]:
        with ops.record() as launches:
            launch()
        return [one.func.__name__ for one in launches]

    sizes = {"hidden_size": shape.hidden, "num_heads": 4, "num_kv_heads": 2, "head_dim": 32}
    config = SimpleNamespace(**sizes, intermediate_size=shape.intermediate, latent=None)
    a: Any = Activations(rows, config, torch.bfloat16, torch.device("cpu"))
    weight = {name: DeviceDense(torch.zeros(*size, dtype=torch.bfloat16)) for name, size in weights.items()}
    norm = torch.ones(shape.hidden, dtype=torch.bfloat16)
    for max_rows, way in ((64, 0), (0, 1)):
        with trying("skinny_gemm", MAX_ROWS=max_rows):
            stream = ResidualStream(a, 1e-6, False, Collectives(), SplitScratch.empty(torch.device("cpu")))
            stream.add_product(a.out.view(rows, -1), weight["o"])

            def launch(stream: ResidualStream = stream) -> None:
                stream.normed_product(norm, weight["gate_up"], a.middle, activation="silu")
                stream.add_product(a.middle, weight["down"])
                stream.normed_product(norm, weight["qkv"], a.qkv)

            theirs = names(launch)
        ours = [
            name
            for product in ("gate_up", "down", "qkv")
            for name in names(products.Product(shape, product, *weights[product], bench).calls(rows)[way][0])
        ]
        assert theirs == ours


def test_the_timed_steps_draw_from_all_tokens(bench: Bench) -> None:
    with steps.runner_of(bench, TINY["tiny-llama"]) as runner:
        runner.steady_step(3, 5)
        assert runner.state.filters.top_p[:3].tolist() == [1.0, 1.0, 1.0], "less is a filter, which takes time"


@pytest.fixture
def some_cases(monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, dict[str, Any]]]:
    """What the stage finds of some cases, by name."""

    def some_cases(*names: str) -> dict[str, dict[str, Any]]:
        every = capability_cases.cases(Bench(torch.device("cpu"), True))
        monkeypatch.setattr(capabilities, "cases", lambda _: {name: every[name] for name in names})
        found = capabilities.run(Bench(torch.device("cpu"), True))
        rows = {row["case"]: row for row in found["capabilities"]}
        assert found["wrong"] == "".join(f"not right: {name}" for name in names if not rows[name]["right"])
        return rows

    return some_cases


@pytest.mark.timeout(120)
def test_what_an_engine_can_do_beside_plain_models_is_shown(
    some_cases: Callable[..., dict[str, dict[str, Any]]],
) -> None:
    names = ("bfloat16", "int8", "LoRA, two adapters", "penalties, biases, masks", "drafts by ngram", "pooling")
    rows = some_cases(*names)
    assert {name: (row["right"], row["problem"]) for name, row in rows.items()} == dict.fromkeys(names, (True, ""))
    assert 0 < rows["bfloat16"]["error"] < 0.03


def test_a_capability_that_is_wrong_or_fails_is_told_and_costs_no_other(
    some_cases: Callable[..., dict[str, dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A window that is not seen, of the device alone; a checkpoint that cannot be read."""
    attend = ops.attn_decode

    def forgetful(q: torch.Tensor, *args: Any, **how: Any) -> None:
        attend(q, *args, **how | ({"window": 40} if q.dtype == torch.bfloat16 else {}))

    monkeypatch.setattr(ops, "attn_decode", forgetful)
    row = some_cases("bfloat16")["bfloat16"]
    assert not row["right"]
    assert row["error"] > row["limit"]
    monkeypatch.setattr(ops, "attn_decode", attend)
    monkeypatch.setattr(capabilities, "write", lambda case, path: path.mkdir())
    row = some_cases("int8")["int8"]
    assert (row["right"], row["problem"].partition(":")[0]) == (False, "ModelNotFoundError")


def test_some_capabilities_may_be_asked_for_by_parts_of_their_names() -> None:
    bench = Bench(torch.device("cpu"), True, ("int4", "LoRA"))
    assert capabilities.wanted(bench) == ["int4", "int4-g128", "LoRA, two adapters"]
    with pytest.raises(ValueError, match="--cases int9: the cases are bfloat16; int8"):
        capabilities.run(Bench(torch.device("cpu"), True, ("int9",)))


def test_every_capability_is_taken_on_cuda(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Or its case would measure a refusal, where nothing can be mended."""
    monkeypatch.setattr("actorllm.types.device.why_not_cuda", lambda: None)
    bench = Bench(torch.device("cuda"), False)
    for name, case in capability_cases.cases(bench).items():
        path = capabilities.place(tmp_path, case)
        path.mkdir()
        (path / "config.json").write_text(json.dumps(case.config))
        config = capabilities._config(bench, case, path, is_oracle=False, load_format="dummy")
        assert config.device == "cuda", name


@pytest.fixture
def spawning(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Processes may be spawned; the one that tracks what they share ends with the test."""
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    yield
    tracker: Any = resource_tracker
    tracker._resource_tracker._stop()


@pytest.mark.usefixtures("spawning")
def test_what_happens_to_a_process_costs_one_case() -> None:
    names = ["one", "dies", "two", "lost", "three"]
    found = dict(apart.one_by_one(gpu_processes.one, names, 60.0))
    assert found == {
        **{name: {"found": name} for name in ("one", "two", "lost", "three")},
        "dies": {"problem": "its process ended with 3"},
    }
    hanging = apart.one_by_one(gpu_processes.one, ["hangs"], 0.1)
    assert list(hanging) == [("hangs", {"problem": "it was ended after 0.1 s"})]


@pytest.mark.usefixtures("spawning")
def test_work_is_shared_out(tmp_path: Path) -> None:
    apart.share_out(gpu_processes.share, 2, 60.0, str(tmp_path))
    assert {path.name for path in tmp_path.iterdir()} == {"0 of 2", "1 of 2"}


# What is made of it -----------------------------------------------------------------------------------------------------


def test_the_best_configuration_loses_least_over_all_cases() -> None:
    costs = {(1, 8): {"a": 1.0, "b": 4.0}, (2, 8): {"a": 1.3, "b": 2.0}, (3, 8): {"a": 9.0}}
    rows = [
        {"class": "d", "case": case, "us": us, "BLOCK": block, "warps": warps}
        for (block, warps), by_case in costs.items()
        for case, us in by_case.items()
    ]
    assert search.choose(rows, ("BLOCK", "warps")) == {"d": {"BLOCK": 2, "warps": 8}}

    found = [
        {"class": "narrow", "rows": count, "ratio": ratio}
        for count, ratio in ((1, 0.7), (8, 0.9), (16, 1.1), (32, 0.9))
    ]
    assert products.max_rows(found) == {"narrow": 8}


def test_a_search_in_which_nothing_runs_says_so(bench: Bench) -> None:
    def broken() -> list[Callable[[], None]]:
        raise RuntimeError("out of resource: shared memory")

    with pytest.raises(RuntimeError, match="attn_decode a batch: no candidate runs"):
        search.measure(bench, "attn_decode", [search.Case("a batch", "d128", broken)], [{"PER_SM": 1}])


def test_programs_that_are_tried_fit_on_a_multiprocessor_together() -> None:
    for config in attention.decode_candidates(Bench(torch.device("cpu"), False)):
        assert config["PER_SM"] * config["num_warps"] * 32 * config["maxnreg"] <= 65536


def test_what_was_found_goes_into_the_table(tmp_path: Path) -> None:
    file = tmp_path / "configs.json"
    file.write_text(tables.TABLE.read_text())
    before = json.loads(file.read_text())
    decode = {"PER_SM": 4, "TILE": 32, "num_warps": 4, "num_stages": 4, "maxnreg": 128}
    results: dict[str, dict[str, Any]] = {
        "products": {"max_rows": {"*": 8}},
        "search-products": {
            "kernel": "skinny_gemm",
            "chosen": {"*": {"BLOCK_N": 32, "PREFETCH": 0, "MAX_ROWS": 64}},
        },
        "search-decode": {"kernel": "attn_decode", "chosen": {"d128": decode}},
        "decode": {"decode": []},
    }
    changes = tables.write_configs(results, file, "sm_90")
    assert len(changes) == 2
    table = json.loads(file.read_text())
    assert table["attn_decode"]["sm_90"].pop("d128") == decode
    assert before["attn_decode"]["sm_90"].pop("d128")
    general = before["skinny_gemm"]["*"]["*"]
    assert table["skinny_gemm"].pop("sm_90") == {"*": general | {"BLOCK_N": 32, "PREFETCH": 0, "MAX_ROWS": 64}}
    assert table == before, "nothing else has changed"
    assert tables.write_configs(results, file, "sm_90") == []
    with pytest.raises(ValueError, match="no entry of attn_decode for sm_90, shape class 'd512'"):
        tables.write_configs({"search-decode": {"kernel": "attn_decode", "chosen": {"d512": decode}}}, file, "sm_90")


def test_the_table_is_written_as_it_is_checked_in(tmp_path: Path) -> None:
    text = tables.TABLE.read_text()
    assert tables._compact(json.loads(text)) == text


def test_every_target_is_looked_for_where_a_stage_leaves_it() -> None:
    results: dict[str, dict[str, Any]] = {}
    for target in targets.TARGETS:
        row = {**target.figure.row, target.figure.column: 0.5}
        results.setdefault(target.figure.stage, {}).setdefault(target.figure.table, []).append(row)
    assert set(results) <= set(gpu.STAGES)
    found = {row["figure"]: row for row in targets.verdicts(results, "NVIDIA H200")}
    figure = "decode step of Qwen3-0.6B, batch 1, share of the limit"
    assert found[figure] == {"figure": figure, "measured": 0.5, "target": "≥ 0.5", "met": True}
    assert found["step_prep, 256 rows, us"]["target"] == "≤ 3"
    assert not found["prefill attention at 8k, TFLOP/s"]["met"]
    assert all(row["met"] == "—" for row in targets.verdicts(results, "NVIDIA H100 PCIe"))
    assert all(row["measured"] is None and row["met"] is None for row in targets.verdicts({}, "NVIDIA H200"))


def test_measured_figures_go_into_the_table_of_the_kernels(tmp_path: Path) -> None:
    file = tmp_path / "README.md"
    file.write_text(readme.README.read_text())
    rows = {line.split("`")[1] for line in file.read_text().split("\n") if line.startswith("| `")}
    assert rows - set(readme.FIGURES) == {
        "choose_experts.py",
        "gemv.py",
        "group_pairs.py",
        "grouped_gemm.py",
        "latent_decode.py",
        "latent_prefill.py",
        "latent_rope_kv.py",
        "lora_expand.py",
        "lora_shrink.py",
        "philox.py",
        "quantize_rows.py",
        "quantized_gemm.py",
        "router_scores.py",
        "sum_experts.py",
    }, "no stage has a figure of these"
    assert set(readme.FIGURES) <= rows
    assert readme.write_readme({}, "NVIDIA H200", file) == []
    assert file.read_text() == readme.README.read_text(), "nothing is claimed of what was not measured"
    small = [
        {"kernel": "rmsnorm", "case": "8192 x 4096", "us": 70.0, "share of bandwidth": 0.876},
        {"kernel": "step_prep", "case": "256 rows", "us": 2.34},
    ]
    changed = readme.write_readme({"small": {"small": small}}, "NVIDIA H200", file)
    assert [line.rsplit(" | ", 1)[1] for line in changed] == ["2.3 us (256 rows) |", "88% (8192 x 4096) |"]
    assert "Measured on a GPU: NVIDIA H200, 2" in file.read_text()
    assert file.read_text().count("not measured") == len(rows) - 2


def test_a_build_that_is_not_in_use_stops_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> float:
        raise RuntimeError("no allocator was set")

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    asked = [check for _, check, *_ in correctness.checks(Bench(torch.device("cpu"), False))]
    assert not any("by_tma" in str(check.args) for check in asked if isinstance(check, functools.partial))

    allocators: list[object] = []
    monkeypatch.setattr(attention.triton, "set_allocator", allocators.append)
    monkeypatch.setattr(attention, "check_prefill", broken)
    monkeypatch.setattr(attention, "prefill_call", broken)
    rows = attention.descriptors(Bench(torch.device("cpu"), True))["descriptors"]
    assert [(row["right"], row["by descriptors, TFLOP/s"]) for row in rows] == [(False, None)]
    assert len(allocators) == 1, "descriptors take memory that nobody else provides"


def test_the_memory_of_a_runner_is_free_when_its_block_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next runner asks for nearly all of the GPU, while this one's name is still bound."""
    bench = Bench(torch.device("cpu"), True)
    with steps.runner_of(bench, TINY["tiny-llama"]) as runner:
        step = runner.steady_step(1, 5, is_recorded=False)
        held = [weakref.ref(runner._pool.pool), weakref.ref(runner.model.embedding), weakref.ref(runner.graphs)]
    assert [one() for one in held] == [None, None, None]
    assert runner is not None
    assert step is not None

    monkeypatch.setattr(steps.CudaRunner, "profile_num_blocks", lambda _: 0)
    with (
        pytest.raises(RuntimeError, match="tiny-llama: the GPU has no memory left"),
        steps.runner_of(bench, TINY["tiny-llama"]),
    ):
        pass


def test_the_idle_time_between_steps_is_that_without_work() -> None:
    def event(name: str, start: float, length: float, cat: str = "kernel") -> dict[str, object]:
        return {"cat": cat, "name": name, "ts": start, "dur": length}

    def step(at: float, layer: str = "attn_decode_kernel") -> list[dict[str, object]]:
        """70 long; kernels overlap, as dependent launches do."""
        return [event("step_prep_kernel", at, 2), event(layer, at + 1, 60), event("kv_clear_kernel", at + 60, 10)]

    host = [
        event("index_copy", 90, 4),
        event("Memcpy HtoD", 95, 3, "gpu_memcpy"),
        event("aten::zeros", 71, 20, "cpu_op"),
    ]
    found = engine.between_steps([*step(110), *host, *step(0), *step(210)])
    gaps = [110 - 70 - 4 - 3, 210 - 180]
    assert found == {
        "steps": 2,
        "step, us": (110 + 100) / 2,
        "idle between steps, us": sum(gaps) / 2,
        "share": sum(gaps) / 210,
    }
    prompt = [event("embed_kernel", 260, 1), event("attn_prefill_kernel", 261, 20), event("kv_clear_kernel", 290, 1)]
    assert engine.between_steps([*step(0), *step(100), *step(200), *prompt, *step(300), *step(400)]) == {
        "steps": 2,
        "step, us": 100,
        "idle between steps, us": 30,
        "share": 60 / 200,
    }
    mixed = step(100, "attn_prefill_kernel")
    assert engine.between_steps([*step(0), *mixed, *step(200)])["steps"] == 0, "steps with prompts are none of these"
    assert engine.between_steps([event("step_prep_kernel", 50, 5, "cpu_op")])["share"] is None


# Before there is a GPU ---------------------------------------------------------------------------------------------------


def test_predictions_need_no_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step is between its limit and three times that, and what it says of filters is what it was built for."""
    monkeypatch.setattr(
        sys, "argv", ["gpu.py", "--predict", "H200", "--models", "Qwen3-0.6B", "--json", str(tmp_path / "p")]
    )
    assert gpu.main() == 0
    found = json.loads((tmp_path / "p").read_text())
    shares = {row["batch"]: row["share"] for row in found["steps"]}
    assert set(shares) == {1, 8, 32, 64, 128, 256}
    assert all(1 / 3 < share < 1 for share in shares.values())
    assert all(row["from, ms"] < row["predicted, ms"] < row["to, ms"] for row in found["steps"])
    assert 1 / 3 < found["prompts"][0]["share"] < 1
    assert all(row["predicted, ms"] < 0.025 for row in found["filters"])


def test_the_page_says_what_the_model_predicts() -> None:
    """docs/internals/gpu-figures.md, line by line."""
    models = ["Qwen3-0.6B", "Llama-3.1-8B", "Llama-3.2-1B"]
    rows = [row for machine in ("H200", "H100") for row in prediction.wanted(prediction.MACHINES[machine], models)]
    lines = ["| " + " | ".join(row.values()) + " |" for row in rows]
    assert len(lines) == len(prediction.WANTED)
    page = (ROOT / "docs" / "internals" / "gpu-figures.md").read_text().splitlines()
    first = page.index("| figure | wanted | predicted | interval | reached in the model |") + 2
    assert page[first : first + len(lines)] == lines


def test_a_machine_that_is_not_known_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--predict", "TPU"])
    assert gpu.main() == 2
    assert "--predict TPU is none of H200, H100" in capsys.readouterr().err


def _first_hour(**changes: Any) -> dict[str, dict[str, Any]]:
    step = {"model": "Qwen3-0.6B", "batch": 1, "context": 1024, "step, ms": 2.0, "from, ms": 1.9, "to, ms": 2.1}
    kernels = [{"model": "Qwen3-0.6B", "batch": 1, "kernel": "attn_decode_kernel", "us": 900.0}]
    return {
        "correctness": {"checks": [1, 2, 3]},
        "order": {"order": []},
        "steps": {"steps": [step | {"verdict": "right", "share": 0.16} | changes], "by kernel": kernels},
        "ablations": {"ablations": [{"way": "no prefetch of weights", "to": 0.9}, {"way": "no graph", "to": 3.0}]},
    }


def test_the_verdict_says_what_to_do_next() -> None:
    results = _first_hour()
    beside = prediction.beside(results, "NVIDIA H200")
    (row,) = beside
    assert row["measured / predicted"] > 3
    lines = verdict.verdict(results, beside, {}, "NVIDIA H200")
    assert lines[:2] == [
        "Kernels are right: 3 launches agree with torch in bfloat16.",
        "Dependent launches give the tokens of plain ones, bit for bit.",
    ]
    assert "Decode steps of Qwen3-0.6B reach 16% at batch 1 of what the memory allows." in lines
    assert any("most of it in attn_decode" in line and "--stage search-decode" in line for line in lines)
    assert any("faster with no prefetch of weights" in line for line in lines)


def test_the_verdict_names_what_is_wrong_beside_plain_models() -> None:
    rows = [{"case": "int8", "right": True}, {"case": "pooling", "right": False}]
    results = {"capabilities": {"capabilities": rows, "wrong": "not right: pooling"}}
    lines = verdict.verdict(results, [], {"capabilities": "not right: pooling"}, "NVIDIA H200")
    assert any(line.startswith("WRONG beside plain models: pooling.") for line in lines)
    assert not any("ended without a result" in line for line in lines)
    lines = verdict.verdict({"capabilities": {"capabilities": rows[:1]}}, [], {}, "NVIDIA H200")
    assert "All 1 capabilities beside plain models agree with torch in float32." in lines


def test_no_time_counts_without_its_verdict() -> None:
    results = _first_hour(verdict="computed by torch: embed")
    lines = verdict.verdict(results, [], {"correctness": "wrong kernels: embed"}, "NVIDIA H100")
    assert lines[0].startswith("WRONG: wrong kernels: embed. No time below counts.")
    assert any("Those at batch 1 do not count" in line for line in lines)
    assert any("this is another GPU" in line for line in lines)
    assert verdict.verdict({}, [], {}, "NVIDIA H200")[0].startswith("Whether the kernels are right was not checked")


def test_what_is_compared_takes_turns_and_has_an_interval() -> None:
    ran: list[str] = []
    bench = Bench(torch.device("cpu"), False)
    times = iter(range(1, 100))
    object.__setattr__(bench, "once", lambda call, before: (call(), float(next(times)))[1])
    ratios = bench.paired((lambda: ran.append("a"), lambda: ran.append("b")), (lambda: None, lambda: None), rounds=4)
    assert "".join(ran) == "ab" + "abbaabba"
    assert len(ratios) == 4
    assert interval([float(n) for n in range(15)]) == (3.0, 11.0)
    assert interval([1.0]) == (1.0, 1.0)
