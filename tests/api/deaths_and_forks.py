"""What is tried alike for every kind of memory: a stream over the deaths of an engine's processes, and forks of a request."""

from __future__ import annotations

import os
import signal
from typing import Any

from actorllm import LLM, AsyncLLM, SamplingParams

FORKS = SamplingParams(temperature=0.9, n=3, seed=5, max_tokens=20, ignore_eos=True)


async def tokens_over_deaths(engine: AsyncLLM, prompt: Any, params: SamplingParams) -> list[int]:
    """Of a request whose worker is killed after 4 tokens, and whose scheduler is killed after 12."""
    tokens: list[int] = []
    victims = {4: "worker0", 12: "scheduler"}
    async for output in engine.generate(prompt, params):
        tokens = list(output.outputs[0].token_ids)
        for number in [number for number in victims if number <= len(tokens)][:1]:
            os.kill(engine._engine.pids[victims.pop(number)], signal.SIGKILL)
    assert not victims, f"the stream ended before {victims} was killed"
    return tokens


def check_forks(model: str, prompt: Any, options: dict[str, Any]) -> None:
    """Forks that share what their prompt has in memory have the streams of requests that share nothing."""

    def forked(**arguments: Any) -> list[list[int]]:
        with LLM(model, **options | arguments) as llm:
            (output,) = llm.generate([prompt], FORKS, use_tqdm=False)
            return [list(one.token_ids) for one in output.outputs]

    together = forked(max_num_seqs=4)
    assert together == forked(max_num_seqs=1, enable_prefix_caching=False)
    assert len({tuple(stream) for stream in together}) == 3
