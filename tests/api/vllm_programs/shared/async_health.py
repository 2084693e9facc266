"""What servers ask of an engine."""

import asyncio
import sys

from vllm import AsyncEngineArgs
from vllm.v1.engine.async_llm import AsyncLLM


async def main(model: str) -> None:
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model=model, dtype="float32", max_model_len=256))
    try:
        await engine.check_health()
        tokenizer = engine.get_tokenizer()
        tokenizer = await tokenizer if asyncio.iscoroutine(tokenizer) else tokenizer
        print(engine.is_running, engine.errored, engine.model_config.max_model_len, tokenizer.eos_token)
    finally:
        engine.shutdown()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
