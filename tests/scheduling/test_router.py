"""Routers: where requests go, whatever the replicas look like."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actorllm.errors import ConfigError
from actorllm.scheduling.router import (
    ROUTERS,
    LearntSteps,
    LinearSteps,
    ReplicaView,
    Routable,
    SentPrefixes,
    make_router,
    steps_alike,
)
from actorllm.scheduling.step_time import StepTime
from actorllm.types.objective import SLO

BLOCK = 32


def hashes(*blocks: int) -> bytes:
    """Of a prompt whose beginnings have these names."""
    return b"".join(number.to_bytes(8, "little") + bytes(24) for number in blocks)


def request(num_prompt: int = 100, *blocks: int, slo: SLO | None = None) -> Routable:
    return Routable(num_prompt, hashes(*blocks), slo=slo)


def step_seconds(prompt: float, rows: float, context: float) -> float:
    return 0.005 + 0.0001 * prompt + 0.0002 * rows


def timed(number: int, **more: object) -> ReplicaView:
    return ReplicaView(number, step_seconds=step_seconds, **more)  # type: ignore[arg-type]


views_drawn = st.lists(
    st.builds(
        ReplicaView,
        st.just(0),
        num_running=st.integers(0, 300),
        num_waiting=st.integers(0, 300),
        num_waiting_tokens=st.integers(0, 100_000),
        num_context=st.integers(0, 1_000_000),
        num_free_blocks=st.none() | st.integers(0, 5000),
        step_seconds=st.sampled_from([None, step_seconds]),
    ),
    min_size=1,
    max_size=6,
)


@pytest.mark.parametrize("name", sorted(ROUTERS))
@given(
    views=views_drawn,
    numbers=st.permutations(range(12)),
    asked=st.lists(st.tuples(st.integers(1, 5000), st.lists(st.integers(0, 5), max_size=6)), max_size=8),
    slo=st.none() | st.builds(SLO, ttft=st.floats(0.01, 5.0), tpot=st.none() | st.floats(0.001, 1.0)),
)
def test_every_router_names_one_of_the_replicas(
    name: str, views: list[ReplicaView], numbers: list[int], asked: list[tuple[int, list[int]]], slo: SLO | None
) -> None:
    for view, number in zip(views, sorted(numbers[: len(views)]), strict=True):
        view.number = number
    router = make_router(name)
    for num_prompt, blocks in asked:
        chosen = router.route(request(num_prompt, *blocks, slo=slo), views)
        (view,) = [view for view in views if view.number == chosen]
        view.add(request(num_prompt))


def route_all(name: str, requests: Sequence[Routable], views: Sequence[ReplicaView]) -> list[int]:
    router = make_router(name)
    chosen = []
    for one in requests:
        chosen.append(router.route(one, views))
        next(view for view in views if view.number == chosen[-1]).add(one)
    return chosen


def test_round_robin_goes_round_those_that_are_there() -> None:
    router = make_router("round-robin")
    three, two = [ReplicaView(n) for n in (0, 1, 4)], [ReplicaView(n) for n in (0, 4)]
    assert [router.route(request(), three) for _ in range(4)] == [0, 1, 4, 0]
    assert [router.route(request(), two) for _ in range(3)] == [4, 0, 4]


def test_least_load_counts_what_was_sent_since() -> None:
    views = [ReplicaView(0, 9, 1), ReplicaView(1, 2), ReplicaView(2, 2, 3)]
    assert route_all("least-load", [request()] * 5, views) == [1, 1, 1, 2, 1]


def test_power_of_two_seldom_takes_the_busiest_and_repeats_with_its_seed() -> None:
    views = [ReplicaView(0, 10), ReplicaView(1), ReplicaView(2)]
    router, again = make_router("power-of-two", 1), make_router("power-of-two", 1)
    chosen = [router.route(request(), views) for _ in range(60)]
    assert chosen == [again.route(request(), views) for _ in range(60)]
    assert chosen.count(0) < 15
    assert {1, 2} <= set(chosen)


@pytest.mark.parametrize("name", ["prefix-aware", "seconds"])
def test_a_prompt_goes_where_its_beginning_was_sent_unless_that_is_much_busier(name: str) -> None:
    router = make_router(name)
    views = [ReplicaView(n) for n in range(3)]
    first = router.route(request(6 * BLOCK, 1, 2, 3, 4, 5, 6), views)
    other = router.route(request(6 * BLOCK, 9, 10), views)
    assert other != first, "of equals, the one that was chosen least recently"
    assert router.route(request(6 * BLOCK, 1, 2, 3, 4, 8), views) == first
    assert router.route(request(6 * BLOCK, 9), views) == other
    views[first] = ReplicaView(first, num_running=50, num_waiting=5, num_waiting_tokens=5000)
    assert router.route(request(6 * BLOCK, 1, 2, 3, 4, 8), views) != first


@pytest.mark.parametrize("name", ["prefix-aware", "seconds"])
def test_a_replica_that_lost_its_cache_is_no_home_any_more(name: str) -> None:
    router = make_router(name)
    views = [ReplicaView(0), ReplicaView(1)]
    home = router.route(request(500, 1, 2, 3), views)
    assert router.route(request(500, 1, 2, 3), views) == home
    router.forget(home)  # type: ignore[attr-defined]
    assert router.route(request(500, 1, 2, 3), views) != home, "the other one was chosen less recently"


def test_what_is_on_its_way_counts_as_cached_until_it_has_been_computed() -> None:
    """The caches say what they have. Before they have a prompt, the next one like it goes after it all the same."""
    router = make_router("seconds")
    long = request(64 * BLOCK, *range(64))

    def views(at: float, num_found: int = 0) -> list[ReplicaView]:
        return [timed(n, find=lambda _, n=n: num_found if n == 1 else 0, seen=at) for n in (0, 1, 2)]

    home = router.route(long, views(0.0))
    assert [router.route(long, views(at)) for at in (0.1, 0.5)] == [home] * 2
    other = router.route(long, views(100.0, 64))
    assert (home, other) == (0, 1), "long after that, the caches alone know"
    later = [router.route(long, views(200.0 + at)) for at in (0.0, 100.0)]
    assert 1 in later or later[0] != later[1], "evicted: no replica is a home"


def test_seconds_weighs_cached_tokens_against_the_queue() -> None:
    cached = {0: 60, 1: 0}
    views = [timed(n, find=lambda _, n=n: cached[n]) for n in (0, 1)]
    long = request(64 * BLOCK, *range(64))
    assert route_all("seconds", [long], views) == [0]
    views[0] = timed(0, num_waiting_tokens=1000, find=lambda _: 60)
    assert route_all("seconds", [long], views) == [0], "1,000 tokens wait, and 1,920 are cached"
    views[0] = timed(0, num_waiting_tokens=8000, find=lambda _: 60)
    assert route_all("seconds", [long], views) == [1], "computing it again is sooner"


def test_seconds_waits_for_free_blocks() -> None:
    full, free = timed(0, num_running=4, num_context=4000, num_free_blocks=0), timed(1, num_running=8, num_context=8000)
    assert route_all("seconds", [request(1000)], [full, free]) == [1]


def test_seconds_keeps_quick_replicas_for_tight_requests() -> None:
    """A request whose promise is kept by both goes where its beginning is cached, though it waits longer there."""
    warm, idle = timed(0, num_waiting_tokens=2000, find=lambda _: 10), timed(1, find=lambda _: 0)
    loose, tight = SLO(ttft=2.0), SLO(ttft=0.06)
    assert route_all("seconds", [request(320, *range(10), slo=loose)], [warm, idle]) == [0]
    assert route_all("seconds", [request(320, *range(10), slo=tight)], [warm, idle]) == [1]
    by_prompt = SLO(ttft=0.06, ttft_per_prompt_token=0.01)
    assert route_all("seconds", [request(320, *range(10), slo=by_prompt)], [warm, idle]) == [0]
    slow = timed(0, num_running=200, find=lambda _: 10)
    assert route_all("seconds", [request(320, slo=SLO(ttft=9.0, tpot=0.02))], [slow, idle]) == [1]


@given(st.lists(st.tuples(st.integers(0, 4), st.lists(st.integers(0, 3), max_size=5)), max_size=30))
def test_sent_prefixes_are_those_of_a_plain_search(sent: list[tuple[int, list[int]]]) -> None:
    """Each name of a beginning covers everything before it, as block hashes do."""

    def chained(blocks: Sequence[int]) -> bytes:
        return hashes(*(hash(tuple(blocks[: at + 1])) % 2**63 for at in range(len(blocks))))

    memory, prompts = SentPrefixes(), []
    for number, blocks in sent:
        keys = memory.keys(Routable(100, chained(blocks)))
        wanted: dict[int, int] = {}
        for other, known in prompts:
            same = next(
                (at for at, (a, b) in enumerate(zip(blocks, known, strict=False)) if a != b),
                min(map(len, (blocks, known))),
            )
            if same:
                wanted[other] = max(wanted.get(other, 0), same)
        assert memory.find(keys, len(blocks)) == wanted
        memory.add(keys, number)
        prompts.append((number, blocks))


def test_the_memory_of_prefixes_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SentPrefixes, "max_beginnings", 10)
    memory = SentPrefixes()
    for at in range(30):
        memory.add([at], 0)
    assert memory.find([29], 1) == {0: 1}
    assert memory.find([19], 1) == {}


def test_of_a_long_prompt_a_few_blocks_are_looked_at() -> None:
    first = request(9000, *range(256))
    memory = SentPrefixes()
    memory.add(memory.keys(first), 2)
    assert len(memory.keys(first)) < 64
    assert memory.find(memory.keys(first), 256) == {2: 256}
    for shared in (5, 17, 40, 130, 200):
        other = request(9000, *range(shared), *range(1000, 1300))
        assert shared - 16 < memory.find(memory.keys(other), shared + 300)[2] <= shared


def test_a_name_that_is_no_router_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"router='second' is none of .*; did you mean 'seconds'"):
        make_router("second")
    with pytest.raises(ConfigError, match=r"router='no\.such:Router' cannot be made: ModuleNotFoundError"):
        make_router("no.such:Router")
    with pytest.raises(ConfigError, match=r"router='\.a:b' is none of .* and no 'module:Class'"):
        make_router(".a:b")
    with pytest.raises(ConfigError, match=r"has no method route\(request, views\)"):
        make_router("collections:OrderedDict")
    with pytest.raises(
        ConfigError, match=r"AsyncRouter' has an async route\(\); nothing awaits it, so write `def route`"
    ):
        make_router("tests.scheduling.test_router:AsyncRouter")


class AsyncRouter:
    """Of an application that takes a router for a coroutine."""

    async def route(self, request: Routable, views: Sequence[ReplicaView]) -> int:
        return views[0].number


def learnt_from(
    steps: Sequence[tuple[float, float, float]], slowness: float, seed: int, noise: tuple[float, float] = (0.5, 3.0)
) -> LearntSteps:
    """By a replica that is so many times as slow as `step_seconds`, and noise times as slow beside, from step to step."""
    draws = np.random.default_rng(seed)
    times = StepTime()
    for step in steps:
        times.observe(*step, slowness * step_seconds(*step) * float(draws.uniform(*noise)))
    return LearntSteps(tuple(times.weights.tolist()), tuple(times.rates.tolist()))


DECODES = [(0.0 if at % 15 else 300.0, 32.0, 32.0 * (20 + at)) for at in range(120)]
"""Rows and context come and go together, so that what each of them takes is not known well."""


def burst(models: Sequence[LinearSteps], num_requests: int = 64) -> list[int]:
    """How many of so many short prompts each idle replica is sent."""
    views = [ReplicaView(number, step_seconds=steps) for number, steps in enumerate(models)]
    router = make_router("seconds")
    for _ in range(num_requests):
        views[router.route(request(10), views)].add(request(10))
    return [view.num_waiting for view in views]


def test_a_burst_is_shared_by_speed_and_not_by_errors_of_what_was_learnt() -> None:
    """By its own weights each, two thirds of it would go to one."""
    alone, together = [], []
    for seed in range(20):
        learnt = [learnt_from(DECODES, 1.0, 2 * seed + at) for at in range(2)]
        alone.append(max(burst([LinearSteps((*one.weights,)) for one in learnt])))  # type: ignore[arg-type]
        together.append(max(burst(steps_alike(learnt))))
    assert max(together) <= 36
    assert max(alone) > 40
    alike = [learnt_from(DECODES, slowness, 7) for slowness in (1.0, 1.3)]
    assert burst(steps_alike(alike)) == [32, 32], "a difference that other load of a machine makes"
    slow = [learnt_from(DECODES, slowness, 7) for slowness in (1.0, 2.0)]
    quick, late = burst(steps_alike(slow))
    assert 38 <= quick <= 50, "about twice as many as the slow one, which both end at the same time"
    assert quick + late == 64


def test_replicas_that_have_done_different_things_are_alike() -> None:
    prompts = [(200.0 + at, 1.0, 50.0) for at in range(120)]
    learnt = [learnt_from(steps, 1.0, 1, (0.9, 1.1)) for steps in (DECODES, prompts)]
    one, other = steps_alike(learnt)
    assert min(*one.weights, *other.weights) >= 0
    assert one(0, 32, 1000) == pytest.approx(other(0, 32, 1000), rel=0.5)
