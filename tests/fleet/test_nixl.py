"""KV that goes from one replica to another by NIXL: the same tokens, also after a death of the lender."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from actorllm import AsyncLLM
from actorllm.config import EngineConfig
from actorllm.errors import ConfigError
from actorllm.types import roles
from tests.fleet.handing_off import DECODE, OPTIONS, PREFILL, PROMPTS, hand_off_every_prompt, streams, transfers
from tests.fleet.streams import all_run, kill

CONNECTOR: dict[str, Any] = {
    "kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_connector_extra_config": {"roles": "1P1D"},
}  # fmt: skip


def test_without_nixl_the_engine_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roles, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'actorllm\[nixl\]'"):
        EngineConfig.from_arguments("storyteller", kv_transfer_config=CONNECTOR)


@pytest.fixture
def every_prompt_is_handed_off() -> Iterator[None]:
    yield from hand_off_every_prompt()


@pytest.mark.anyio
@pytest.mark.leaks_by_module
@pytest.mark.timeout(240)
@pytest.mark.slow(reason="starts UCX in each worker")
@pytest.mark.usefixtures("every_prompt_is_handed_off")
async def test_tokens_are_those_of_one_replica() -> None:
    pytest.importorskip("nixl", reason="NIXL is not installed (pip install nixl)")
    async with AsyncLLM("storyteller", **OPTIONS) as llm:
        alone = await streams(llm)
    async with AsyncLLM("storyteller", **OPTIONS, kv_transfer_config=CONNECTOR) as llm:
        await all_run(llm)
        assert await streams(llm) == alone
        prefill, decode = await transfers(llm)
        assert prefill["num_handed_off"] == len(PROMPTS)
        assert decode["num_pulled_blocks"] > 0
        assert decode["num_lost_leases"] == 0
        kill([llm.health().replicas[PREFILL].pids["worker0"]])
        assert await streams(llm) == alone
        await all_run(llm)
        await llm.reset_prefix_cache()
        assert await streams(llm) == alone
        assert (await transfers(llm))[DECODE]["num_pulled_blocks"] > decode["num_pulled_blocks"]
