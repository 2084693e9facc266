"""Heads that draft on a device: their drafts are those of plain torch, and streams those without them (float32)."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from actorllm.actors.worker import WorkerActor
from actorllm.config import BUNDLED_MODELS
from actorllm.model.cuda import head_drafter
from actorllm.model.cuda.device import Device, HostDevice
from actorllm.model.cuda.head_drafter import DeviceHeadDrafter
from actorllm.model.cuda.runner import CudaRunner, HeadRunner
from tests.model.cpu.draft_head_oracle import (
    HEADS,
    OTHER,
    PROMPT,
    SHAPE,
    Oracle,
    partly_right,
    quantize,
    save_deepseek,
    save_eagle,
    save_eagle3,
    save_target,
)
from tests.model.cuda.conftest import config_of
from tests.model.cuda.delayed_device import DelayedDevice
from tests.model.cuda.drafting_engine import config as engine_config
from tests.model.cuda.drafting_engine import load, run
from tests.model.cuda.twins import DeviceDriver
from tests.model.hf.decoders import MODELS

pytestmark = pytest.mark.timeout(120)

BLOCK = 16
HEAD_SIZES = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 24}
"""For which there are kernels."""


class Case:
    """A driver whose worker drafts by a head, what it drafted, and the oracle."""

    def __init__(self, driver: DeviceDriver, oracle: Oracle, most: int) -> None:
        self.driver, self.oracle, self.most = driver, oracle, most
        runner: Any = driver.runner
        model = runner._draft_model
        assert isinstance(model, DeviceHeadDrafter)
        self.model, self.runner = model, runner
        self.plan: Callable[[list[int], list[int]], list[int]] = lambda tokens, drafts: drafts
        """What is checked in the place of the drafts, of the tokens so far and the drafts."""
        self.num_compared = 0
        draft = model.draft

        def comparing(batch: Any, histories: Any, slots: Any, wanted: Any) -> list[list[int]]:
            found = draft(batch, histories, slots, wanted)
            for row, slot in enumerate(slots.tolist()):
                tokens = driver.requests[slot].tokens
                _, drafts = self.oracle.logits(tokens, len(found[row]))
                assert found[row] == drafts
                self.num_compared += len(drafts)
                found[row] = self.plan(tokens, drafts)
            return found

        model.draft = comparing  # type: ignore[method-assign]

    def decode(self, num_steps: int, slots: list[int] | None = None) -> None:
        for number in range(num_steps):
            self.driver.step(decode=slots if number == 0 else None, max_drafts=self.most)

    @torch.inference_mode()
    def leave_behind(self, value: float) -> None:
        """As of other requests; nothing is written where the first token of a sequence would be."""
        self.model.runner.pool.fill_(value)

    def record(self) -> None:
        while self.runner.record_next():
            pass


@pytest.fixture
def make_case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Case]:
    def make(
        name: str = "eagle3", most: int = 3, device: Device | None = None, quantized: str = "", **arguments: Any
    ) -> Case:
        method, own = HEADS[name]
        for size, value in HEAD_SIZES.items() if name != "mtp of DeepSeek" else ():
            monkeypatch.setitem(SHAPE, size, value)
        folder = tmp_path / "target"
        folder.mkdir(exist_ok=True)
        if family := own.get("architecture"):
            target, layer = save_deepseek(folder, MODELS[family][1])
            own = {"layer": layer}
        else:
            target = save_target(folder, method)
        tree = json.loads((folder / "config.json").read_text())
        drafts: dict[str, Any] = {
            "method": method,
            "num_speculative_tokens": most,
            "num_speculative_tokens_per_batch_size": [[1, 3, most]],
            "draft_sample_method": "greedy",
        }
        head = folder
        if method != "mtp":
            save = save_eagle if method == "eagle" else save_eagle3
            head = save(tmp_path / "head", SHAPE if method == "eagle3" else tree | SHAPE, **own)
            drafts["model"] = str(head)
        exact = quantize(head, quantized) if quantized else {}
        given = {"block_size": BLOCK, "max_model_len": 96, "load_format": "auto"}
        config = config_of(folder, speculative_config=drafts, **(given | arguments))
        runner = CudaRunner(config, show_progress=False, device=HostDevice() if device is None else device)
        runner.load()
        runner.allocate(48)
        runner._speculator.histories._most = most  # type: ignore[union-attr]
        if isinstance(device, DelayedDevice):
            device.is_late = True
        driver = DeviceDriver(runner, num_blocks=48)  # type: ignore[arg-type]
        oracle = Oracle.of(method, head, target, **own)
        oracle.tensors |= exact
        return Case(driver, oracle, most)

    return make


@pytest.mark.parametrize(
    ("name", "is_recorded"), [("eagle3", False), ("mtp", False), *((name, True) for name in HEADS)], ids=str
)
def test_drafts_are_those_of_plain_torch(make_case: Callable[..., Case], name: str, is_recorded: bool) -> None:
    """Of several rows, in steps that have some of their drafts right, none, or all; over the ends of blocks."""
    case = make_case(name, enforce_eager=not is_recorded)
    case.plan = partly_right(case.oracle, case.most)
    if is_recorded:
        case.record()
    case.leave_behind(1.0)
    case.driver.add(0, PROMPT)
    case.driver.add(1, [80])
    case.driver.add(2, OTHER)
    case.driver.step(prefill={0: 21, 1: 1, 2: 20})
    before = [len(case.driver.requests[slot].tokens) for slot in range(3)]
    case.decode(9, [0, 1, 2])
    assert case.num_compared > 20
    assert all(len(case.driver.requests[slot].tokens) > n + 11 for slot, n in enumerate(before)), "several at a time"
    head: Any = case.model.runner
    assert (head.statistics()["num_graph_replays"] > 0) == is_recorded


def test_a_quantized_head_is_read_as_such(make_case: Callable[..., Case]) -> None:
    case = make_case("eagle3", quantized="fp8-channel")
    case.plan = partly_right(case.oracle, case.most)
    case.driver.add(0, PROMPT)
    case.driver.step(prefill={0: 21})
    case.decode(5, [0])
    assert case.num_compared > 8


def test_a_prompt_in_chunks_and_a_fork_of_it(make_case: Callable[..., Case]) -> None:
    case = make_case()
    driver = case.driver
    driver.add(0, PROMPT)
    for count in (1, 7, 5):
        driver.step(prefill={0: count})
    copy = driver.fork(1, 0)
    assert copy is not None
    driver.step(prefill={0: 8})
    sources, targets = (np.array([block], np.int32) for block in copy)
    with torch.inference_mode():
        case.runner._copy(sources, targets)
        case.model.runner._copy(sources, targets)
    case.decode(6, [0, 1])
    assert case.num_compared >= 8


@pytest.mark.parametrize("name", ["eagle3", "mtp of DeepSeek"])
def test_a_prefix_in_the_cache_has_all_that_a_head_needs(make_case: Callable[..., Case], name: str) -> None:
    """The next token behind the prefix is another one than that of the request which has computed it."""
    case = make_case(name)
    case.plan = partly_right(case.oracle, case.most)
    driver = case.driver
    driver.add(0, PROMPT)
    driver.step(prefill={0: len(PROMPT)})
    case.decode(6, [0])
    known = driver.requests[0].tokens
    assert len(known) > 2 * BLOCK, "the second block was filled by decoding"
    for slot, shared in ((1, 1), (2, 2)):
        driver.add(slot, [*known[: shared * BLOCK], 77, 78, 79], num_computed=shared * BLOCK)
        driver.requests[slot].blocks[:shared] = driver.requests[0].blocks[:shared]
    driver.step(prefill={1: 3, 2: 3}, decode=[])
    case.num_compared = 0
    case.decode(6, [1, 2])
    assert case.num_compared >= 8


@pytest.mark.parametrize("is_ahead", [False, True], ids=["one by one", "launched ahead"])
def test_a_row_that_rests_is_brought_forward(
    make_case: Callable[..., Case], monkeypatch: pytest.MonkeyPatch, is_ahead: bool
) -> None:
    """Its states have room for a few tokens only, and the newest token may not be known yet."""
    monkeypatch.setattr(head_drafter, "WAITING_TOKENS", 3)
    case = make_case()
    driver = case.driver
    driver.add(0, PROMPT)
    driver.add(1, OTHER)
    driver.step(prefill={0: 21, 1: 20})
    driver.step(decode=[0, 1])
    handles: list[Any] = []
    for _ in range(17):
        handles.append(case.runner.execute(driver.plan({}, None)))
        if len(handles) > is_ahead:
            take(driver, case.runner.finish(handles.pop(0)))
    for handle in handles:
        take(driver, case.runner.finish(handle))
    assert case.num_compared == 0
    assert (case.model._waiting[:2] > 0).all()
    assert (case.model.computed[:2] > 30).all()
    for slot in (0, 1):
        case.runner._speculator.histories.of(slot).rest = 0
    case.decode(2)
    assert case.num_compared > 0


def take(driver: DeviceDriver, result: Any) -> None:
    for slot, token in zip((0, 1), result.tokens.tolist(), strict=True):
        driver.requests[slot].tokens.append(token)


def test_rows_that_were_in_a_batch_too_large_for_drafts_draft_again(
    make_case: Callable[..., Case], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a head that has zeros in the place of what it has not seen; others are drafted for as ever."""
    monkeypatch.setattr(head_drafter, "WAITING_TOKENS", 3)
    case = make_case()
    driver, head = case.driver, case.model.runner
    for slot in range(4):
        driver.add(slot, PROMPT[: 5 + slot])
    driver.step(prefill={slot: 5 + slot for slot in range(4)})
    driver.step(decode=[0, 1, 2, 3])
    case.leave_behind(0.5)
    for _ in range(12):
        driver.step()
    computed, waiting = int(case.model.computed[0]), int(case.model._waiting[0])
    assert 0 < waiting <= 7
    assert computed + waiting == len(driver.requests[0].tokens)
    stored = head.pool[:, driver.requests[0].blocks]
    assert (stored == 0).any()
    assert (stored == 0.5).any()
    driver.remove(1, 2, 3)
    driver.add(4, OTHER)
    driver.step(prefill={4: 20}, decode=[], max_drafts=3)
    case.decode(2, [4])
    assert case.num_compared > 0
    case.model.draft = type(case.model).draft.__get__(case.model)  # type: ignore[method-assign]
    assert driver.step(decode=[0, 4], max_drafts=3).num_drafted[0] > 0


@pytest.mark.parametrize("name", ["eagle3", "eagle"])
def test_states_that_are_not_finite_harm_no_other_row(make_case: Callable[..., Case], name: str) -> None:
    """Of a prompt, and of drafts, whose row is computed again without them."""
    case = make_case(name)
    driver = case.driver
    driver.add(0, PROMPT)
    driver.add(1, [*PROMPT[:4], 96])
    with torch.inference_mode():
        case.runner.model.embedding[96] = torch.inf
    driver.step(prefill={0: 21, 1: 5})
    head = case.model.runner
    assert torch.isfinite(head.pool).all()
    assert torch.isfinite(head.block_states).all()
    driver.remove(1)
    case.plan = lambda tokens, drafts: [96] * len(drafts)
    case.decode(2, [0])
    assert torch.isfinite(head.pool).all()
    case.runner._speculator.histories.of(0).rest = 0
    case.plan, case.num_compared = (lambda tokens, drafts: drafts), 0
    case.decode(2)
    assert case.num_compared > 0


def test_a_device_that_is_late_gives_the_same_drafts(make_case: Callable[..., Case]) -> None:
    """Nothing of a step is read too early, and nothing changed that a copy still reads."""

    def drafts_of(device: Device, known: dict[int, list[int]]) -> tuple[list[list[list[int]]], dict[int, list[int]]]:
        case = make_case(device=device)
        draft, found = type(case.model).draft, []

        def noting(batch: Any, histories: Any, slots: Any, wanted: Any) -> list[list[int]]:
            found.append(draft(case.model, batch, histories, slots, wanted))
            tokens = [histories.of(slot).tokens.size for slot in slots.tolist()]
            return [known.get(slot, [])[n:][:3] for slot, n in zip(slots.tolist(), tokens, strict=True)]

        case.model.draft = noting  # type: ignore[method-assign]
        case.driver.add(0, PROMPT)
        case.driver.add(1, OTHER)
        case.driver.step(prefill={0: 21, 1: 20})
        case.decode(8 if not known else 4, [0, 1])
        return found, {slot: request.tokens for slot, request in case.driver.requests.items()}

    _, known = drafts_of(HostDevice(), {})
    expected, _ = drafts_of(HostDevice(), known)
    assert len(expected) > 2
    assert drafts_of(DelayedDevice(0), known)[0] == expected


# Mistakes that must show ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mistake", ["rejected drafts", "the first token", "the pass before"])
def test_mistakes_are_found(make_case: Callable[..., Case], monkeypatch: pytest.MonkeyPatch, mistake: str) -> None:
    """States of rejected drafts are kept, the first token is attended to, a pass is given what an earlier one was."""
    if mistake == "rejected drafts":
        store = DeviceHeadDrafter._store

        def shifted(self: Any, slots: Any, at: Any, positions: Any, seen: Any, places: Any) -> None:
            store(self, slots, at, positions, seen.roll(1, 0), places)

        monkeypatch.setattr(DeviceHeadDrafter, "_store", shifted)
    elif mistake == "the first token":
        begin = HeadRunner._allocate

        def seeing(self: Any, num_blocks: int) -> None:
            self.model.shape = self.model.shape.__class__(
                **{
                    name: getattr(self.model.shape, name)
                    for name in ("num_heads", "num_kv_heads", "head_dim", "windows")
                }
            )
            begin(self, num_blocks)

        monkeypatch.setattr(HeadRunner, "_allocate", seeing)
    else:
        monkeypatch.setattr(head_drafter.DeviceHead, "keep", lambda self, states, rows, slots: None)
    case = make_case()
    case.plan = partly_right(case.oracle, case.most)
    case.driver.add(0, PROMPT)
    case.leave_behind(3.0)
    case.driver.step(prefill={0: 21})
    with pytest.raises(AssertionError):
        case.decode(9, [0])


# Engines --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["eagle", "eagle3"])
def test_an_engine_gives_the_streams_of_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    """With random weights of the head; preempted, and with steps launched ahead."""
    tree = json.loads((BUNDLED_MODELS["storyteller"] / "config.json").read_text())
    own = {"draft_vocab_size": 1000, "eagle_aux_hidden_state_layer_ids": [1, 2, 3]}
    head = save_eagle(tmp_path, tree) if method == "eagle" else save_eagle3(tmp_path, tree, **own)
    expected = run(5)[0]
    monkeypatch.setattr(WorkerActor, "_load", load)
    drafts = engine_config(method, 3) | {"model": str(head)}
    found, statistics = run(5, speculative_config=drafts, kv_cache_memory_bytes=3_000_000)
    assert found == expected
    assert statistics["speculation"]["num_draft_tokens"] > 30
    assert statistics["num_preemptions"] > 0
