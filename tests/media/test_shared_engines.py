"""Images with several replicas and in programs that joined: the tokens stay the same, kills included."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from actorllm import AsyncLLM, SamplingParams
from tests.media.small_models import generated, picture, save_qwen2_5_vl

GREEDY = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
TEXT = "See <|vision_start|><|image_pad|><|vision_end|> here, and go on."


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def whole(llm: AsyncLLM, seed: int) -> list[int]:
    last: Any = None
    async for output in llm.generate({"prompt": TEXT, "multi_modal_data": {"image": picture(seed)}}, GREEDY):
        last = output
    return list(last.outputs[0].token_ids)


@pytest.mark.slow(reason="starts two replicas, and an encoder in each of two programs")
@pytest.mark.timeout(300)
@pytest.mark.anyio
async def test_replicas_and_programs_that_joined_take_images(tmp_path: Path) -> None:
    folder = save_qwen2_5_vl(tmp_path / "model")
    expected = {seed: generated(folder, TEXT, [picture(seed)], 60) for seed in (1, 2)}
    owner = AsyncLLM(
        str(folder),
        dtype="float32",
        num_threads=1,
        max_model_len=256,
        num_gpu_blocks_override=100,
        name=f"media-{os.getpid()}",
    )
    try:
        assert await whole(owner, 1) == expected[1]
        await owner.scale(2)
        assert await whole(owner, 1) == expected[1]
        guest = AsyncLLM.attach(f"media-{os.getpid()}")
        try:
            assert [await whole(guest, seed) for seed in (1, 2)] == [expected[1], expected[2]]
        finally:
            guest.shutdown()
        workers = [pid for name, pid in owner._engine.pids.items() if "worker" in name]
        seen: list[int] = []
        async for output in owner.generate({"prompt": TEXT, "multi_modal_data": {"image": picture(2)}}, GREEDY):
            seen = list(output.outputs[0].token_ids)
            while workers:  # one of them is at it
                os.kill(workers.pop(), signal.SIGKILL)
        assert seen == expected[2]
    finally:
        owner.shutdown()
