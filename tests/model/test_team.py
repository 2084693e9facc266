"""The number of threads follows what steps have taken. Time is simulated."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from actorllm import LLM, SamplingParams
from actorllm.model.cpu.rates import measured_rates, sizes_of
from actorllm.model.linear import Linear, LinearWeight
from actorllm.model.linear.dense import Dense
from actorllm.model.team import LONGEST_PAUSE, IdleCores, Rates, Team

MS = 1e-3

ALONE = Rates({1: 10e-6, 2: 40e-6}, {1: 0.5e-6, 2: 0.3e-6}, num_products=25)
"""Says that few tokens are for one thread, and many for two."""


class Cores(IdleCores):
    """As many are idle as is said."""

    def __init__(self, num_idle: float | None = 0.0) -> None:
        super().__init__(cores=[])
        self.num_idle = num_idle

    def read(self, now: float) -> float | None:
        return self.num_idle


class Machine:
    """Computes steps of a team, in simulated time."""

    def __init__(self, seconds: dict[int, float], rates: Rates = ALONE, idle: IdleCores | None = None) -> None:
        self.seconds = seconds
        self.gap = 0.0
        self.now = 0.0
        self.team = Team(tuple(seconds), rates, clock=lambda: self.now, idle=idle or Cores())
        self.sizes: list[int] = []

    def run(self, num_steps: int, *, num_tokens: int = 64, goes_on: bool = True) -> list[int]:
        """Returns the numbers of threads of these steps."""
        for _ in range(num_steps):
            size = self.team.begin(num_tokens, num_tokens, goes_on=goes_on)
            self.now += self.seconds[size]
            self.team.end()
            self.now += self.gap
            self.sizes.append(size)
        return self.sizes[-num_steps:]


def test_rates_choose_until_there_are_times() -> None:
    team = Machine({1: 1 * MS, 2: 1 * MS}).team
    assert team.begin(1, 1, goes_on=False) == 1
    assert team.begin(512, 0, goes_on=False) == 2
    assert Team([4]).begin(1, 1, goes_on=False) == 4, "what there is no choice of is not measured"


@pytest.mark.parametrize("num_tokens", [2, 64])
@pytest.mark.parametrize("seconds", [{1: 23 * MS, 2: 13.7 * MS}, {1: 13.7 * MS, 2: 23 * MS}])
def test_a_wrong_choice_is_left_within_ten_steps(num_tokens: int, seconds: dict[int, float]) -> None:
    machine = Machine(seconds)
    right = min(seconds, key=seconds.__getitem__)
    machine.run(10, num_tokens=num_tokens)
    after = machine.run(2000, num_tokens=num_tokens)
    assert after[:10].count(right) >= 7
    assert after[-LONGEST_PAUSE * 4 :].count(3 - right) <= 8, "a step in a hundred and less is a trial"


def test_one_slow_step_changes_nothing_and_two_do() -> None:
    machine = Machine({1: 23 * MS, 2: 14 * MS})
    machine.run(100)
    assert machine.run(1) == [2]
    machine.seconds[2] = 140 * MS
    machine.run(1)
    machine.seconds[2] = 14 * MS
    assert machine.run(20).count(2) >= 18
    machine.seconds[2] = 140 * MS
    assert machine.run(4).count(2) <= 3
    assert machine.run(20).count(2) <= 4, "trials get rarer"


def test_a_team_comes_back_when_cores_are_idle_again() -> None:
    cores = Cores(1.0)
    machine = Machine({1: 23 * MS, 2: 14 * MS}, idle=cores)
    machine.run(100)
    machine.seconds[2], cores.num_idle = 140 * MS, 0.0
    crowded = machine.run(300)
    assert crowded.count(2) <= 12
    machine.seconds[2], cores.num_idle = 14 * MS, 0.9
    assert machine.run(20)[10:].count(2) >= 9


def test_idle_cores_alone_make_no_trials() -> None:
    machine = Machine({1: 14 * MS, 2: 23 * MS}, idle=Cores(1.0))
    machine.run(100)
    assert machine.run(1000).count(2) <= 10


def test_what_a_team_keeps_others_from_counts() -> None:
    """With two threads the step is shorter, and the scheduler has no core until it ends."""
    machine = Machine({1: 20 * MS, 2: 12 * MS})

    def run(goes_on: bool) -> list[int]:
        for _ in range(60):
            size = machine.team.begin(64, 64, goes_on=goes_on)
            machine.now += machine.seconds[size]
            machine.team.end()
            machine.now += 0.0 if size == 1 else 15 * MS
            machine.sizes.append(size)
        return machine.sizes[-20:]

    assert run(goes_on=False).count(2) >= 15, "an engine without work waits for no one"
    assert run(goes_on=True).count(1) >= 15


def test_a_batch_that_grows_within_a_kind_is_no_slower_machine() -> None:
    machine = Machine({1: 23 * MS, 2: 14 * MS})
    machine.run(60, num_tokens=64)
    for tokens in range(64, 128):
        scale = ALONE.step_s(1, tokens) / ALONE.step_s(1, 64)
        machine.seconds = {1: 23 * MS * scale, 2: 14 * MS * scale}
        machine.run(1, num_tokens=tokens)
    assert machine.sizes[-50:].count(2) >= 45


def test_four_threads_are_found_by_way_of_two() -> None:
    rates = Rates({1: 1e-5, 2: 2e-5, 4: 4e-5}, dict.fromkeys((1, 2, 4), 0.0))
    machine = Machine({1: 40 * MS, 2: 22 * MS, 4: 12 * MS}, rates)
    assert machine.run(60)[-10:].count(4) >= 9
    told = machine.team.statistics()["kinds"]["64 to 127 tokens"]
    assert told["num_threads"] == 4
    assert told["num_changes"] == 2
    assert "4: " in told["why"]
    assert told["last_ms"]["4"] == 12.0


def test_a_limit_holds_from_the_next_step_on_and_may_be_raised_again() -> None:
    machine = Machine({1: 40 * MS, 2: 22 * MS, 3: 16 * MS})
    rates = Rates({1: 1e-5, 2: 1e-5, 3: 1e-5}, {1: 3e-6, 2: 2e-6, 3: 1e-6})
    machine.team = Team((1, 2, 3), rates, clock=lambda: machine.now, idle=Cores())
    assert machine.run(20)[-1] == 3
    machine.team.limit(2)
    assert max(machine.run(300)) == 2
    machine.team.limit(1)
    assert set(machine.run(20)) == {1}
    assert machine.team.statistics()["sizes"] == [1]
    machine.team.limit(8)
    assert machine.run(20).count(3) >= 15
    team = Team((2, 3), rates)
    team.limit(1)
    assert team.begin(64, 64, goes_on=False) == 2, "one has other bits, and is not among the sizes"


def test_a_step_that_failed_does_not_count() -> None:
    machine = Machine({1: 23 * MS, 2: 14 * MS})
    machine.run(50)
    for _ in range(5):
        machine.team.begin(64, 64, goes_on=True)
        machine.now += 10.0  # and no end
    assert machine.run(20).count(2) >= 18


def test_idle_cores_are_those_of_this_process(tmp_path: Path) -> None:
    file = tmp_path / "stat"

    def write(*idle: int) -> None:
        lines = [f"cpu{core} 100 0 50 {ticks} 0 0 0 0 0 0" for core, ticks in enumerate(idle)]
        file.write_text("\n".join(["cpu  1 2 3 4 5", *lines, "intr 5"]) + "\n")

    cores = IdleCores(str(file), cores=[0, 2])
    cores._ticks_per_s = 100
    write(1000, 5000, 2000)
    assert cores.read(1.0) is None
    write(1050, 9000, 2030)
    assert cores.read(2.0) == pytest.approx(0.8)
    file.write_text("nothing of the kind\n")
    assert cores.read(3.0) is None
    assert IdleCores(str(tmp_path / "none"), cores=[0]).read(1.0) is None


# What is measured


def test_sizes_are_powers_of_two_and_the_largest() -> None:
    assert [sizes_of(n) for n in (1, 2, 3, 8, 12)] == [(1,), (1, 2), (1, 2, 3), (1, 2, 4, 8), (1, 2, 4, 8, 12)]


class Counted(Linear):
    """Has other bits with one thread than with several."""

    def __init__(self, weight: LinearWeight) -> None:
        super().__init__(weight.out_features, weight.in_features, weight.num_bytes)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return torch.full((len(x), self.out_features), float(min(torch.get_num_threads(), 2)))


def test_numbers_of_threads_with_other_bits_are_left_out() -> None:
    before = torch.get_num_threads()
    try:
        rates = measured_rates((1, 2, 3), 4096, 64, 9, torch.float32, Counted, Dense)
    finally:
        torch.set_num_threads(before)
    assert set(rates.one_row) == set(rates.per_row) == set(rates.region_s) == {2, 3}


def test_an_engine_says_what_it_chose_and_streams_do_not_depend_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(temperature=0.8, max_tokens=24, seed=5)
    prompts = ["Once upon a time", "The dog", "A little girl named"]
    options: dict[str, Any] = {"dtype": "float32", "topology": "inline", "max_model_len": 128}

    def streams(num_threads: int, begin: Callable[..., int] | None = None) -> list[list[int]]:
        if begin is not None:
            monkeypatch.setattr(Team, "begin", begin)
        with LLM("storyteller", num_threads=num_threads, **options) as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False)
            (worker,) = llm.stats()["workers"]
        threads = worker["threads"]
        assert threads["sizes"] == list(sizes_of(num_threads))
        if begin is None and num_threads > 1:
            assert any("2 to 3 tokens" in kind for kind in threads["kinds"])
            assert set(threads["product_us"]) == {"1", "2"}
        return [output.outputs[0].token_ids for output in outputs]

    alone = streams(1)
    assert streams(2) == alone
    turn = iter(range(10_000))
    assert streams(2, lambda *_, **__: 1 + next(turn) % 2) == alone
