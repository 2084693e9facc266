"""Hundreds of adapters pass through an engine under load: what it holds does not grow with them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from actorllm import AsyncLLM, LoRARequest, RequestOutput, SamplingParams
from tests.model.adapters.lora_folders import write_adapter

LAYERS = {f"model.layers.{i}.self_attn.o_proj": (256, 256) for i in range(4)}
ENGINE: dict[str, Any] = {"dtype": "float32", "num_threads": 1, "enable_lora": True, "max_loras": 4, "max_cpu_loras": 6}
PROMPT = "Once upon a time there was"
LONG_PROMPT = f"{PROMPT} a fox who lived in a forest, and every morning"


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def num_descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


async def answer_of(llm: AsyncLLM, lora: LoRARequest | None, prompt: str, num_tokens: int) -> RequestOutput:
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    return [output async for output in llm.generate(prompt, params, lora_request=lora)][-1]


async def text_of(llm: AsyncLLM, lora: LoRARequest | None) -> str:
    return (await answer_of(llm, lora, PROMPT, 8)).outputs[0].text


@pytest.mark.timeout(600)
@pytest.mark.slow(reason="200 adapters")
async def test_two_hundred_adapters_leave_nothing_behind(tmp_path: Path) -> None:
    loras = []
    for number in range(1, 201):
        write_adapter(tmp_path / str(number), LAYERS, seed=number, size=2.0, r=8)
        loras.append(LoRARequest(str(number), number, str(tmp_path / str(number))))
    async with AsyncLLM("storyteller", **ENGINE) as llm:
        background = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=900, min_tokens=900))
        await anext(background)
        first = [await text_of(llm, lora) for lora in loras[:20]]
        assert len(set(first)) > 10
        pids = list(llm._engine.pids.values())
        before = {pid: (resident_bytes(pid), num_descriptors(pid)) for pid in pids}
        for lora in loras[20:]:
            await text_of(llm, lora)
            if lora.lora_int_id % 3 == 0:
                await llm.remove_lora(lora.lora_int_id)
        assert len(await llm.list_loras()) <= 6
        assert [await text_of(llm, lora) for lora in loras[:20]] == first
        async for _ in background:
            pass
        for pid in pids:
            size, count = before[pid]
            assert num_descriptors(pid) <= count
            # An adapter has 100 kB: 180 of them that were kept would be 20 MB.
            assert resident_bytes(pid) - size < 10 << 20
        stats = (await llm.stats())["scheduler"]["scheduler"]
        assert stats["num_running"] == stats["num_waiting"] == 0
        assert stats["kv"]["num_free"] == stats["kv"]["num_blocks"]


async def test_one_number_in_two_attached_programs_is_two_adapters(tmp_path: Path) -> None:
    """Nothing is shared under it: neither tensors nor cached KV."""
    for seed, name in enumerate("ab"):
        write_adapter(tmp_path / name, LAYERS, seed=seed, size=2.0)
    a, b = (LoRARequest("mine", 1, str(tmp_path / name)) for name in "ab")
    name = f"adapters-{os.getpid()}"
    async with AsyncLLM("storyteller", topology="inline", name=name, block_size=16, **ENGINE) as owner:

        async def asked(llm: AsyncLLM, lora: LoRARequest) -> tuple[str, bool]:
            """The text, and whether KV was found for the prompt."""
            output = await answer_of(llm, lora, LONG_PROMPT, 24)
            return output.outputs[0].text, bool(output.num_cached_tokens)

        texts = [(await asked(owner, lora))[0] for lora in (a, b)]
        assert texts[0] != texts[1]
        assert await owner.reset_prefix_cache()
        async with AsyncLLM.attach(name) as one, AsyncLLM.attach(name) as other:
            for is_found in (False, True):
                assert await asked(one, a) == (texts[0], is_found)
                assert await asked(other, b) == (texts[1], is_found)
            assert await one.remove_lora(1)
            assert await other.list_loras() == {1}
            assert await asked(other, b) == (texts[1], True)
