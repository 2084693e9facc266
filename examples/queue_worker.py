"""A queue worker: jobs from an asyncio.Queue, a bounded number at once, each with a time limit and one more try.

A job that is wrong is not tried again. When the engine has died, the workers end, and `main` raises what it died of.
"""

import asyncio

from actorllm import AsyncLLM, SamplingParams
from actorllm.errors import EngineOverloaded, RequestError, RequestFailedError

JOBS = ["Once upon a time", "There was a fox", "The old king", "In a small village"]
NUM_AT_ONCE, LIMIT_S = 2, 30.0


async def story(llm: AsyncLLM, prompt: str) -> str:
    async with asyncio.timeout(LIMIT_S):  # `timeout=` of the request would give what there is by then
        output = await llm.complete(prompt, SamplingParams(max_tokens=24, seed=1))
    return output.outputs[0].text


async def work(llm: AsyncLLM, jobs: asyncio.Queue[tuple[str, int]], done: dict[str, str]) -> None:
    while True:
        prompt, num_tries = await jobs.get()
        try:
            done[prompt] = await story(llm, prompt)
        except (EngineOverloaded, RequestFailedError, TimeoutError) as error:
            if num_tries > 1:
                done[prompt] = f"[failed: {error!r}]"
            else:
                jobs.put_nowait((prompt, num_tries + 1))
        except RequestError as error:
            done[prompt] = f"[failed: {error!r}]"
        finally:
            jobs.task_done()


async def main(llm: AsyncLLM | None = None) -> dict[str, str]:
    """Stops the workers when every job is done."""
    jobs: asyncio.Queue[tuple[str, int]] = asyncio.Queue()
    done: dict[str, str] = {}
    for prompt in JOBS:
        jobs.put_nowait((prompt, 1))
    async with llm or AsyncLLM("storyteller") as engine, asyncio.TaskGroup() as tasks:
        workers = [tasks.create_task(work(engine, jobs, done)) for _ in range(NUM_AT_ONCE)]
        await jobs.join()
        for worker in workers:
            worker.cancel()
    return done


if __name__ == "__main__":
    for prompt, text in asyncio.run(main()).items():
        print(f"{prompt}{text!r}")
