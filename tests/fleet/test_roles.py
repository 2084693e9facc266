"""Prefill apart from decode: the same tokens as by one replica, whatever is killed before, during and after a hand-off."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import anyio
import httpx
import pytest

import actorllm.fleet.dispatcher
from actorllm import AsyncLLM, RequestOutput, RequestOutputKind, SamplingParams
from actorllm.config import EngineConfig
from actorllm.errors import ConfigError, InvalidParameterError
from actorllm.fleet.dispatcher import Dispatcher
from actorllm.server import create_app
from actorllm.types.roles import read_roles
from tests.fleet.handing_off import (
    DECODE,
    OPTIONS,
    PREFILL,
    PROMPTS,
    hand_off_every_prompt,
    stream,
    streams,
    transfers,
)
from tests.fleet.streams import Told, all_run, assert_same, kill, params, run_all, until

pytestmark = [pytest.mark.leaks_by_module, pytest.mark.timeout(240)]


@pytest.fixture(scope="module", autouse=True)
def every_prompt_is_handed_off() -> Iterator[None]:
    yield from hand_off_every_prompt()


@pytest.fixture(scope="module")
async def alone() -> AsyncIterator[tuple[list[list[int]], dict[str, Told]]]:
    """Of one replica that does both."""
    async with AsyncLLM("storyteller", **OPTIONS, enable_prompt_embeds=True) as llm:
        yield await streams(llm), await run_all(llm)


@pytest.fixture(scope="module")
async def fleet() -> AsyncIterator[AsyncLLM]:
    llm = AsyncLLM("storyteller", **OPTIONS, enable_prompt_embeds=True, roles="1P1D")
    await llm.start()
    await all_run(llm)
    yield llm
    llm.shutdown()


def handed_off(llm: AsyncLLM) -> int:
    return int(llm._engine.statistics()["frontend"]["num_handed_off"])


@pytest.mark.anyio
async def test_prompts_are_computed_by_one_replica_and_decoded_by_another(
    fleet: AsyncLLM, alone: tuple[list[list[int]], dict[str, Told]]
) -> None:
    before = handed_off(fleet)
    assert await streams(fleet) == alone[0]
    assert handed_off(fleet) == before + len(PROMPTS)
    prefill, decode = await transfers(fleet)
    assert prefill["num_handed_off"] == len(PROMPTS)
    assert decode["num_pulled_blocks"] > 0
    assert decode["num_lost_leases"] == 0


@pytest.mark.anyio
async def test_every_kind_of_request_is_handed_off(
    fleet: AsyncLLM, alone: tuple[list[list[int]], dict[str, Told]]
) -> None:
    """Siblings, grammars, penalties, log-probabilities; embeddings have no hashes, and stay."""
    assert_same(await run_all(fleet), alone[1])


@pytest.mark.anyio
@pytest.mark.parametrize("kind", [RequestOutputKind.CUMULATIVE, RequestOutputKind.FINAL_ONLY])
async def test_what_was_copied_was_not_cached_and_times_are_in_order(fleet: AsyncLLM, kind: RequestOutputKind) -> None:
    """Usage names what was in a cache when the request came; durations between its times are not negative."""
    await fleet.reset_prefix_cache()
    before = handed_off(fleet)
    prompt = f"{kind} {PROMPTS[0]}"
    found = await fleet.complete(prompt, params(1, max_tokens=24, output_kind=kind))
    assert handed_off(fleet) == before + 1
    assert found.num_cached_tokens == 0
    times = found.metrics
    assert times is not None
    assert times.num_cached_tokens == 0
    assert times.arrival_time <= times.queued_ts <= times.scheduled_ts <= times.first_token_ts <= times.last_token_ts
    again = await fleet.complete(prompt, params(1, max_tokens=24, output_kind=kind))
    assert again.num_cached_tokens > 0, "by the replica that computed the prompt"


@pytest.mark.anyio
async def test_a_pinned_request_stays_where_it_is(
    fleet: AsyncLLM, alone: tuple[list[list[int]], dict[str, Told]]
) -> None:
    before = handed_off(fleet)
    assert await stream(fleet, 0, data_parallel_rank=0) == alone[0][0]
    assert await stream(fleet, 0, data_parallel_rank=1) == alone[0][0]
    assert handed_off(fleet) == before


def transfer_params(number: int, given: Any, **more: Any) -> SamplingParams:
    return params(number, **({"max_tokens": 40} | more), extra_args={"kv_transfer_params": given})


async def last(llm: AsyncLLM, number: int, given: Any, **more: Any) -> RequestOutput:
    return await llm.complete(PROMPTS[number], transfer_params(number, given, **more))


@pytest.mark.anyio
async def test_a_gateway_has_a_prompt_computed_and_then_decoded(
    fleet: AsyncLLM, alone: tuple[list[list[int]], dict[str, Told]]
) -> None:
    await all_run(fleet)
    await fleet.reset_prefix_cache()
    before = await transfers(fleet)
    computed = await last(fleet, 0, {"do_remote_decode": True, "do_remote_prefill": False}, max_tokens=1)
    assert computed.outputs[0].token_ids == alone[0][0][:1]
    given = computed.kv_transfer_params
    assert given is not None
    assert (given["do_remote_prefill"], given["do_remote_decode"]) == (True, False)
    assert len(given["remote_block_ids"]) > 6
    decoded = await last(fleet, 0, given)
    assert decoded.outputs[0].token_ids == alone[0][0]
    num_pulled = len(given["remote_block_ids"]) - 1  # all of the prompt: its last token is computed for the logits
    assert decoded.num_cached_tokens == 8 * num_pulled
    assert decoded.kv_transfer_params is None
    after = await transfers(fleet)
    assert after[1]["num_pulled_blocks"] - before[1]["num_pulled_blocks"] == num_pulled
    # What is over, of another engine or of another prompt is computed.
    for other in (given, given | {"remote_engine_id": "somewhere"}, given | {"remote_block_ids": [1]}):
        assert (await last(fleet, 1, other)).outputs[0].token_ids == alone[0][1]
    assert (await last(fleet, 2, {"do_remote_decode": False})).outputs[0].token_ids == alone[0][2]


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("yes", "must be a mapping"),
        ({"do_remote_decode": 1}, "must be true or false"),
        ({"do_remote_decode": True}, "give max_tokens=1"),
        ({"do_remote_prefill": True, "remote_engine_id": 7}, "remote_engine_id=7"),
        ({"do_remote_prefill": True, "remote_block_ids": 7}, "remote_block_ids=7"),
    ],
)
async def test_what_a_gateway_says_wrongly_fails_its_own_request(fleet: AsyncLLM, given: Any, told: str) -> None:
    with pytest.raises(InvalidParameterError, match=told):
        await last(fleet, 0, given)


@pytest.mark.anyio
async def test_the_server_takes_what_gateways_send(fleet: AsyncLLM) -> None:
    await all_run(fleet)
    await fleet.reset_prefix_cache()
    body = {"prompt": PROMPTS[3], "temperature": 0.9, "seed": 3, "ignore_eos": True, "return_token_ids": True}
    transport = httpx.ASGITransport(app=create_app(fleet))
    async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=60) as client:

        async def complete(**more: Any) -> dict[str, Any]:
            response = await client.post("/v1/completions", json=body | more)
            assert response.status_code == 200, response.text
            told: dict[str, Any] = response.json()
            return told

        first = await complete(max_tokens=1, kv_transfer_params={"do_remote_decode": True, "do_remote_prefill": False})
        second = await complete(max_tokens=40, kv_transfer_params=first["kv_transfer_params"])
        await fleet.reset_prefix_cache()
        assert second["choices"] == (await complete(max_tokens=40))["choices"]
        assert second["kv_transfer_params"] is None
        assert first["kv_transfer_params"]["do_remote_prefill"]
        response = await client.post("/v1/completions", json=body | {"kv_transfer_params": {"do_remote_decode": True}})
        assert response.status_code == 400
        assert "max_tokens=1" in response.text


@pytest.mark.anyio
async def test_ids_are_taken_of_gateways_as_texts_are(fleet: AsyncLLM) -> None:
    await all_run(fleet)
    await fleet.reset_prefix_cache()
    transport = httpx.ASGITransport(app=create_app(fleet))
    async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=60) as client:

        async def generate(status: int, num_tokens: int, **more: Any) -> dict[str, Any]:
            body = {"token_ids": list(range(10, 200)), "sampling_params": {"seed": 3, "max_tokens": num_tokens, **more}}
            asks = {"kv_transfer_params": given}
            response = await client.post("/inference/v1/generate", json=body | asks)
            assert response.status_code == status, response.text
            told: dict[str, Any] = response.json()
            return told

        given: Any = {"do_remote_decode": True, "remote_engine_id": None}
        assert (await generate(400, 2))["error"]["param"] == "kv_transfer_params"
        assert "extra_args" in (await generate(400, 1, extra_args=3))["error"]["message"]
        given = (await generate(200, 1, extra_args={"mine": 1}))["kv_transfer_params"]
        assert given["do_remote_prefill"]
        before = (await transfers(fleet))[DECODE]["num_pulled_blocks"]
        decoded = await generate(200, 8)
        assert (await transfers(fleet))[DECODE]["num_pulled_blocks"] > before
        assert decoded["kv_transfer_params"] is None
        given = None
        await fleet.reset_prefix_cache()
        assert decoded["choices"] == (await generate(200, 8))["choices"]


@pytest.mark.anyio
async def test_streams_tell_a_gateway_with_their_end(fleet: AsyncLLM) -> None:
    await all_run(fleet)
    await fleet.reset_prefix_cache()
    transport = httpx.ASGITransport(app=create_app(fleet))
    async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=60) as client:

        async def chunks(path: str, **body: Any) -> list[dict[str, Any]]:
            response = await client.post(path, json=body | {"seed": 3, "stream": True})
            assert response.status_code == 200, response.text
            events = [line.removeprefix("data: ") for line in response.text.splitlines() if line]
            assert events.pop() == "[DONE]"
            return [json.loads(event) for event in events]

        def asked(path: str, **more: Any) -> dict[str, Any]:
            return {"sampling_params": more} if path.startswith("/inference") else more

        asks = {"kv_transfer_params": {"do_remote_decode": True}}
        chat = {"messages": [{"role": "user", "content": PROMPTS[4]}]}
        ids = {"token_ids": list(range(10, 200))}
        paths = {"/v1/completions": {"prompt": PROMPTS[3]}, "/v1/chat/completions": chat, "/inference/v1/generate": ids}
        for path, prompt in paths.items():
            told = await chunks(path, **prompt, **asked(path, max_tokens=1), **asks)
            assert [bool(one.get("kv_transfer_params")) for one in told] == [False] * (len(told) - 1) + [True]
            given = told[-1]["kv_transfer_params"]
            before = (await transfers(fleet))[DECODE]["num_pulled_blocks"]
            decoded = await chunks(path, **prompt, **asked(path, max_tokens=4), kv_transfer_params=given)
            assert not any("kv_transfer_params" in one for one in decoded)
            assert (await transfers(fleet))[DECODE]["num_pulled_blocks"] > before


@pytest.mark.anyio
async def test_what_no_replica_goes_on_with_is_lent_no_longer(
    fleet: AsyncLLM, alone: tuple[list[list[int]], dict[str, Told]], monkeypatch: pytest.MonkeyPatch
) -> None:
    await all_run(fleet)
    await fleet.reset_prefix_cache()
    before = (await transfers(fleet))[PREFILL]
    monkeypatch.setattr(Dispatcher, "_others_than", lambda self, source: [])
    assert await streams(fleet) == alone[0]
    await stream(fleet, 0, data_parallel_rank=PREFILL)  # the lender looks with its next step
    after = (await transfers(fleet))[PREFILL]
    assert after["num_handed_off"] == before["num_handed_off"] + len(PROMPTS)
    assert (after["num_leases"], after["num_expired_leases"]) == (0, before["num_expired_leases"])


@pytest.mark.anyio
async def test_an_engine_without_roles_says_that_it_has_none() -> None:
    async with AsyncLLM("storyteller", topology="inline", num_threads=1) as llm:
        with pytest.raises(InvalidParameterError, match="roles='1P1D'"):
            await last(llm, 0, {"do_remote_decode": True}, max_tokens=1)
        assert (await last(llm, 0, {"do_remote_prefill": True, "remote_engine_id": "x"})).finished


POINTS: dict[str, tuple[str, int, tuple[str, ...]]] = {
    "prefill worker before": ("routed", PREFILL, ("worker0",)),
    "prefill scheduler at the offer": ("offered", PREFILL, ("scheduler",)),
    "prefill replica while it is copied": ("moved", PREFILL, ("scheduler", "worker0")),
    "decode worker while it copies": ("moved", DECODE, ("worker0",)),
    "decode scheduler while it copies": ("moved", DECODE, ("scheduler",)),
    "decode replica afterwards": ("decoded", DECODE, ("scheduler", "worker0")),
    "prefill worker at the offer": ("offered", PREFILL, ("worker0",)),
    "prefill worker while it is copied": ("moved", PREFILL, ("worker0",)),
    "prefill scheduler while it is copied": ("moved", PREFILL, ("scheduler",)),
    "prefill replica afterwards": ("decoded", PREFILL, ("scheduler", "worker0")),
    "decode replica before": ("routed", DECODE, ("scheduler", "worker0")),
    "decode replica at the offer": ("offered", DECODE, ("scheduler", "worker0")),
}
QUICK = list(POINTS)[:6]


@pytest.mark.anyio
@pytest.mark.parametrize(
    "point",
    [
        point
        if point in QUICK
        else pytest.param(point, marks=pytest.mark.slow(reason="six others are killed every time"))
        for point in POINTS
    ],
)
async def test_tokens_outlive(
    fleet: AsyncLLM, alone: tuple[list[list[int]], dict[str, Told]], point: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    when, number, names = POINTS[point]
    await all_run(fleet)
    await fleet.reset_prefix_cache()
    pids = [pid for name, pid in fleet.health().replicas[number].pids.items() if name in names]
    struck: list[str] = []

    def strike(now: str) -> None:
        if now == when and not struck:
            struck.append(now)
            kill(pids)

    def around(name: str, before: str, after: str) -> Callable[..., Any]:
        original = getattr(Dispatcher, name)

        def called(self: Dispatcher, *arguments: Any) -> None:
            strike(before)
            original(self, *arguments)
            strike(after)

        return called

    monkeypatch.setattr(Dispatcher, "submit", around("submit", "", "routed"))
    # The frontends have its bound method; what it calls is looked up each time.
    choose, adopt = Dispatcher._choose, actorllm.fleet.replica.ReplicaFrontend.adopt_handed_off

    def chosen(self: Dispatcher, *arguments: Any, goes_on: bool = False) -> int:
        if goes_on:
            strike("offered")
        return choose(self, *arguments, goes_on=goes_on)

    def adopted(self: Any, *arguments: Any) -> None:
        adopt(self, *arguments)
        strike("moved")

    monkeypatch.setattr(Dispatcher, "_choose", chosen)
    monkeypatch.setattr(actorllm.fleet.replica.ReplicaFrontend, "adopt_handed_off", adopted)
    found: dict[int, list[int]] = {}

    async def one(index: int) -> None:
        async for output in fleet.generate(PROMPTS[index], params(index, max_tokens=40)):
            found[index] = list(output.outputs[0].token_ids)
            if len(found[index]) >= 20:
                strike("decoded")

    async with anyio.create_task_group() as group:
        for index in range(len(PROMPTS)):
            group.start_soon(one, index)
    assert struck
    assert [found[index] for index in range(len(PROMPTS))] == alone[0]
    await until(lambda: all(one.state == "running" for one in fleet.health().replicas))


@pytest.mark.anyio
async def test_ranks_copy_their_parts(alone: tuple[list[list[int]], dict[str, Told]]) -> None:
    """Also those of a rank that takes the place of a dead one: nothing of before counts then."""
    async with AsyncLLM("storyteller", **OPTIONS, roles="1P1D", tensor_parallel_size=2) as llm:
        await all_run(llm)
        assert await streams(llm) == alone[0]
        prefill, decode = await transfers(llm)
        assert prefill["num_handed_off"] == len(PROMPTS)
        num_pulled = decode["num_pulled_blocks"]
        assert num_pulled > 0
        assert decode["num_lost_leases"] == 0
        kill([llm.health().replicas[PREFILL].pids["worker1"]])
        assert await streams(llm) == alone[0]
        await all_run(llm)
        await llm.reset_prefix_cache()
        assert await streams(llm) == alone[0]
        assert (await transfers(llm))[DECODE]["num_pulled_blocks"] > num_pulled


@pytest.mark.anyio
async def test_without_a_decoding_replica_the_other_one_does_all(
    fleet: AsyncLLM, alone: tuple[list[list[int]], dict[str, Told]]
) -> None:
    await all_run(fleet)
    for number in (DECODE, PREFILL):
        before = handed_off(fleet)
        await fleet.drain_replica(number)
        assert await streams(fleet) == alone[0]
        assert handed_off(fleet) == before
        await fleet.drain_replica(number, is_draining=False)


@pytest.mark.anyio
async def test_replicas_with_roles_are_as_many_as_there_are(fleet: AsyncLLM) -> None:
    with pytest.raises(InvalidParameterError, match="have roles, 2 in all"):
        await fleet.scale(3)


def test_roles_are_read() -> None:
    assert read_roles("1P2D") == ("prefill", "decode", "decode")
    assert read_roles("2p1d") == ("prefill", "prefill", "decode")
    assert read_roles(None) == ()
    config = EngineConfig.from_arguments("storyteller", roles="1P2D")
    assert (config.data_parallel_size, config.roles) == (3, ("prefill", "decode", "decode"))
    assert EngineConfig.from_json(config.to_json()) == config


CONNECTOR = {"kv_connector": "SharedMemoryConnector", "kv_role": "kv_both"}


def test_names_of_vllm() -> None:
    extra = {"kv_connector_extra_config": {"roles": "1P1D"}}
    for arguments in ({"kv_transfer_config": CONNECTOR | extra}, {"kv_transfer_config": CONNECTOR, "roles": "1P1D"}):
        assert EngineConfig.from_arguments("storyteller", **arguments).roles == ("prefill", "decode")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"roles": "2"}, "such as '1P2D'"),
        ({"roles": 2}, "such as '1P2D'"),
        ({"roles": "0P2D"}, "at least one replica of each kind"),
        ({"roles": "1P1D", "data_parallel_size": 3}, "are 2 replicas, and data_parallel_size=3"),
        ({"roles": "1P1D", "max_replicas": 4}, "max_replicas=4"),
        ({"roles": "1P1D", "nodes": ["a:1"]}, "nodes="),
        ({"roles": "1P1D", "pipeline_parallel_size": 2}, "with several stages"),
        ({"roles": "1P1D", "record": "/tmp/x"}, "with record="),
        ({"roles": "1P1D", "enable_prefix_caching": False}, "enable_prefix_caching=False"),
        ({"roles": "1P1D", "topology": "inline"}, "roles='1P1D' needs processes, .* use topology='process'"),
        ({"roles": "90P90D"}, "64 replicas"),
        (
            {"kv_transfer_config": {"kv_connector": "NixlConnector", "kv_role": "kv_both"}},
            "NixlConnector .* needs roles",
        ),
        ({"kv_transfer_config": {"kv_connector": "P2pNcclConnector", "kv_role": "kv_both"}}, "give roles='1P1D'"),
        ({"kv_transfer_config": CONNECTOR}, "needs roles"),
        ({"kv_transfer_config": CONNECTOR | {"kv_role": "kv_producer"}, "roles": "1P1D"}, "kv_role='kv_producer'"),
        ({"kv_transfer_config": CONNECTOR | {"kv_port": 1}, "roles": "1P1D"}, "'kv_port'"),
    ],
)
def test_what_roles_do_not_go_together_with_is_refused_by_name(arguments: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        EngineConfig.from_arguments("storyteller", **arguments)
