"""The encoder actor: deaths at an item, what it keeps, and several requests with one item."""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from actorllm.config import EngineConfig
from actorllm.errors import InvalidPromptError
from actorllm.intake.media import media_encoder
from actorllm.intake.media.media_encoder import MAX_TRIES, MediaEncoder, MediaTensors, TowerEndedError

DEADLY = 66


class FakeProcess:
    """In the place of the process of a tower: the rows of an item are its numbers. It dies of one item."""

    started: list[FakeProcess]
    gate: threading.Event

    def __init__(self, config: EngineConfig) -> None:
        self.started.append(self)
        self.pid = len(self.started)
        self.is_closed = False

    def encode(self, arrays: dict[str, Any]) -> Any:
        assert not self.is_closed
        assert self.gate.wait(60)
        if arrays["numbers"][0] == DEADLY:
            raise TowerEndedError("was killed by signal 9")
        return arrays["numbers"].copy()

    def kill(self) -> None:
        self.is_closed = True

    close = kill


@pytest.fixture
def encoder(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(FakeProcess, "started", [], raising=False)
    monkeypatch.setattr(FakeProcess, "gate", threading.Event(), raising=False)
    FakeProcess.gate.set()
    monkeypatch.setattr(media_encoder, "TowerProcess", FakeProcess)
    made = MediaEncoder(EngineConfig.from_arguments("storyteller"))
    yield made
    made.close()


def item(number: int, size: int = 8) -> MediaTensors:
    return MediaTensors(str(number), {"numbers": np.full(size, number, np.uint8)})


def counts(encoder: MediaEncoder) -> dict[str, Any]:
    found = encoder.statistics()
    return {name: found[f"num_{name}"] for name in ("encoded", "hits", "failed", "restarts")}


def test_an_item_of_which_the_process_dies_fails_and_the_next_one_is_encoded(encoder: MediaEncoder) -> None:
    assert encoder.encode(item(1), None).tolist() == [1] * 8
    with pytest.raises(InvalidPromptError, match=f"ended {MAX_TRIES} times while it encoded this item"):
        encoder.encode(item(DEADLY), None)
    assert encoder.encode(item(2), None).tolist() == [2] * 8
    assert counts(encoder) == {"encoded": 2, "hits": 0, "failed": 1, "restarts": MAX_TRIES}
    assert [process.is_closed for process in FakeProcess.started] == [True] * MAX_TRIES + [False]
    with pytest.raises(InvalidPromptError, match="ended"):
        encoder.encode(item(DEADLY), None)  # it is tried again: what it died of may have passed


def test_rows_are_kept_within_the_bound_and_those_used_last_stay(
    encoder: MediaEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(media_encoder, "MAX_CACHE_BYTES", 20)
    for number in (1, 2, 1, 3):
        encoder.encode(item(number), None)
    assert counts(encoder) | {"cached": encoder.statistics()["cached_bytes"]} == {
        "encoded": 3, "hits": 1, "failed": 0, "restarts": 0, "cached": 16,
    }  # fmt: skip
    encoder.encode(item(1), None)
    assert counts(encoder)["encoded"] == 3
    encoder.encode(item(2), None)
    assert counts(encoder)["encoded"] == 4
    assert encoder.encode(item(9, size=30), None).size == 30
    assert encoder.statistics()["cached_bytes"] == 0, "more than there is room for"


def test_of_several_requests_with_one_item_one_encodes_it(encoder: MediaEncoder) -> None:
    FakeProcess.gate.clear()
    with ThreadPoolExecutor(3) as pool:
        waiting: list[Future[Any]] = [pool.submit(encoder.encode, item(5), None) for _ in range(3)]
        try:
            while counts(encoder)["hits"] < 2:
                assert not any(future.done() for future in waiting)
        finally:
            FakeProcess.gate.set()
        assert [future.result(60).tolist() for future in waiting] == [[5] * 8] * 3
    assert counts(encoder) == {"encoded": 1, "hits": 2, "failed": 0, "restarts": 0}
