"""Heads that draft compute what plain torch does, whatever the steps that they are computed in (float32)."""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from actorllm.errors import CorruptModelError, ModelError, UnsupportedModelError
from actorllm.model.cpu.decoder import Decoder
from actorllm.model.cpu.draft_heads import drafter
from actorllm.model.cpu.draft_heads.drafter import HeadDrafter
from actorllm.model.cpu.draft_heads.ends import ends_of
from actorllm.model.parallel import Ranks
from actorllm.types.weight_version import WeightSource
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
from tests.model.driver import Driver
from tests.model.hf.decoders import MODELS


class Case:
    """A driver whose worker drafts by a head, what it drafted, and the oracle."""

    def __init__(self, driver: Driver, oracle: Oracle, most: int) -> None:
        self.driver, self.oracle, self.most = driver, oracle, most
        model = driver.runner._draft_model
        assert isinstance(model, HeadDrafter)
        self.model = model
        self.logits: list[torch.Tensor] = []
        self.plan: Callable[[list[int], list[int]], list[int]] = lambda tokens, drafts: drafts
        """What is checked in the place of the drafts, of the tokens so far and the drafts."""
        self.num_compared = 0
        draft = model.draft

        def comparing(batch: Any, histories: Any, slots: Any, wanted: Any) -> list[list[int]]:
            self.logits.clear()
            found = draft(batch, histories, slots, wanted)
            for row, slot in enumerate(slots.tolist()):
                tokens = driver.requests[slot].tokens
                expected, drafts = self.oracle.logits(tokens, len(found[row]))
                for position, wanted_logits in enumerate(expected):
                    at = sum(len(found[other]) > position for other in range(row))
                    torch.testing.assert_close(self.logits[position][at], wanted_logits, atol=2e-4, rtol=1e-4)
                assert found[row] == drafts
                self.num_compared += len(drafts)
                found[row] = self.plan(tokens, drafts)
            return found

        model.draft = comparing  # type: ignore[method-assign]
        self.watch(oracle)

    def watch(self, oracle: Oracle) -> None:
        """The head that the worker has now is compared with this one."""
        self.oracle, head = oracle, self.model._head
        logits = head.logits

        def noting(states: torch.Tensor) -> torch.Tensor:
            found = logits(states)
            self.logits.append(found.clone())
            return found

        head.logits = noting  # type: ignore[method-assign]

    def decode(self, num_steps: int, slots: list[int] | None = None) -> None:
        for number in range(num_steps):
            self.driver.step(decode=slots if number == 0 else None, max_drafts=self.most)


@pytest.fixture
def make_case(tmp_path: Path, make_driver: Callable[..., Driver]) -> Callable[..., Case]:
    def make(name: str = "eagle3", most: int = 3, **arguments: Any) -> Case:
        method, own = HEADS[name]
        (tmp_path / "target").mkdir()
        if family := own.get("architecture"):
            target, layer = save_deepseek(tmp_path / "target", MODELS[family][1])
            own = {"layer": layer}
        else:
            target = save_target(tmp_path / "target", method)
        tree = json.loads((tmp_path / "target" / "config.json").read_text())
        folder = tmp_path / "target"
        drafts: dict[str, Any] = {
            "method": method,
            "num_speculative_tokens": most,
            "num_speculative_tokens_per_batch_size": [[1, 3, most]],
            "draft_sample_method": "greedy",
        }
        if method != "mtp":
            save = save_eagle if method == "eagle" else save_eagle3
            folder = save(tmp_path / "head", SHAPE if method == "eagle3" else tree | SHAPE, **own)
            drafts["model"] = str(folder)
        given = {"block_size": 8, "max_model_len": 96, "async_scheduling": False, "enforce_eager": True}
        driver = make_driver(tmp_path / "target", speculative_config=drafts, **(given | arguments))
        driver.runner._speculator.histories._most = most  # type: ignore[union-attr]
        return Case(driver, Oracle.of(method, folder, target, **own), most)

    return make


@pytest.mark.parametrize("name", HEADS)
def test_logits_are_those_of_plain_torch(make_case: Callable[..., Case], name: str) -> None:
    """Of several rows, in steps that have some of their drafts right, none, or all; over the ends of blocks."""
    case = make_case(name)
    case.plan = partly_right(case.oracle, case.most)
    case.driver.add(0, PROMPT)
    case.driver.add(1, [80])
    case.driver.add(2, OTHER)
    case.driver.step(prefill={0: 21, 1: 1, 2: 20})
    before = [len(case.driver.requests[slot].tokens) for slot in range(3)]
    case.decode(9, [0, 1, 2])
    assert case.num_compared > 20
    assert all(len(case.driver.requests[slot].tokens) > n + 11 for slot, n in enumerate(before)), (
        "several tokens a step"
    )


@pytest.mark.parametrize("name", ["fp8-channel", "packed-8"])
def test_a_quantized_head_is_computed_as_such(
    tmp_path: Path, make_driver: Callable[..., Driver], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Its logits are those of the weights in plain numbers, up to what products of 8 bits round."""
    for size, value in {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}.items():
        monkeypatch.setitem(SHAPE, size, value)
    (tmp_path / "target").mkdir()
    target = save_target(tmp_path / "target", "eagle3")
    folder = save_eagle3(tmp_path / "head", SHAPE)
    exact = quantize(folder, name)
    drafts = {"method": "eagle3", "model": str(folder), "num_speculative_tokens": 2}
    driver = make_driver(tmp_path / "target", speculative_config=drafts, block_size=8, max_model_len=96)
    model = driver.runner._draft_model
    assert isinstance(model, HeadDrafter)
    oracle = Oracle("eagle3", Oracle.of("eagle3", folder, target).tree, exact, target, {})
    logits: list[torch.Tensor] = []
    head, compute = model._head, model._head.logits
    head.logits = lambda states: logits.append(compute(states).clone()) or logits[-1]  # type: ignore[method-assign,func-returns-value]
    driver.add(0, PROMPT)
    driver.step(prefill={0: 21})
    tokens = list(driver.requests[0].tokens)
    driver.step(decode=[0], max_drafts=2)
    (expected, *_), _ = oracle.logits(tokens, 1)
    found, is_there = logits[0][0], torch.isfinite(expected)
    off = (found - expected)[is_there]
    assert off.square().mean().sqrt() < 0.05 * expected[is_there].std()


def test_a_prompt_in_chunks_and_a_fork_of_it(make_case: Callable[..., Case]) -> None:
    case = make_case()
    driver = case.driver
    driver.add(0, PROMPT)
    driver.step(prefill={0: 1})
    driver.step(prefill={0: 7})
    driver.step(prefill={0: 5})
    copy = driver.fork(1, 0)
    assert copy is not None
    driver.step(prefill={0: 8})
    with torch.inference_mode():
        driver.runner._copy(*(np.array([block], np.int32) for block in copy))
    case.decode(6, [0, 1])
    assert case.num_compared >= 8


@pytest.mark.parametrize("name", ["eagle3", "mtp", "mtp of DeepSeek"])
@pytest.mark.parametrize("num_cached", [8, 16])
def test_a_prefix_in_the_cache_has_all_that_a_head_needs(
    make_case: Callable[..., Case], name: str, num_cached: int
) -> None:
    """The next token behind the prefix is another one than that of the request which has computed it."""
    case = make_case(name)
    driver = case.driver
    driver.add(0, PROMPT)
    driver.step(prefill={0: len(PROMPT)})
    tokens = [*PROMPT[:num_cached], 77, 78, 79]
    driver.add(1, tokens, num_computed=num_cached)
    shared = num_cached // 8
    driver.requests[1].blocks[:shared] = driver.requests[0].blocks[:shared]
    driver.step(prefill={1: 3}, decode=[])
    case.decode(4, [1])
    assert case.num_compared >= 4


def test_a_prefix_whose_last_block_was_filled_by_decoding(make_case: Callable[..., Case]) -> None:
    case = make_case()
    case.plan = partly_right(case.oracle, case.most)
    driver = case.driver
    driver.add(0, PROMPT[:5])
    driver.step(prefill={0: 5})
    case.decode(9, [0])
    known = driver.requests[0].tokens
    assert len(known) > 17
    driver.add(1, [*known[:16], 77, 78], num_computed=16)
    driver.requests[1].blocks[:2] = driver.requests[0].blocks[:2]
    driver.step(prefill={1: 2}, decode=[])
    case.num_compared = 0
    case.decode(3, [1])
    assert case.num_compared > 3


def test_a_row_that_rests_is_brought_forward(make_case: Callable[..., Case], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its states have room for a few tokens only."""
    monkeypatch.setattr(drafter, "WAITING_TOKENS", 3)
    case = make_case()
    driver = case.driver
    driver.add(0, PROMPT)
    driver.add(1, OTHER)
    driver.step(prefill={0: 21, 1: 20})
    driver.step(decode=[0, 1])
    for _ in range(17):
        driver.step()
    assert case.num_compared == 0
    assert (case.model._waiting[:2] > 0).all()
    for slot in (0, 1):
        driver.runner._speculator.histories.of(slot).rest = 0  # type: ignore[union-attr]
    case.decode(2)
    assert case.num_compared > 0


def test_rows_that_were_in_a_batch_too_large_for_drafts_draft_again(
    make_case: Callable[..., Case], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a head that has zeros in the place of what it has not seen; others are drafted for as ever."""
    monkeypatch.setattr(drafter, "WAITING_TOKENS", 3)
    case = make_case()
    driver = case.driver
    for slot in range(4):
        driver.add(slot, PROMPT[: 5 + slot])
    driver.step(prefill={slot: 5 + slot for slot in range(4)})
    driver.step(decode=[0, 1, 2, 3])
    with torch.inference_mode():
        case.model.cache.pool.fill_(0.5)  # what other requests have left
    for _ in range(12):
        driver.step()
    computed, waiting = int(case.model.computed[0]), int(case.model._waiting[0])
    assert 0 < waiting <= drafter.WAITING_TOKENS + 4
    assert computed + waiting == len(driver.requests[0].tokens)
    blocks = driver.requests[0].blocks
    stored = case.model.cache.pool[:, blocks].float()  # [layers, blocks, ...]
    assert (stored == 0).any()
    driver.remove(1, 2, 3)
    driver.add(4, OTHER)
    driver.step(prefill={4: 20}, decode=[], max_drafts=3)
    case.decode(2, [4])
    assert case.num_compared > 0
    case.model.draft = type(case.model).draft.__get__(case.model)  # type: ignore[method-assign]
    result = driver.step(decode=[0, 4], max_drafts=3)
    assert result.num_drafted[0] > 0


def test_states_that_are_not_finite_harm_no_other_row(make_case: Callable[..., Case]) -> None:
    case = make_case()
    driver = case.driver
    driver.add(0, PROMPT)
    driver.add(1, [*PROMPT[:4], 96])
    with torch.inference_mode():
        driver.runner.decoder.embedding[96] = torch.inf  # type: ignore[attr-defined]
    driver.step(prefill={0: 21, 1: 5})
    assert torch.isfinite(case.model.cache.pool).all()
    assert torch.isfinite(case.model._block_states).all()
    case.decode(3, [0])
    assert case.num_compared > 0


# Updates of the target's weights --------------------------------------------------------------------------------------


@pytest.mark.parametrize("has_layer", [True, False], ids=["with the layer", "without it"])
def test_an_update_of_the_weights_reaches_layers_for_further_tokens(
    make_case: Callable[..., Case], tmp_path: Path, has_layer: bool
) -> None:
    """Where a trainer has left them out, they stay what they were."""
    case, folder = make_case("mtp"), tmp_path / "other"
    folder.mkdir()
    target = save_target(folder, "mtp", seed=6)
    tensors = load_file(folder / "model.safetensors")
    if not has_layer:
        tensors = {name: tensor for name, tensor in tensors.items() if "mtp" not in name}
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    source = WeightSource("1", "an update", str(folder))
    runner = case.driver.runner
    runner.commit_weights(runner.stage_weights(source))
    case.watch(Oracle("mtp", case.oracle.tree, case.oracle.tensors | tensors, target, {}))
    case.driver.add(0, PROMPT)
    case.driver.step(prefill={0: 21})
    case.decode(3, [0])
    assert case.num_compared > 0


def test_what_an_update_has_for_a_layer_for_further_tokens_is_no_view_of_its_file(
    make_case: Callable[..., Case], tmp_path: Path
) -> None:
    """An embedding of its own stays as it is read. The file would be kept, and never written to again."""
    case = make_case("mtp of DeepSeek")
    layout, runner = case.model._shape.mtp, case.driver.runner
    assert layout is not None
    assert layout.embedding is not None
    own = torch.randn(runner.decoder.embedding.shape)  # type: ignore[attr-defined]
    file = tmp_path / "update.safetensors"
    save_file({layout.embedding: own}, file)
    runner.commit_weights(runner.stage_weights(WeightSource("1", "an update", overlays=(str(file),))))
    assert case.model._head._embedding is not None
    assert torch.equal(case.model._head._embedding, own)
    assert str(file) not in Path("/proc/self/maps").read_text()


@pytest.mark.parametrize("name", ["eagle3", "mtp"])
def test_a_worker_that_starts_after_an_update_has_the_same_head(
    make_case: Callable[..., Case], tmp_path: Path, name: str
) -> None:
    case, folder = make_case(name), tmp_path / "other"
    folder.mkdir()
    save_target(folder, name, seed=6)
    source = WeightSource("1", "an update", str(folder))
    runner = case.driver.runner
    runner.commit_weights(runner.stage_weights(source))
    config = runner.config
    later = type(runner)(replace(config, model=replace(config.model, weights=source)))
    later.load()
    assert isinstance(later._draft_model, HeadDrafter)
    heads = later._draft_model._head, case.model._head
    states = torch.randn(3, 48)
    ours, theirs = (head.logits(head.fc(torch.cat((states,) * (3 if name == "eagle3" else 2), 1))) for head in heads)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def test_what_a_head_has_of_its_target_sleeps_with_it(make_case: Callable[..., Case]) -> None:
    """With several ranks the first one has embedding and head as a whole for it. It drafts as before when they are back."""
    case = make_case()
    runner = case.driver.runner
    target = runner.decoder
    assert isinstance(target, Decoder)
    target.ranks = Ranks(0, 2)
    ends = ends_of(target, runner.config.model, False)
    target.ranks = Ranks()
    case.model.take_target(target, (None, ends))
    kept = weakref.ref(ends.embedding)
    del ends
    assert kept() is not None
    with torch.inference_mode():
        runner.release_weights(runner.config.model.weights, keeps_pages=True)
    assert kept() is None
    runner.commit_weights(runner.stage_weights(runner.config.model.weights))
    case.driver.add(0, PROMPT)
    case.driver.step(prefill={0: 21})
    case.decode(3, [0])
    assert case.num_compared > 0


# Mistakes that must show ----------------------------------------------------------------------------------------------


def test_a_head_with_the_states_of_rejected_drafts_is_found(
    make_case: Callable[..., Case], monkeypatch: pytest.MonkeyPatch
) -> None:
    keep = HeadDrafter.keep

    def all_kept(self: Any, batch: Any, inputs: Any, seen: Any, runs: Any) -> None:
        keep(self, batch, inputs, seen.roll(1, 0), runs)

    monkeypatch.setattr(HeadDrafter, "keep", all_kept)
    with pytest.raises(AssertionError):
        test_logits_are_those_of_plain_torch(make_case, "eagle3")


# What is refused ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"architectures": ["DeepseekV3ForCausalLM"]},
            "the layers of a head are those of LlamaForCausalLM and Qwen3ForCausalLM",
        ),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000, a number from 1 to 4096 is needed"),
        ({"draft_vocab_size": 98}, "draft_vocab_size=98 is more than the target has, 97"),
        ({"target_hidden_size": 64}, "target_hidden_size=64 is not that of the target, 48"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 7]}, r"must be numbers of layers from 0 to 6"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state=False is not supported"),
        ({"eagle_config": 5}, "eagle_config is 5, an object is needed"),
    ],
)
def test_heads_that_do_not_fit_are_refused_by_name(
    tmp_path: Path, make_runner: Callable[..., Any], change: dict[str, Any], message: str
) -> None:
    folder = save_eagle3(tmp_path / "head", SHAPE)
    tree = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(tree | change))
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "config.json").write_text(json.dumps(SHAPE | {"architectures": ["LlamaForCausalLM"]}))
    drafts = {"method": "eagle3", "model": str(folder), "num_speculative_tokens": 2}
    with pytest.raises((UnsupportedModelError, CorruptModelError), match=message):
        make_runner(tmp_path / "target", load_format="dummy", speculative_config=drafts, block_size=8)


def test_a_head_whose_tensors_do_not_fit_is_refused(tmp_path: Path, make_runner: Callable[..., Any]) -> None:
    (tmp_path / "target").mkdir()
    save_target(tmp_path / "target", "eagle3")
    folder = save_eagle3(tmp_path / "head", SHAPE)
    drafts = {"method": "eagle3", "model": str(folder), "num_speculative_tokens": 2}
    tensors = load_file(folder / "model.safetensors")
    for change, message in (
        ({"d2t": tensors["d2t"] + 90}, "d2t leads to ids beyond the target's vocabulary of 97"),
        ({"extra.weight": torch.zeros(2)}, "has a tensor 'extra.weight' that this architecture does not know"),
        ({"fc.weight": torch.zeros(48, 48)}, r"'fc.weight' has shape \(48, 48\)"),
    ):
        save_file(tensors | change, folder / "model.safetensors", {"format": "pt"})
        with pytest.raises(ModelError, match=f"speculative_config: the head that drafts: .*{message}"):
            make_runner(tmp_path / "target", speculative_config=drafts, block_size=8)


def test_a_target_without_layers_for_further_tokens_is_refused(
    tiny_llama: Path, make_runner: Callable[..., Any]
) -> None:
    with pytest.raises(
        UnsupportedModelError,
        match=r"method='mtp'\) is supported for MiMoForCausalLM, DeepseekV3ForCausalLM, not for Llama",
    ):
        make_runner(tiny_llama, load_format="dummy", speculative_config={"method": "mtp"}, block_size=8)
