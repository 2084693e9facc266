"""Slots for adapters: which adapter gets one, who waits, who may overtake, and what a slot is never taken from."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from actorllm.messages import Submit
from actorllm.scheduling import residency as module
from actorllm.scheduling.residency import AdapterSlot, Residency
from actorllm.scheduling.sequence import Sequence, State
from actorllm.types.adapter_folder import Adapter


class Steps:
    """What the residency reads of a ledger."""

    next_step = 1
    last_done = 0


def digest(name: str) -> str:
    return name * 64


class Slots:
    """A residency, and a caller that loads at once unless it is told not to."""

    def __init__(self, num_slots: int, loads: bool = True) -> None:
        self.steps = Steps()
        self.residency = Residency(num_slots, self.steps)  # type: ignore[arg-type]
        self.loads = loads
        self.num_arrivals = 0
        self.loaded: list[str] = []

    def add(self, name: str, priority: int = 0, path: str | None = None) -> Sequence:
        """path: of the folder; None: that of its name."""
        self.num_arrivals += 1
        submit = Submit(
            rid=self.num_arrivals,
            arrival=0.0,
            prompt=np.ones(1, np.int32),
            max_tokens=1,
            priority=priority,
            name=f"{name}{self.num_arrivals}",
        )
        sequence = Sequence((0, submit.rid), submit, self.num_arrivals, submit.prompt, 2, frozenset(), frozenset())
        sequence.state = State.BLOCKED
        self.residency.add(sequence, Adapter(digest(name), path or f"/{name}"))
        return sequence

    def turn(self) -> list[str]:
        """Those that were let in, in their order, by name."""
        return [sequence.submit.name or "" for sequence in self.let_in()]

    def let_in(self) -> list[Sequence]:
        """The same as they are."""
        let_in: list[Sequence] = []
        again = True
        while again:
            again = False
            for found in self.residency.next():
                if isinstance(found, AdapterSlot):
                    assert found.adapter is not None
                    self.loaded.append(found.adapter.digest[0])
                    if self.loads:
                        self.residency.loaded(found)
                        again = True
                else:
                    sequence, slot = found
                    sequence.adapter_slot = slot.number
                    sequence.state = State.WAITING
                    let_in.append(sequence)
            self.residency.check_integrity()
        return let_in


def end(*sequences: Sequence) -> None:
    for sequence in sequences:
        sequence.state = State.FINISHED


def test_requests_of_one_adapter_share_a_slot_and_others_wait() -> None:
    slots = Slots(2)
    a, b, other_a, c = slots.add("a"), slots.add("b"), slots.add("a"), slots.add("c")
    assert set(slots.turn()) == {"a1", "b2", "a3"}
    assert a.adapter_slot == other_a.adapter_slot != b.adapter_slot
    assert slots.turn() == []
    end(a)
    assert slots.turn() == [], "another request uses it"
    end(other_a)
    assert slots.turn() == ["c4"]
    assert (c.adapter_slot, slots.loaded) == (a.adapter_slot, ["a", "b", "c"])


def test_the_slot_that_was_used_longest_ago_goes_and_the_others_need_no_loading() -> None:
    slots = Slots(2)
    for name in "abab":
        end(slots.add(name))
    for name in "ab":
        slots.add(name)
        end(*slots.let_in())
    slots.add("a")
    end(*slots.let_in())
    slots.add("c")
    end(*slots.let_in())
    slots.add("a")
    slots.turn()
    assert slots.loaded == ["a", "b", "c"], "b went, which a was used after"


def test_a_slot_is_not_taken_while_a_step_in_flight_may_name_a_request_of_it() -> None:
    slots = Slots(1)
    a = slots.add("a")
    slots.turn()
    slots.steps.next_step, slots.steps.last_done = 8, 5
    slots.add("b")
    end(a)
    assert slots.turn() == []
    slots.steps.last_done = 6
    assert slots.turn() == []
    slots.steps.last_done = 7
    assert slots.turn() == ["b2"]


def test_requests_wait_by_priority_and_then_by_arrival() -> None:
    slots = Slots(1)
    a = slots.add("a")
    assert slots.turn() == ["a1"]
    _, urgent, _ = slots.add("b"), slots.add("c", priority=-1), slots.add("b")
    end(a)
    assert slots.turn() == ["c3"]
    end(urgent)
    assert set(slots.turn()) == {"b2", "b4"}


def test_an_adapter_with_many_requests_keeps_no_other_from_running(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_OVERTAKING", 3)
    slots = Slots(1)
    running = [slots.add("a")]
    slots.turn()
    waiting = slots.add("b")
    overtaking = 0
    for _ in range(20):
        slots.add("a")
        new = slots.let_in()
        if any(sequence is waiting for sequence in new):
            break
        overtaking += len(new)
        running += new
        end(running.pop(0))
    assert overtaking == 3
    assert waiting.adapter_slot == 1


def test_an_adapter_that_cannot_be_loaded_fails_those_that_want_it_alone() -> None:
    slots = Slots(1, loads=False)
    a, other_a = slots.add("a"), slots.add("a")
    slots.add("b")
    assert slots.turn() == []
    (slot,) = slots.residency.slots
    assert {sequence.submit.name for sequence in slots.residency.failed(slot)} == {"a1", "a2"}
    end(a, other_a)
    slots.loads = True
    assert slots.turn() == ["b3"]


def test_a_folder_that_is_gone_fails_those_that_named_it_and_others_load_theirs() -> None:
    """Of one content in several folders, also where requests use it and its workers are lost."""
    slots = Slots(1, loads=False)
    lost, own = slots.add("a", path="/lost"), slots.add("a")
    slots.turn()
    residency, (slot,) = slots.residency, slots.residency.slots
    assert residency.failed(slot) == [lost]
    end(lost)
    slots.loads = True
    assert slots.turn() == ["a2"]
    third = slots.add("a", path="/third")
    assert slots.turn() == ["a3"]
    assert residency.lose_workers() == [slot]
    assert residency.failed(slot) == [own]
    end(own)
    assert slot.adapter == Adapter(digest("a"), "/third")
    residency.check_integrity()
    slots.add("a")
    assert slots.turn() == [], "it is not there yet"
    assert residency.failed(slot) == [third]
    end(third)
    assert slots.turn() == ["a4"]
    assert third.adapter_slot == own.adapter_slot == slot.number


def test_lost_workers_load_what_requests_use_again_and_nothing_else() -> None:
    slots = Slots(3)
    a, b, _ = slots.add("a"), slots.add("b"), slots.add("c")
    slots.turn()
    end(b)
    again = slots.residency.lose_workers()
    assert [slot.adapter.digest[0] for slot in again if slot.adapter] == ["a", "c"]
    assert again[0].number == a.adapter_slot, "rows of it name this slot"
    slots.add("a")
    assert slots.turn() == [], "it is not there yet"
    for slot in again:
        slots.residency.loaded(slot)
    assert slots.turn() == ["a4"]


def test_invariants_hold_in_random_runs() -> None:
    for seed in range(30):
        rng = random.Random(seed)
        slots = Slots(rng.randint(1, 3))
        alive: list[Sequence] = []
        waited: list[Sequence] = []
        for _ in range(120):
            action: Any = rng.random()
            if action < 0.5:
                waited.append(slots.add(rng.choice("abcdef"), rng.randint(-1, 1)))
            elif action < 0.6 and waited:
                end(waited.pop(rng.randrange(len(waited))))
            elif alive:
                end(alive.pop(rng.randrange(len(alive))))
            slots.steps.next_step += 1
            slots.steps.last_done = slots.steps.next_step - rng.randint(1, 2)
            new = slots.let_in()
            alive += new
            waited = [sequence for sequence in waited if sequence.state is State.BLOCKED]
            used = {slots.residency.slots[s.adapter_slot - 1].adapter for s in alive}
            assert len(used) <= len(slots.residency.slots)
            assert None not in used
        for _ in range(400):
            end(*alive)
            slots.steps.last_done = slots.steps.next_step
            alive = slots.let_in()
        assert not slots.residency.waiting, "every request gets its turn"
