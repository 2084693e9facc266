"""Drafts in a worker's step: bit for bit the tokens of single steps, within blocks and positions, and harmless if not finite."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from actorllm.errors import UnsupportedModelError
from actorllm.types.drafter import Drafter
from tests.effort import examples
from tests.model.driver import Driver
from tests.model.hf.releases import needs_modules

PROMPTS = {0: list(range(5, 12)), 1: [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5], 2: [80]}
SAMPLING: dict[int, dict[str, Any]] = {
    0: {"temperature": 0.9, "seed": 5},
    1: {},
    2: {"temperature": 1.1, "seed": 7, "top_k": 30},
}


class Scripted(Drafter):
    """Drafts what the test says, by the tokens so far."""

    script: ClassVar[Callable[[list[int], int], Sequence[int]]]

    def draft(self, tokens: Any, most: int) -> Sequence[int]:
        return type(self).script(tokens.tolist(), most)


def config(most: int) -> dict[str, Any]:
    return {"method": "tests.model.cpu.test_drafts:Scripted", "num_speculative_tokens": most}


@pytest.fixture
def build(
    make_driver: Callable[..., Driver], tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Driver]:
    def build(script: Callable[[list[int], int], Sequence[int]] | None = None, **arguments: Any) -> Driver:
        if script is not None:
            monkeypatch.setattr(f"{__name__}.Scripted.script", script, raising=False)
            arguments["speculative_config"] = config(7)
        given = {"load_format": "dummy", "block_size": 16, "max_model_len": 64}
        return make_driver(tiny_llama, **(given | arguments))

    return build


def streams(driver: Driver, num_tokens: int, most: int = 0, slots: Sequence[int] = (0, 1, 2)) -> dict[int, list[int]]:
    """So many tokens of each row. With drafts rows get ahead of each other."""
    for slot in slots:
        driver.add(slot, PROMPTS[slot], **SAMPLING[slot])
    driver.step(prefill={slot: len(PROMPTS[slot]) for slot in slots})
    more = {"max_drafts": most} if most else {}

    def left() -> list[int]:
        return [slot for slot in slots if len(driver.requests[slot].tokens) - len(PROMPTS[slot]) < num_tokens]

    while decode := left():
        driver.step(decode=decode, **more)
    return {slot: driver.requests[slot].tokens[len(PROMPTS[slot]) :][:num_tokens] for slot in slots}


def knowing(expected: dict[int, list[int]], right: Callable[[int], int]) -> Callable[[list[int], int], Sequence[int]]:
    """Of a known stream as many right drafts as `right` says of its length, then wrong ones."""

    def script(tokens: list[int], most: int) -> Sequence[int]:
        for slot, prompt in PROMPTS.items():
            if tokens[: len(prompt)] == prompt and slot in expected:
                drafts = expected[slot][len(tokens) - len(prompt) :][:most]
                return [t if i < right(len(tokens)) else (t + 1) % 97 for i, t in enumerate(drafts)]
        return ()

    return script


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("most", [1, 3, 7])
def test_tokens_are_those_of_single_steps(build: Callable[..., Driver], dtype: str, most: int) -> None:
    expected = streams(build(dtype=dtype), 40)
    driver = build(knowing(expected, lambda length: length % (most + 1)), dtype=dtype)
    assert streams(driver, 36, most) == {slot: stream[:36] for slot, stream in expected.items()}
    assert driver.num_steps < 36


def test_any_drafts_give_the_tokens_of_single_steps(build: Callable[..., Driver]) -> None:
    """Of any length, in any steps, right or wrong, for some of the rows."""
    expected = streams(build(), 40)
    driver = build(lambda tokens, most: ())

    @settings(max_examples=examples(15, 100), deadline=None)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        right = data.draw(st.lists(st.integers(0, 7), min_size=8, max_size=8))
        wrong = data.draw(st.lists(st.integers(0, 96), min_size=8, max_size=8))

        def script(tokens: list[int], most: int) -> Sequence[int]:
            known = knowing(expected, lambda length: most)(tokens, most)
            return [*known[: right[len(tokens) % 8]], *wrong[: len(tokens) % 3]]

        Scripted.script = script
        driver.runner.allocate(driver.num_blocks)
        fresh = Driver(driver.runner)
        most = data.draw(st.integers(1, 7))
        assert streams(fresh, 30, most) == {slot: stream[:30] for slot, stream in expected.items()}

    check()


def test_logits_at_drafts_are_bit_for_bit_those_of_single_steps(build: Callable[..., Driver]) -> None:
    """In bfloat16, where the batch would show in the last bits first."""
    plain = build(dtype="bfloat16")
    expected = streams(plain, 12, slots=[1])
    singles = []
    again = build(dtype="bfloat16")
    again.add(1, PROMPTS[1])
    again.step(prefill={1: len(PROMPTS[1])})
    for number in range(4):
        again.step(decode=[1] if number == 0 else None)
        assert again.logits is not None
        singles.append(again.logits[0])
    driver = build(knowing(expected, lambda length: 3), dtype="bfloat16")
    driver.add(1, PROMPTS[1])
    driver.step(prefill={1: len(PROMPTS[1])})
    handle = driver.runner.execute(driver.plan({}, [1], max_drafts=3))
    assert handle.logits is not None
    assert handle.draft_logits is not None
    together = torch.cat((handle.logits, handle.draft_logits))
    assert torch.equal(together, torch.stack(singles))


@pytest.mark.parametrize("max_model_len", [32, 33, 40])
def test_drafts_end_with_the_positions_of_the_model(build: Callable[..., Driver], max_model_len: int) -> None:
    expected = streams(build(max_model_len=64), 60 - len(PROMPTS[0]), slots=[0])
    driver = build(knowing(expected, lambda length: 99), max_model_len=max_model_len, async_scheduling=False)
    driver.add(0, PROMPTS[0], **SAMPLING[0])
    driver.step(prefill={0: len(PROMPTS[0])})
    decode: list[int] | None = [0]
    while len(driver.requests[0].tokens) < max_model_len:
        driver.step(decode=decode, max_drafts=7)
        decode = None
    assert len(driver.requests[0].tokens) == max_model_len
    assert driver.requests[0].tokens[len(PROMPTS[0]) :] == expected[0][: max_model_len - len(PROMPTS[0])]


def test_drafts_without_finite_states_harm_no_one(build: Callable[..., Driver]) -> None:
    """A row multiplies by 0 what a draft has stored behind it; that must not make its own states NaN."""
    expected = streams(build(), 30)
    used = {token for tokens in (*expected.values(), *PROMPTS.values()) for token in tokens}
    poison = max(set(range(97)) - used)  # rows of the padding have token 0
    driver = build(lambda tokens, most: [poison] * most)
    with torch.inference_mode():
        driver.runner.decoder.embedding[poison] = torch.inf  # type: ignore[attr-defined]
    assert streams(driver, 30, most=3) == expected
    assert torch.isfinite(driver.runner.cache.pool).all()


def test_a_result_says_how_many_drafts_there_were(build: Callable[..., Driver]) -> None:
    expected = streams(build(), 30)
    driver = build(knowing(expected, lambda length: 2))
    streams(driver, 1)
    result = driver.step(decode=[1, 0, 2], max_drafts=3)
    assert result.num_drafted.tolist() == [3, 3, 3]
    assert result.counts.tolist() == [3, 3, 3]
    assert driver.step().num_drafted.size == 0, "a plan without drafts has none"


def test_rows_that_wait_for_a_mask_draft_nothing(build: Callable[..., Driver]) -> None:
    from actorllm.messages import LateInputs

    expected = streams(build(), 30)
    driver = build(knowing(expected, lambda length: 3))
    streams(driver, 1)
    late = np.array([0], np.int32)
    result = driver.step(decode=[0, 1, 2], max_drafts=3, late_slots=late, late=lambda step: LateInputs(step=step))
    assert result.num_drafted.tolist() == [0, 3, 3]


@needs_modules
def test_a_model_that_runs_through_transformers_checks_drafts_alike(
    tmp_path: Path, make_driver: Callable[..., Driver], make_runner: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import GPT2Config

    GPT2Config(
        n_layer=2, n_head=2, n_embd=32, vocab_size=97, n_positions=64, architectures=["GPT2LMHeadModel"]
    ).save_pretrained(tmp_path)
    given = {"load_format": "dummy", "block_size": 16, "max_model_len": 64}
    expected = streams(make_driver(tmp_path, **given), 40)
    script = knowing(expected, lambda length: length % 4)
    monkeypatch.setattr(f"{__name__}.Scripted.script", script, raising=False)
    driver = make_driver(tmp_path, speculative_config=config(3), **given)
    assert streams(driver, 36, 3) == {slot: stream[:36] for slot, stream in expected.items()}
    assert driver.num_steps < 36
    drafts = {"method": "draft_model", "model": str(tmp_path), "num_speculative_tokens": 2}
    with pytest.raises(UnsupportedModelError, match=r"method='draft_model'\) is not supported for GPT2LMHeadModel yet"):
        make_runner(tmp_path, speculative_config=drafts, **given)
