"""bench/gpu.py cannot be run without a GPU, so it is walked through on a CPU: it must not rot until somebody has one."""

from __future__ import annotations

import functools
import json
import statistics
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from actorllm_kernels import reference

ROOT = Path(__file__).resolve().parents[1]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "bench" / "gpu.py"), *arguments], capture_output=True, text=True, check=False
    )


@pytest.mark.timeout(400)
def test_every_stage_runs_and_no_kernel_is_wrong(tmp_path: Path) -> None:
    work, result = tmp_path / "work", tmp_path / "gpu.json"
    done = run("--cpu-check", "--work", str(work), "--json", str(result))
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(result.read_text())
    assert found["correctness"]["num_wrong"] == 0
    assert found["decode"]["decode"][0]["GB/s"] > 0
    assert found["order"]["same tokens"]
    assert found["offline"]["offline"][0]["output tokens/s"] > 0
    assert not any(row["problem"] for row in found["peers"]["peers"])
    page = result.with_suffix(".md").read_text()
    assert "Not measured" not in page
    assert "a walk through the script on a CPU" in page
    (work / "head.json").unlink()
    again = run("--cpu-check", "--work", str(work), "--stage", "next")
    assert again.returncode == 0, again.stderr
    assert "head ..." in again.stdout
    assert "ceilings ..." not in again.stdout, "what is there is not measured again"


def test_bad_arguments_are_named() -> None:
    assert "--stage tail is none of next, all, ceilings" in run("--cpu-check", "--stage", "tail").stderr
    assert "--models gpt: the models are tiny-qwen3" in run("--cpu-check", "--models", "gpt").stderr


def test_the_best_configuration_loses_least_over_all_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    from gpu_stages.products import max_rows
    from gpu_stages.tables import choose

    costs = {(1, 8): {"a": 1.0, "b": 4.0}, (2, 8): {"a": 1.3, "b": 2.0}, (3, 8): {"a": 9.0}}
    rows = [
        {"class": "d", "case": case, "us": us, "BLOCK": block, "warps": warps}
        for (block, warps), by_case in costs.items()
        for case, us in by_case.items()
    ]
    chosen = choose(rows, lambda row: row["class"], lambda row: row["case"], lambda row: row["us"], ("BLOCK", "warps"))
    assert chosen == {"d": {"BLOCK": 2, "warps": 8}}

    products = [
        {"weight": "1024x64", "product": "o", "rows": count, "ratio": ratio}
        for count, ratio in ((1, 0.7), (8, 0.9), (16, 1.1), (32, 0.9))
    ]
    assert max_rows(products) == {"narrow": 8}


def test_a_build_that_is_not_in_use_stops_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    from gpu_stages import attention, correctness
    from gpu_stages.clock import Bench

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
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    from gpu_stages import steps
    from gpu_stages.clock import Bench
    from gpu_stages.models import TINY

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


def test_the_idle_time_between_steps_is_that_without_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    from gpu_stages.engine import between_steps

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
    found = between_steps([*step(110), *host, *step(0), *step(210)])
    gaps = [110 - 70 - 4 - 3, 210 - 180]
    assert found == {
        "steps": 2,
        "step, us": (110 + 100) / 2,
        "idle between steps, us": sum(gaps) / 2,
        "share": sum(gaps) / 210,
    }
    prompt = [event("embed_kernel", 260, 1), event("attn_prefill_kernel", 261, 20), event("kv_clear_kernel", 290, 1)]
    assert between_steps([*step(0), *step(100), *step(200), *prompt, *step(300), *step(400)]) == {
        "steps": 2,
        "step, us": 100,
        "idle between steps, us": 30,
        "share": 60 / 200,
    }
    mixed = step(100, "attn_prefill_kernel")
    assert between_steps([*step(0), *mixed, *step(200)])["steps"] == 0, "steps with prompts are none of these"
    assert between_steps([event("step_prep_kernel", 50, 5, "cpu_op")])["share"] is None


def test_the_timed_steps_have_the_context_that_their_limit_is_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    from gpu_stages import steps
    from gpu_stages.clock import Bench
    from gpu_stages.models import TINY

    bench = Bench(torch.device("cpu"), True)
    lengths = []
    with steps.runner_of(bench, TINY["tiny-llama"]) as runner:
        run = runner.graphs.run

        def noted(*key: Any) -> None:
            run(*key)
            lengths.append(int(runner._decode_rows.seq_lens[0]))

        def rounds(_: Any, call: Callable[[], None], before: Callable[[], None]) -> float:
            lengths.clear()
            for _ in range(3):
                before()
                call()
            return 1.0

        monkeypatch.setattr(runner.graphs, "run", noted)
        monkeypatch.setattr(Bench, "eager_seconds", rounds)
        monkeypatch.setattr(Bench, "pick", lambda _, real, tiny: real if real == steps.STEPS else tiny)
        steps.step_seconds(bench, runner, 2, 40)
        assert runner._pool.pool[:, :1].any(), "zeros would be no work"
    assert len(lengths) == 3 * steps.STEPS
    assert statistics.mean(lengths) == pytest.approx(40, abs=0.5)


def test_the_workload_is_that_of_nano_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    from gpu_stages import engine
    from gpu_stages.clock import Bench
    from gpu_stages.models import MODELS

    requests = engine.workload(Bench(torch.device("cpu"), False), MODELS["Qwen3-0.6B"])
    assert (sum(len(ids) for ids, _ in requests), sum(n for _, n in requests)) == (142827, 133966)


def test_a_gpu_that_is_lost_ends_the_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    from gpu_stages import correctness
    from gpu_stages.clock import Bench

    bench = Bench(torch.device("cpu"), True)

    def lost(*_: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(correctness, "checks", lambda _: iter([("one", lost, 1.0), ("two", lambda _: 0.0, 1.0)]))
    assert [row["kernel"] for row in correctness.run(bench)["checks"]] == ["one", "two"]
    monkeypatch.setattr(Bench, "synchronize", lost)
    found = correctness.run(bench)
    assert [row["kernel"] for row in found["checks"]] == ["one"], "what came after it would look wrong as well"
    assert found["wrong"] == "wrong kernels: one"


@pytest.mark.parametrize("edge", ["last", "first", "page"])
def test_attention_that_leaves_out_a_key_is_found_wrong(edge: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    from gpu_stages import correctness
    from gpu_stages.inputs import Paged

    torch.manual_seed(0)
    cache = Paged.make([3001], 8, 128, 64, torch.device("cpu")).sharpen()
    q, (keys, values) = 2 * torch.randn(1, 16, 128).double(), (x.double() for x in cache.sequence(0))
    whole = reference.attention(q, keys, values, 128**-0.5)
    assert correctness.off_by_row(whole.to(torch.bfloat16), whole) < correctness.ATTENTION_TOLERANCE
    left = {"last": slice(3000), "first": slice(1, 3001), "page": slice(64, 3001)}[edge]
    less = reference.attention(q, keys[left], values[left], 128**-0.5)
    assert correctness.off_by_row(less, whole) > 4 * correctness.ATTENTION_TOLERANCE
