"""Suffix decoding by arctic-inference: what it is told of requests, one cache for each salt, and what it keeps.

The package is no dependency. A cache with its interface stands for it, which notes what it is told.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from actorllm import LLM, SamplingParams
from actorllm.model.speculation import arctic
from actorllm.model.speculation.arctic import ArcticDrafter, find_cache
from actorllm.model.speculation.histories import Histories
from actorllm.model.speculation.suffix import SuffixDrafter
from actorllm.types.drafter import Speculation

OPTIONS = Speculation("suffix", 7, suffix_decoding_max_cached_requests=3)


class Cache:
    """With the methods of `SuffixDecodingCache`, and plain lists in the place of its trees."""

    made: list[Cache] = []  # noqa: RUF012

    def __init__(self, max_tree_depth: int, max_cached_requests: int) -> None:
        self.depth, self.most = max_tree_depth, max_cached_requests
        self.active: dict[int, list[int]] = {}
        self.responses: dict[int, list[int]] = {}
        self.made.append(self)

    @property
    def active_requests(self) -> Any:
        return self.active.keys()

    @property
    def cached_requests(self) -> Any:
        return self.responses.keys()

    def start_request(self, request: int, prompt: Sequence[int]) -> None:
        assert request not in self.active
        self.active[request] = list(prompt)
        self.responses[request] = []

    def add_active_response(self, request: int, tokens: Sequence[int]) -> None:
        self.active[request] += tokens
        self.responses[request] += tokens

    def stop_request(self, request: int) -> None:
        del self.active[request]

    def evict_cached_response(self, request: int) -> None:
        del self.responses[request]

    def speculate(self, request: int, pattern: Sequence[int], **options: Any) -> SimpleNamespace:
        assert len(pattern) <= self.depth
        assert self.active[request][-len(pattern) :] == list(pattern)
        chosen = Speculation("suffix", 7, suffix_decoding_max_spec_factor=options["max_spec_factor"])
        others = [token for one, response in self.responses.items() if one != request for token in (*response, -1)]
        drafts = SuffixDrafter(chosen, 10**6).draft(
            np.array(self.active[request], np.int32), options["max_spec_tokens"], np.array(others, np.int32)
        )
        return SimpleNamespace(token_ids=list(drafts))


@pytest.fixture(autouse=True)
def no_caches() -> None:
    Cache.made = []


def drafts(drafter: ArcticDrafter, histories: Histories, *slots: int, wanted: int = 7) -> list[list[int]]:
    rows = np.array(slots, np.int32)
    return drafter.draft(None, histories, rows, np.full(len(slots), wanted, np.int32))  # type: ignore[arg-type]


def ids(*tokens: int) -> Any:
    return np.array(tokens, np.int32)


def test_rows_hand_over_their_tokens_when_they_draft() -> None:
    histories, drafter = Histories(7), ArcticDrafter(OPTIONS, 100, Cache)
    histories.add(0, ids(1, 2, 3, 4, 1, 2), num_outputs=2)
    assert drafts(drafter, histories, 0) == [[3, 4]]
    assert Cache.made[0].active == {1: [1, 2, 3, 4, 1, 2]}
    assert Cache.made[0].responses == {1: [1, 2]}
    for token in (3, 9, 7, 3, 9):
        histories.store(ids(0), ids(token))
    assert drafts(drafter, histories, 0, wanted=2) == [[7, 3]]
    assert Cache.made[0].responses == {1: [1, 2, 3, 9, 7, 3, 9]}


def test_a_salt_sees_its_own_responses_alone() -> None:
    histories, drafter = Histories(7), ArcticDrafter(OPTIONS, 100, Cache)
    histories.add(0, ids(50), salt=b"one")
    histories.store(ids(0, 0, 0), ids(5, 6, 7))
    drafts(drafter, histories, 0)
    histories.add(1, ids(40, 5), salt=b"two")
    histories.add(2, ids(40, 5), salt=b"one")
    assert drafts(drafter, histories, 1, 2) == [[], [6]]
    assert len(Cache.made) == 2


def test_what_has_ended_is_kept_until_others_need_the_room(monkeypatch: pytest.MonkeyPatch) -> None:
    histories, drafter = Histories(7), ArcticDrafter(OPTIONS, 100, Cache)
    for number in range(8):
        histories.add(0, ids(1, 2), salt=bytes([number // 6]))
        histories.store(ids(0, 0), ids(number, 9))
        drafts(drafter, histories, 0)
        histories.remove(0)
    assert [len(cache.responses) for cache in Cache.made] == [2, 2], "three that have ended, and the last one"
    monkeypatch.setattr(arctic, "MAX_TOKENS", 2)
    histories.add(0, ids(1, 2), salt=b"other")
    drafts(drafter, histories, 0)
    assert [len(cache.responses) for cache in Cache.made] == [0, 1, 1]
    assert drafter.num_ended_tokens == 2
    assert set(drafter._caches) == {bytes([1]), b"other"}, "a salt without requests has no cache"


def test_a_row_that_drafts_nothing_for_long_begins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("actorllm.model.speculation.histories.HISTORY_TOKENS", 8)
    histories, drafter = Histories(7), ArcticDrafter(OPTIONS, 100, Cache)
    histories.add(0, ids(1, 2, 3))
    drafts(drafter, histories, 0)
    for token in range(20):
        histories.store(ids(0), ids(token))
    drafts(drafter, histories, 0)
    assert Cache.made[0].active == {2: list(range(12, 20))}


def test_drafts_are_ids_of_the_vocabulary() -> None:
    histories, drafter = Histories(7), ArcticDrafter(OPTIONS, 10, Cache)
    histories.add(0, ids(1, 2, 3, 4, -1, 1, 2, 3))
    assert drafts(drafter, histories, 0) == [[4]]


def test_a_package_that_fails_costs_drafts_only(caplog: pytest.LogCaptureFixture) -> None:
    def broken(**options: Any) -> Any:
        raise ValueError("no tree today")

    histories, drafter = Histories(7), ArcticDrafter(OPTIONS, 10, broken)
    histories.add(0, ids(1, 1))
    assert drafts(drafter, histories, 0) == drafts(drafter, histories, 0) == [[]]
    assert len([record for record in caplog.records if "no tree today" in str(record.exc_info)]) == 1


def test_the_package_is_used_where_it_is_installed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert find_cache() is None
    module = ModuleType(arctic.MODULE)
    monkeypatch.setitem(sys.modules, "arctic_inference", ModuleType("arctic_inference"))
    monkeypatch.setitem(sys.modules, arctic.MODULE, module)
    with caplog.at_level(logging.WARNING):
        assert find_cache() is None
    assert "arctic_inference.suffix_decoding cannot be imported (AttributeError" in caplog.text
    module.SuffixDecodingCache = Cache  # type: ignore[attr-defined]
    arguments: dict[str, Any] = {"topology": "inline", "dtype": "float32", "max_model_len": 320, "num_threads": 1}
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    prompts = ["One, two, one, two, one, two", "The fox and the hen. The fox and the"]
    config = {"method": "suffix", "num_speculative_tokens_per_batch_size": [[1, 9, 7]], "num_speculative_tokens": 7}
    found = []
    for drafting in (None, config):
        with LLM("storyteller", speculative_config=drafting, **arguments) as llm:
            found.append([o.outputs[0].token_ids for o in llm.generate(prompts, params, use_tqdm=False)])
            counted = llm.stats()["scheduler"]["scheduler"]["speculation"]
    assert found[0] == found[1]
    assert counted["num_accepted_tokens"] > 20
    assert len(Cache.made) == 1
