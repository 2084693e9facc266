"""The self-check on the emulated device: planted mistakes are found, replaced and remembered; a right kernel is not suspected."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from actorllm.model.cuda import ops
from actorllm.model.cuda.device import HostDevice
from actorllm.model.cuda.proof import memory
from actorllm.model.cuda.proof.self_check import Copies, difference
from actorllm.model.cuda.runner import CudaRunner
from tests.model.cuda.conftest import config_of
from tests.model.cuda.mixtures import DEEPSEEK_V3
from tests.model.cuda.twins import TINY
from tests.model.quantization.layouts import save_both


class ProvenDevice(HostDevice):
    """Checks itself as a GPU does. What would be the kernels are the functions of the host, but for those that a test plants."""

    def __init__(self) -> None:
        super().__init__()
        self.proves_itself = True


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Every operation goes through its launcher, which does what the host does; nothing of it stays."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for operation in ops.OPERATIONS.values():
        monkeypatch.setattr(operation, "launcher", operation.on_host)
    yield
    for operation in ops.OPERATIONS.values():
        operation.is_replaced = False


def start(folder: Callable[..., Path], **arguments: Any) -> CudaRunner:
    given = {"block_size": 64, "max_num_seqs": 32, **arguments}
    runner = CudaRunner(config_of(folder(), **given), show_progress=False, device=ProvenDevice())
    runner.load()
    runner.allocate(24)
    return runner


def doubled(name: str, output: str) -> Callable[..., None]:
    """A kernel whose result is twice what it should be."""
    right = ops.OPERATIONS[name].on_host

    def wrong(*args: Any, **kwargs: Any) -> None:
        right(*args, **kwargs)
        names = right.__code__.co_varnames[: right.__code__.co_argcount + right.__code__.co_kwonlyargcount]
        given = dict(zip(names, args, strict=False)) | kwargs
        given[output].mul_(2)

    wrong.__signature__ = __import__("inspect").signature(right)  # type: ignore[attr-defined]
    return wrong


def tokens_of(runner: CudaRunner) -> list[int]:
    from actorllm.messages import NewRow, StepPlan, pack_rows
    from tests.model.driver import int32

    plan = StepPlan(
        step=0,
        new_rows=pack_rows([NewRow(0, 20)]),
        new_tokens=int32(range(20)),
        new_num_blocks=int32([1]),
        new_blocks=int32([0]),
        prefill_slots=int32([0]),
        prefill_counts=int32([20]),
    )
    found = runner.step(plan).tokens.tolist()
    for step in range(1, 6):
        found += runner.step(StepPlan(step=step, decode_slots=int32([0]))).tokens.tolist()
    return found


def test_right_kernels_are_all_checked_and_stay(folder: Callable[..., Path], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "actorllm"):
        runner = start(folder)
    assert ops.replaced() == []
    assert "kernels were checked against torch" in caplog.text
    assert runner.statistics()["num_replaced_kernels"] == 0
    assert runner.graphs.is_on
    (entry,) = json.loads(memory.path().read_text()).values()
    assert entry["failed"] == {}


@pytest.mark.parametrize(("name", "output"), [
    ("skinny_gemm", "y"), ("attn_decode", "out"), ("step_prep", "positions"), *(
        pytest.param(*one, marks=pytest.mark.slow(reason="starts the emulated device twice more; three kernels are quick"))
        for one in (("embed", "y"), ("qknorm_rope_kv", "q"), ("attn_prefill", "out"), ("rmsnorm", "y"))
    ),
])  # fmt: skip
def test_a_kernel_that_is_wrong_is_replaced_and_the_tokens_are_right(
    folder: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    name: str,
    output: str,
) -> None:
    expected = tokens_of(start(folder))
    memory.path().unlink()
    monkeypatch.setattr(ops.OPERATIONS[name], "launcher", doubled(name, output))
    runner = start(folder)
    assert ops.replaced() == [name], "those behind it are judged by themselves"
    assert f"the kernel {name} is wrong on CPU tensors" in caplog.text
    assert runner.statistics()["num_replaced_kernels"] == 1
    assert not runner.graphs.is_on, "what takes its place reads values"
    assert tokens_of(runner) == expected


def test_a_kernel_that_does_not_compile_is_replaced(
    folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = tokens_of(start(folder))
    memory.path().unlink()

    def broken(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("PassManager::run failed")

    broken.__signature__ = __import__("inspect").signature(ops.OPERATIONS["attn_decode"].on_host)  # type: ignore[attr-defined]
    monkeypatch.setattr(ops.OPERATIONS["attn_decode"], "launcher", broken)
    runner = start(folder)
    assert ops.replaced() == ["attn_decode"]
    assert tokens_of(runner) == expected
    (entry,) = json.loads(memory.path().read_text()).values()
    assert entry["failed"] == {"attn_decode": "RuntimeError: PassManager::run failed"}


def test_what_was_found_is_remembered_until_something_changes(
    folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def was_checked(**arguments: Any) -> bool:
        caplog.clear()
        with caplog.at_level(logging.INFO, "actorllm"):
            start(folder, **arguments)
        return "kernels were checked" in caplog.text

    assert was_checked()
    assert not was_checked()
    assert was_checked(max_num_seqs=16)
    with monkeypatch.context() as patch:
        patch.setattr(CudaRunner, "_cache_dtype", torch.uint8)  # other builds of attention
        assert was_checked()
    monkeypatch.setattr(memory, "source_hash", lambda: "another")
    assert was_checked()
    assert not was_checked()
    monkeypatch.setenv(memory.AGAIN, "again")
    assert was_checked()
    monkeypatch.delenv(memory.AGAIN)
    memory.path().write_text("{")
    assert was_checked()
    memory.path().unlink()
    memory.path().mkdir()  # cannot be written
    assert was_checked()


def test_each_form_of_the_layers_is_checked(tmp_path: Path) -> None:
    """Of two checkpoints with one shape and one method, each launches other builds."""
    for name in ("packed", "packed-8"):
        path, _ = save_both(name, tmp_path / name)
        for _ in range(2):
            start(partial(Path, path), load_format="auto")
    assert len(memory.entries()) == 2


def test_what_failed_before_is_replaced_without_a_check(
    folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ops.OPERATIONS["embed"], "launcher", doubled("embed", "y"))
    start(folder)
    ops.OPERATIONS["embed"].is_replaced = False
    start(folder)
    assert ops.replaced() == ["embed"]


def test_copies_share_memory_as_the_tensors_do() -> None:
    whole = torch.arange(6.0)
    copies = Copies()
    first, second = copies.of((whole[:4], whole[2:].view(2, 2)))
    first[3] = 9
    assert second[0, 1] == 9
    assert whole[3] == 3
    copies.back()
    assert whole[3] == 9


@pytest.mark.parametrize(
    ("name", "output"),
    [("latent_rope_kv", "rotated"), ("latent_decode", "out"), ("latent_prefill", "out"), ("choose_experts", "weights")],
)
def test_a_wrong_kernel_of_latents_or_their_experts_is_replaced(
    folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, name: str, output: str
) -> None:
    of_latents = partial(folder, **DEEPSEEK_V3)
    expected = tokens_of(start(of_latents, max_num_seqs=2))
    assert ops.replaced() == []
    memory.path().unlink()
    monkeypatch.setattr(ops.OPERATIONS[name], "launcher", doubled(name, output))
    runner = start(of_latents, max_num_seqs=2)
    assert ops.replaced() == [name]
    assert tokens_of(runner) == expected


def test_rows_of_padding_do_not_tighten_what_is_allowed() -> None:
    expected = torch.zeros(96, 64)
    expected[:4] = torch.randn(4, 64)
    noise = torch.zeros_like(expected)
    noise[:4] = torch.randn(4, 64) * 8e-3
    assert difference(expected + noise, expected, "out", 3e-2) is None
    noise[0, 0] = 0.5
    assert "is off by 0.5" in str(difference(expected + noise, expected, "out", 3e-2))
    assert difference(expected + 1e-2, expected, "out", 3e-2) is not None  # padding is 0


def test_kernels_of_a_head_are_checked_as_it_launches_them(
    folder: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attention of a head is a build of its own."""
    attend, seen = ops.OPERATIONS["attn_decode"].on_host, []

    def wrong(*args: Any, skipped: int = 0, **kwargs: Any) -> None:
        attend(*args, skipped=skipped, **kwargs)
        seen.append(skipped)
        if skipped:
            args[9].mul_(2)

    wrong.__signature__ = __import__("inspect").signature(attend)  # type: ignore[attr-defined]
    monkeypatch.setattr(ops.OPERATIONS["attn_decode"], "launcher", wrong)
    head = tmp_path / "head"
    head.mkdir()
    own = {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1, "draft_vocab_size": 100}
    taps = {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}
    (head / "config.json").write_text(json.dumps(TINY | own | taps))
    drafts = {"method": "eagle3", "model": str(head), "num_speculative_tokens": 2}
    start(folder, max_num_seqs=2, max_model_len=64, max_num_batched_tokens=64, speculative_config=drafts)
    assert ops.replaced() == ["attn_decode"]
    assert {0, 1} <= set(seen), "the target's was right"


@pytest.mark.parametrize(("found", "expected", "output", "is_right"), [
    ([1.0, 2.0], [1.001, 2.0], "y", True),
    ([1.0, 2.0], [1.1, 2.0], "y", False),
    ([1.0, float("nan")], [1.0, 2.0], "y", False),
    ([1.0, float("inf")], [1.0, float("inf")], "y", True),
    ([1, 2], [1, 3], "positions", False),
    (list(range(100)), [7, *range(1, 100)], "tokens", True),
    (list(range(100)), [7] * 100, "tokens", False),
])  # fmt: skip
def test_what_counts_as_a_difference(found: list[float], expected: list[float], output: str, is_right: bool) -> None:
    assert (difference(torch.tensor(found), torch.tensor(expected), output) is None) == is_right
