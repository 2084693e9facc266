"""Log-probabilities from logits: against log_softmax and a plain sort; in the runner, whatever is done to the logits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from actorllm.messages.logit_rules import SamplingRules, encode_rules
from actorllm.messages.logprobs import spans_of
from actorllm.model import logprobs
from tests.model.driver import Driver

PROMPT = [5, 17, 33, 2, 90, 41, 8, 8, 60, 11]
VOCAB = 97


@pytest.mark.parametrize("num_top", [0, 1, 5, VOCAB])
@pytest.mark.parametrize("steps", [1000, 4])
def test_gather(num_top: int, steps: int) -> None:
    """steps: how fine the logits are; coarse ones have many ties, as in bfloat16."""
    rng = np.random.default_rng(1)
    logits = torch.from_numpy(np.round(rng.normal(0, 2, (7, VOCAB)) * steps) / steps).float()
    tokens = rng.integers(0, VOCAB, 7).astype(np.int32)
    span = logprobs.gather(logits, tokens, num_top, row=3, position=9)
    reference = torch.log_softmax(logits.double(), 1).numpy()
    assert (span.row, span.position, span.ids.shape) == (3, 9, (7, 1 + num_top))
    for i, token in enumerate(tokens.tolist()):
        assert span.ids[i, 0] == token
        assert span.ranks[i] == (logits[i] >= logits[i, token]).sum()
        np.testing.assert_allclose(span.values[i], reference[i][span.ids[i]], atol=1e-5)
        top = span.ids[i, 1:].tolist()
        assert len(set(top)) == num_top
        assert top == sorted(top, key=lambda t: (-float(logits[i, t]), t)), "in order, equal ones by their id"
        if num_top:
            assert min(span.values[i, 1:]) >= np.delete(reference[i], top).max(initial=-np.inf) - 1e-5


@pytest.mark.parametrize("vocab", [640, 641, 703])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_most_likely_are_found_wherever_they_are(vocab: int, dtype: torch.dtype) -> None:
    """In the last ids that fill no tile, side by side in one, and among ties; in as many chunks as there are rows."""
    logits = torch.randn(40, vocab, generator=torch.Generator().manual_seed(5)).to(dtype)
    logits[0, -3:] += 20
    logits[1, 64:69] += 20
    logits[2] -= 1e4
    logits[3] = 0.0
    logits[4] = -torch.inf
    logits[4, [7, 500]] = 1.0
    tokens = np.arange(40, dtype=np.int32)
    for num_top in (1, 3, 5):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(logprobs, "CHUNK_ELEMENTS", vocab * 7)
            span = logprobs.gather(logits, tokens, num_top)
        whole = logprobs.gather(logits.float(), tokens, num_top)
        np.testing.assert_array_equal(span.ids, whole.ids)
        reference = torch.log_softmax(logits.double(), 1)
        np.testing.assert_allclose(span.values, reference.numpy()[np.arange(40)[:, None], span.ids], atol=1e-5)
        expected = reference.sort(1, descending=True).values[:, :num_top]
        np.testing.assert_allclose(span.values[:, 1:], expected.numpy(), atol=1e-5)
        assert all(len(set(ids)) == num_top for ids in span.ids[:, 1:].tolist())
        values = logits.double().numpy()
        for row, ids in enumerate(span.ids[:, 1:].tolist()):
            assert ids == sorted(ids, key=lambda t: (-values[row, t], t))
        ranks = (logits >= logits.gather(1, torch.arange(40)[:, None])).sum(1)
        assert span.ranks.tolist() == ranks.tolist()


@pytest.fixture
def driver(tiny_llama: Path, make_driver: Callable[..., Driver]) -> Driver:
    return make_driver(tiny_llama, load_format="dummy", max_num_seqs=8, max_num_batched_tokens=64)


def rules_columns(*rows: tuple[int, int, SamplingRules]) -> dict[str, Any]:
    integers, numbers = encode_rules(rows)
    return {"new_rules": integers, "new_rule_numbers": numbers}


def test_they_are_of_the_untouched_logits(driver: Driver) -> None:
    """What changes the choice does not change what is reported; rows that did not ask report nothing."""
    for slot in range(4):
        driver.add(slot, PROMPT[: 4 + slot])
    rules = [
        (0, 1, SamplingRules(num_logprobs=3)),
        (1, 1, SamplingRules(num_logprobs=0, allowed_ids=(44,), presence_penalty=2.0)),
        (3, 1, SamplingRules(num_logprobs=VOCAB, bad_words=((1,),), bias_ids=(3,), biases=(50.0,))),
    ]
    handle_result = driver.step({0: 4, 1: 5, 2: 6, 3: 7}, decode=[], **rules_columns(*rules))
    raw = torch.log_softmax(driver.logits, 1).numpy()
    spans = {span.row: span for span in spans_of(handle_result)}
    assert sorted(spans) == [0, 1, 3]
    assert [spans[row].ids.shape for row in (0, 1, 3)] == [(1, 4), (1, 1), (1, VOCAB + 1)]
    assert handle_result.tokens[1] == 44
    assert handle_result.tokens[3] == 3
    for row, span in spans.items():
        assert span.ids[0, 0] == handle_result.tokens[row]
        np.testing.assert_allclose(span.values[0], raw[row][span.ids[0]], atol=1e-5)
    result = driver.step(decode=[3, 2, 0])
    assert [span.row for span in spans_of(result)] == [2, 0], "the rows of the plan"
    driver.remove(0, 3)
    assert not driver.step(decode=[2]).logprob_spans.size


def drawn(logits: np.ndarray[Any, Any], temperature: float, top_k: int, top_p: float, min_p: float) -> Any:
    """What a token is drawn from, of one row."""
    scaled = logits / (temperature or 1.0)
    order = np.argsort(-scaled, kind="stable")
    mass = np.exp(scaled - scaled.max())
    kept = mass >= min_p
    if top_k:
        kept &= scaled >= scaled[order[top_k - 1]]
    running = np.where(kept, mass, 0.0)[order].cumsum()
    if top_p < 1:
        kept &= scaled >= scaled[order[int(np.argmax(running >= top_p * running[-1]))]]
    return np.where(kept, scaled, -np.inf)


@pytest.mark.parametrize("mode", ["raw_logits", "processed_logprobs", "processed_logits"])
def test_the_other_modes_of_vllm(tiny_llama: Path, make_driver: Callable[..., Driver], mode: str) -> None:
    """Of what tokens are drawn from, and as logits; of prompts as the model gave them in every mode."""
    driver = make_driver(tiny_llama, load_format="dummy", max_num_seqs=8, max_num_batched_tokens=64, logprobs_mode=mode)
    rows: list[tuple[float, int, float, float]] = [
        *((0.0, 0, 1.0, 0.0), (0.7, 0, 1.0, 0.0), (0.7, 5, 1.0, 0.0), (1.3, 0, 0.6, 0.0)),
        *((1.0, 0, 1.0, 0.3), (0.8, 9, 0.7, 0.1)),
    ]
    for slot, (temperature, top_k, top_p, min_p) in enumerate(rows):
        driver.add(slot, PROMPT[slot:], temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=slot)
    rules = SamplingRules(num_logprobs=VOCAB, num_prompt_logprobs=0, bias_ids=(3,), biases=(1.5,))
    wanted = [(slot, 1, rules) for slot in range(len(rows))]
    result = driver.step({slot: len(PROMPT[slot:]) for slot in range(len(rows))}, decode=[], **rules_columns(*wanted))
    spans = {(span.row, span.is_prompt): span for span in spans_of(result)}
    assert driver.logits is not None
    for row, parameters in enumerate(rows):
        shown = driver.logits[row].numpy().astype(np.float64)  # as the model gave them
        if mode.startswith("processed"):
            shown[3] += 1.5
            shown = drawn(shown, *parameters)
        expected = shown if mode.endswith("logits") else shown - np.log(np.exp(shown - shown.max()).sum()) - shown.max()
        span = spans[row, False]
        np.testing.assert_allclose(span.values[0], expected[span.ids[0]], atol=1e-4)
        assert np.isfinite(span.values[0, 0]), "what was chosen can be chosen"
        assert (spans[row, True].values.max() > 0) == (mode.endswith("logits")), "logits are of both signs"


@pytest.mark.parametrize("slice_bytes", [1, 16 << 20])
@pytest.mark.parametrize(("first", "chunks"), [(1, [10]), (1, [3, 1, 6]), (1, [9, 1]), (6, [2, 8]), (10, [10])])
def test_those_of_a_prompt(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, first: int, chunks: list[int], slice_bytes: int
) -> None:
    monkeypatch.setattr("actorllm.model.cpu.runner.PROMPT_LOGITS_BYTES", slice_bytes)
    driver.add(5, PROMPT[:7])
    driver.step({5: 7}, decode=[])
    driver.step(decode=[5])  # others decode meanwhile
    driver.add(2, PROMPT)
    columns = rules_columns((2, first, SamplingRules(num_prompt_logprobs=2)))
    found: dict[int, Any] = {}
    for chunk in chunks:
        result = driver.step({2: chunk}, **columns)
        columns = {}
        for span in spans_of(result):
            assert (span.row, span.is_prompt) == (0, True)
            assert slice_bytes > 1 or span.ranks.size == 1
            found |= {span.position + i: (span.ids[i], span.values[i]) for i in range(span.ranks.size)}
    assert sorted(found) == list(range(first, 10))
    assert not driver.runner.batch.prompt_logprobs
    for position, (ids, values) in found.items():
        driver.add(7, PROMPT[:position])
        driver.step({7: position}, decode=[])
        expected = torch.log_softmax(driver.logits, 1)[0].numpy()
        driver.remove(7)
        assert ids[0] == PROMPT[position]
        assert ids[1:].tolist() == np.argsort(-expected)[:2].tolist()
        np.testing.assert_allclose(values, expected[ids], atol=1e-4)


@pytest.mark.parametrize("num_rows", [1, 4, 7, 100])
def test_those_of_several_prompts_of_a_step(driver: Driver, monkeypatch: pytest.MonkeyPatch, num_rows: int) -> None:
    """However many of their tokens are worked off at once, with one prompt among them that did not ask."""
    monkeypatch.setattr("actorllm.model.cpu.runner.PROMPT_LOGITS_BYTES", num_rows * (4 * VOCAB + 48))
    prompts = {0: PROMPT, 1: PROMPT[3:], 2: PROMPT[:1], 3: PROMPT[::-1], 4: PROMPT[2:8]}
    for slot, prompt in prompts.items():
        driver.add(slot, prompt)
    wanted = {0: 2, 2: 2, 3: 1, 4: 2}
    columns = rules_columns(*((slot, 1, SamplingRules(num_prompt_logprobs=n)) for slot, n in wanted.items()))
    spans = spans_of(driver.step({slot: len(prompt) for slot, prompt in prompts.items()}, decode=[], **columns))
    found = {(s.row, s.position + i): (s.ids[i], s.values[i]) for s in spans for i in range(s.ranks.size)}
    assert sorted(found) == [(slot, i) for slot in wanted for i in range(1, len(prompts[slot]))]
    for (slot, position), (ids, values) in found.items():
        driver.add(7, prompts[slot][:position])
        driver.step({7: position}, decode=[])
        expected = torch.log_softmax(driver.logits, 1)[0].numpy()
        driver.remove(7)
        assert ids[0] == prompts[slot][position]
        assert ids[1:].tolist() == np.argsort(-expected)[: wanted[slot]].tolist()
        np.testing.assert_allclose(values, expected[ids], atol=1e-4)


def test_output_tokens_of_a_resumed_request_are_not_its_prompt(driver: Driver) -> None:
    driver.add(0, PROMPT, num_outputs=4)
    result = driver.step({0: 10}, decode=[], **rules_columns((0, 1, SamplingRules(num_prompt_logprobs=0))))
    assert [(span.position, span.ranks.size) for span in spans_of(result)] == [(1, 5)]


def test_rules_of_a_slot_that_is_not_new_are_refused(driver: Driver) -> None:
    driver.add(0, PROMPT)
    with pytest.raises(ValueError, match="rules for slot 4, which is not new"):
        driver.step({0: 10}, decode=[], **rules_columns((4, 1, SamplingRules(num_logprobs=0))))
