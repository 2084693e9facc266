"""Drafts on a device: bit for bit the tokens of single steps there, and those of the CPU (float32); planted mistakes are found."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from actorllm.actors.worker import WorkerActor
from actorllm.config import BUNDLED_MODELS
from actorllm.messages import LateInputs, StepPlan, StepResult
from actorllm.messages.logprobs import spans_of
from actorllm.model.cuda import drafts as cuda_drafts
from actorllm.model.cuda import ops
from actorllm.model.cuda import runner as cuda_runner
from actorllm.model.cuda.device import Device, HostDevice
from actorllm.model.cuda.runner import CudaRunner
from actorllm.model.cuda.state import StateTable
from actorllm.types.drafter import Drafter
from tests.api.knowing_drafter import STREAMS
from tests.model.cuda.conftest import config_of
from tests.model.cuda.delayed_device import DelayedDevice
from tests.model.cuda.drafting_engine import PROMPT, config, load, run
from tests.model.cuda.host_engine import CountingRunner
from tests.model.cuda.rules import rules_of
from tests.model.cuda.twins import TINY, DeviceDriver
from tests.model.driver import int32

pytestmark = pytest.mark.timeout(120)

PROMPTS = {0: list(range(5, 12)), 1: [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5], 3: [80] * 61}
SAMPLING: dict[int, dict[str, Any]] = {
    0: {"temperature": 0.9, "seed": 5},
    1: {},
    3: {"temperature": 1.1, "seed": 7, "top_k": 30},
}
RULES: dict[int, dict[str, Any]] = {
    0: {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.2, "num_logprobs": 2},
    1: {"bad_words": ((8,), (5, 6)), "bias_ids": (7,), "biases": (2.0,)},
    3: {"allowed_ids": tuple(range(0, 300, 3)), "num_logprobs": 1},
}
VOCABULARY = TINY["vocab_size"]
WORDS = -(-VOCABULARY // 32)


class Scripted(Drafter):
    """Drafts what the test says, by the tokens so far."""

    script: ClassVar[Callable[[list[int], int], Sequence[int]]]

    def draft(self, tokens: Any, most: int) -> Sequence[int]:
        return type(self).script(tokens.tolist(), most)


@pytest.fixture
def build(folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> Callable[..., DeviceDriver]:
    """On an emulated device; with a drafter where there is a script."""

    def build(
        script: Callable[[list[int], int], Sequence[int]] | None = None,
        device: Device | None = None,
        differences: dict[str, Any] | None = None,
        **arguments: Any,
    ) -> DeviceDriver:
        if script is not None:
            monkeypatch.setattr(f"{__name__}.Scripted.script", script, raising=False)
            method = "tests.model.cuda.test_drafts:Scripted"
            arguments["speculative_config"] = {"method": method, "num_speculative_tokens": 7}
        config = config_of(folder(**(differences or {})), block_size=64, **({"max_num_seqs": 8} | arguments))
        device = HostDevice() if device is None else device
        runner = CudaRunner(config, show_progress=False, device=device)
        runner.load()
        runner.allocate(24)
        if isinstance(device, DelayedDevice):
            device.is_late = True
        return DeviceDriver(runner, num_blocks=24)  # type: ignore[arg-type]

    return build


def streams(
    driver: DeviceDriver, num_tokens: int, most: int = 0, *, rules: bool = False, late: bool = False
) -> dict[int, list[int]]:
    """So many tokens of each row. With drafts rows get ahead of each other."""
    more: dict[str, Any] = {"max_drafts": most} if most else {}
    for slot, tokens in PROMPTS.items():
        driver.add(slot, tokens, **SAMPLING[slot])
        chunk = rules_of(slot, **RULES[slot]) if rules else {}
        driver.step({slot: len(tokens)}, decode=[s for s in PROMPTS if s < slot], **more, **chunk)
    decode: list[int] | None = list(PROMPTS)
    while any(len(driver.requests[slot].tokens) - len(PROMPTS[slot]) < num_tokens for slot in PROMPTS):
        masks = {"late_slots": int32([1]), "late": lambda step: parity_masks(driver, step)} if late else {}
        driver.step(decode=decode, **more, **masks)
        decode = None
    return {slot: driver.requests[slot].tokens[len(PROMPTS[slot]) :][:num_tokens] for slot in PROMPTS}


def parity_masks(driver: DeviceDriver, step: int, num_masks: int = 4) -> LateInputs:
    """As of a grammar: slot 1 chooses odd and even ids in turn."""
    known = len(driver.requests[1].tokens)
    ids = np.arange(WORDS * 32)
    masks = [np.packbits(ids % 2 == (known + i) % 2, bitorder="little").view(np.uint32) for i in range(num_masks)]
    columns: dict[str, Any] = {"counts": int32([num_masks]), "forced_counts": int32([0])}
    return LateInputs(step=step, slots=int32([1]), allowed=np.concatenate(masks), **columns)


def knowing(expected: dict[int, list[int]], right: Callable[[int], int]) -> Callable[[list[int], int], Sequence[int]]:
    """Of a known stream as many right drafts as `right` says of its length, then wrong ones."""

    def script(tokens: list[int], most: int) -> Sequence[int]:
        for slot, prompt in PROMPTS.items():
            if tokens[: len(prompt)] == prompt and slot in expected:
                drafts = expected[slot][len(tokens) - len(prompt) :][:most]
                return [t if i < right(len(tokens)) else (t + 1) % VOCABULARY for i, t in enumerate(drafts)]
        return ()

    return script


def cut(expected: dict[int, list[int]], number: int) -> dict[int, list[int]]:
    return {slot: stream[:number] for slot, stream in expected.items()}


@pytest.mark.parametrize(("most", "enforce_eager"), [(1, False), (3, True), (7, False)])
def test_tokens_are_those_of_single_steps(build: Callable[..., DeviceDriver], most: int, enforce_eager: bool) -> None:
    """Greedy, seeded and filtered, beside prompts and alone, over the border of a block."""
    expected = streams(build(), 40)
    driver = build(knowing(expected, lambda length: length % (most + 1)), enforce_eager=enforce_eager)
    if not enforce_eager:
        while driver.runner.record_next():  # type: ignore[attr-defined]
            pass
    assert streams(driver, 32, most) == cut(expected, 32)
    assert driver.num_steps < 32
    graphs = driver.runner.statistics()
    assert (graphs["num_graph_replays"] > 0) == (not enforce_eager)


def test_modules_of_transformers_check_drafts_alike(build: Callable[..., DeviceDriver]) -> None:
    differences = {"model_type": "qwen3"}
    expected = streams(build(differences=differences, model_impl="transformers"), 16)
    script = knowing(expected, lambda length: length % 4)
    assert streams(build(script, differences=differences, model_impl="transformers"), 12, 3) == cut(expected, 12)


def test_a_step_with_drafts_is_the_graph_of_its_rows_and_drafts(build: Callable[..., DeviceDriver]) -> None:
    expected = streams(build(), 30)
    driver = build(knowing(expected, lambda length: 9))
    runner: Any = driver.runner
    while runner.record_next():
        pass
    streams(driver, 1)
    launched, ran = runner.graphs.num_launched, []
    run = runner.graphs.run
    runner.graphs.run = lambda part, size: (ran.append(size), run(part, size))
    result = driver.step(decode=[1, 0], max_drafts=4)
    assert result.num_drafted.tolist() == [4, 4]
    assert result.counts.tolist() == [5, 5]
    assert ran == [16], "ten rows, filled up to the next size"
    assert runner.graphs.num_launched == launched


@pytest.mark.parametrize("late", [False, True], ids=["rules", "rules and masks"])
def test_rules_see_each_draft_in_its_turn(build: Callable[..., DeviceDriver], late: bool) -> None:
    """Penalties, bad words of two tokens, biases, allowed ids, masks of a grammar; what is told of log-probabilities."""

    def told(driver: DeviceDriver, most: int) -> tuple[dict[int, list[int]], dict[int, list[Any]]]:
        found: dict[int, list[Any]] = {slot: [] for slot in PROMPTS}
        step = driver.step

        def telling(*args: Any, **more: Any) -> StepResult:
            result = step(*args, **more)
            for span in spans_of(result):
                ids, values = span.ids.tolist(), np.round(span.values, 3).tolist()
                found[driver.rows[span.row]] += zip(ids, values, span.ranks.tolist(), strict=True)
            return result

        driver.step = telling  # type: ignore[method-assign]
        return streams(driver, 32, most, rules=True, late=late), found

    expected, probabilities = told(build(), 0)
    driver = build(knowing(expected, lambda length: length % 4))
    driver.runner.tell_drafts = lambda drafted: None
    found, drafted_probabilities = told(driver, 3)
    assert cut(found, 25) == cut(expected, 25)
    assert driver.num_steps < 30
    for slot in (0, 3):
        assert drafted_probabilities[slot][:25] == probabilities[slot][:25]
        assert len(probabilities[slot]) >= 25


def test_a_row_with_masks_goes_as_far_as_these(build: Callable[..., DeviceDriver]) -> None:
    expected = streams(build(), 12, late=True)
    driver = build(knowing(expected, lambda length: 9))
    told = []
    driver.runner.tell_drafts = told.append
    streams(driver, 1)
    masks: dict[str, Any] = {"late_slots": int32([1]), "late": lambda step: parity_masks(driver, step, 2)}
    result = driver.step(decode=[1], max_drafts=5, **masks)
    assert result.num_drafted.tolist() == [5]
    assert result.counts.tolist() == [2]
    (drafted,) = told
    assert (drafted.slots.tolist(), drafted.counts.tolist()) == ([1], [5])


def test_a_device_that_is_late_gives_the_same_tokens(build: Callable[..., DeviceDriver]) -> None:
    """Nothing of a step with drafts is read too early, and nothing changed that a copy still reads."""
    expected = streams(build(), 24, rules=True)
    for seed in range(2):
        driver = build(knowing(expected, lambda length: length % 4), device=DelayedDevice(seed))
        assert cut(streams(driver, 20, 3, rules=True), 20) == cut(expected, 20)


@pytest.mark.parametrize("has_rules", [False, True])
def test_drafts_without_finite_states_harm_no_one(build: Callable[..., DeviceDriver], has_rules: bool) -> None:
    """A row multiplies by 0 what a draft has stored behind it; that must not make its own states NaN."""
    expected = streams(build(), 24, rules=has_rules)
    used = {token for tokens in (*expected.values(), *PROMPTS.values()) for token in tokens}
    poison = max(set(range(VOCABULARY)) - used)
    driver = build(lambda tokens, most: [poison] * most)
    with torch.inference_mode():
        driver.runner.model.embedding[poison] = torch.inf  # type: ignore[union-attr]
    assert streams(driver, 24, 3, rules=has_rules) == expected
    assert torch.isfinite(driver.runner.pool).all()  # type: ignore[attr-defined]


def test_more_rows_than_there_are_slots_for_drafts_have_fewer(
    build: Callable[..., DeviceDriver], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_drafts, "MAX_DRAFT_SLOTS", 7)
    expected = streams(build(), 20)
    driver = build(knowing(expected, lambda length: 9))
    streams(driver, 1)
    assert driver.step(decode=[0, 1, 3], max_drafts=7).num_drafted.tolist() == [2, 2, 2]
    assert driver.step(decode=[0], max_drafts=7).num_drafted.tolist() == [7]


# Planted mistakes -----------------------------------------------------------------------------------------------------


def drafting(build: Callable[..., DeviceDriver], expected: dict[int, list[int]], **more: Any) -> bool:
    """Whether a run with drafts gives the expected tokens."""
    driver = build(knowing(expected, lambda length: length % 4))
    driver.runner.tell_drafts = lambda drafted: None
    return cut(streams(driver, 20, 3, **more), 20) == cut(expected, 20)


def test_a_counter_off_by_one_at_drafts_is_found(
    build: Callable[..., DeviceDriver], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = streams(build(), 24)
    add = StateTable.add_drafts

    def shifted(self: StateTable, batch: Any, *rest: Any) -> None:
        batch.columns.num_outputs += 1
        add(self, batch, *rest)
        batch.columns.num_outputs -= 1

    monkeypatch.setattr(StateTable, "add_drafts", shifted)
    assert not drafting(build, expected)


def test_keys_of_a_wrong_draft_that_are_kept_are_found(
    build: Callable[..., DeviceDriver], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next step begins behind the draft, as if that had been right."""
    expected = streams(build(), 24)
    settle = StateTable.settle

    def keeping(self: StateTable, batch: Any, slots: Any, tokens: Any) -> None:
        batch.columns.num_computed[slots] += 1
        settle(self, batch, slots, tokens)
        batch.columns.num_computed[slots] -= 1

    monkeypatch.setattr(StateTable, "settle", keeping)
    assert not drafting(build, expected)


def test_a_mask_of_another_position_is_found(
    build: Callable[..., DeviceDriver], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = streams(build(), 24, late=True)
    assert drafting(build, expected, late=True)
    masks_behind = cuda_drafts.masks_behind
    monkeypatch.setattr(
        cuda_drafts, "masks_behind", lambda late, number, size: masks_behind(late, max(0, number - 1), size)
    )
    assert not drafting(build, expected, late=True)


def test_rules_that_do_not_see_drafts_are_found(
    build: Callable[..., DeviceDriver], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = streams(build(), 24, rules=True)
    assert drafting(build, expected, rules=True)
    monkeypatch.setattr(cuda_drafts.LogitRules, "trial", lambda self: _Forgetting(self))
    assert not drafting(build, expected, rules=True)


class _Forgetting:
    """Rules that store nothing."""

    def __init__(self, rules: Any) -> None:
        self.edits, self.masks, self.store = rules.edits, rules.masks, lambda slots, tokens: None


def test_a_draft_that_is_taken_unseen_is_found(
    build: Callable[..., DeviceDriver], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = streams(build(), 24)

    def believing(rows: Any, drafts: Any, *rest: Any) -> Any:
        return np.ones(len(rows.firsts), np.int32) + np.pad(drafts.counts, (0, len(rows.firsts) - len(drafts.counts)))

    monkeypatch.setattr(cuda_runner, "right_runs", believing)
    assert not drafting(build, expected)


# Engines --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def reference() -> list[Any]:
    """On the CPU, without drafts."""
    return run()[0]


@pytest.mark.parametrize(
    ("method", "most", "arguments"),
    [
        ("ngram", 3, {}),
        ("suffix", 7, {"async_scheduling": False}),
        ("tests.api.knowing_drafter:KnowingDrafter", 5, {"kv_cache_memory_bytes": 9 * 64 * 4096}),
    ],
    ids=["ngram", "suffix", "knowing, preempted"],
)
def test_an_engine_gives_the_streams_of_the_cpu(
    reference: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    method: str,
    most: int,
    arguments: dict[str, Any],
) -> None:
    """Whatever a request asks for: grammars, penalties, stop strings, several sequences; preempted, and with steps ahead."""
    tokens = AutoTokenizer.from_pretrained(BUNDLED_MODELS["storyteller"]).encode(PROMPT)
    (tmp_path / "streams.json").write_text(json.dumps([[tokens, told[0]] for told in reference]))
    monkeypatch.setenv(STREAMS, str(tmp_path / "streams.json"))
    monkeypatch.setattr(WorkerActor, "_load", load)
    found, statistics = run(speculative_config=config(method, most), **arguments)
    assert found == reference
    assert statistics["speculation"]["num_accepted_tokens"] > 30
    assert (statistics["num_preemptions"] > 0) == ("kv_cache_memory_bytes" in arguments)


def test_steps_are_launched_ahead_where_no_row_may_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    """While rows rest, and in batches for which there are no drafts; a step with drafts is finished first."""
    monkeypatch.setattr(WorkerActor, "_load", load)
    execute, under_way = CountingRunner.execute, []

    def executing(self: CountingRunner, plan: StepPlan) -> Any:
        under_way.append((self.num_under_way, self._newest is not None and self._newest.sampled is not None))
        handle = execute(self, plan)
        if handle.sampled is not None:
            assert under_way[-1][0] == 0
        return handle

    monkeypatch.setattr(CountingRunner, "execute", executing)
    _, statistics = run(2, speculative_config=config("ngram", 3))
    assert statistics["speculation"]["num_draft_tokens"] > 10
    assert not any(has_drafts for _, has_drafts in under_way)
    assert max(number for number, _ in under_way) == 1


def test_no_row_reads_keys_that_another_one_of_its_launch_stores(
    build: Callable[..., DeviceDriver], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafts are rows of one sequence. Programs of one launch run in any order on a device, which the emulation does not show."""
    stores: list[bool] = []
    attend = ops.attn_decode

    def watched(*arguments: Any, rope: Any = None, **more: Any) -> None:
        stores.append(rope is not None)
        attend(*arguments, rope=rope, **more)

    monkeypatch.setattr(ops, "attn_decode", watched)
    streams(build(enforce_eager=True), 4)
    assert any(stores), "without drafts, attention stores by itself"
    stores.clear()
    streams(build(lambda tokens, most: [1] * most, enforce_eager=True), 4, 3)
    assert stores
    assert not any(stores)
