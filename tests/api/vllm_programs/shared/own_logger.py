"""A logger of statistics of the application's own."""

import asyncio
import sys

from vllm import AsyncEngineArgs, SamplingParams
from vllm.config import VllmConfig
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.metrics.loggers import StatLoggerBase
from vllm.v1.metrics.stats import IterationStats, SchedulerStats

SEEN: dict[str, int] = {"tokens": 0, "finished": 0, "first": 0}


class Tally(StatLoggerBase):
    def __init__(self, vllm_config: VllmConfig, engine_index: int = 0) -> None:
        self.length = vllm_config.model_config.max_model_len

    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        iteration_stats: IterationStats | None,
        mm_cache_stats: object = None,
        engine_idx: int = 0,
    ) -> None:
        if iteration_stats is not None:
            SEEN["tokens"] += iteration_stats.num_generation_tokens
            SEEN["first"] += len(iteration_stats.time_to_first_tokens_iter)
            SEEN["finished"] += len(iteration_stats.finished_requests)

    def log_engine_initialized(self) -> None:
        print("begins", self.length)


async def main(model: str) -> None:
    args = AsyncEngineArgs(model=model, dtype="float32", max_model_len=256)
    engine = AsyncLLM.from_engine_args(args, stat_loggers=[Tally])
    try:
        params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
        for name in ("a", "b"):
            async for _ in engine.generate("The dog", params, name):
                pass
        await asyncio.sleep(0.1)
        print(SEEN)
    finally:
        engine.shutdown()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
