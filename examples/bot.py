"""A bot with hundreds of streams: one engine, a fair share for each tenant, and a limit of open streams per tenant."""

import asyncio
from collections import Counter, defaultdict

from actorllm import AsyncLLM, SamplingParams
from actorllm.errors import RequestError

NUM_TENANTS, NUM_MESSAGES, NUM_OPEN = 10, 20, 8


class Bot:
    """Answers messages. At most NUM_OPEN of a tenant are under way; its others wait here."""

    def __init__(self, llm: AsyncLLM) -> None:
        self.llm = llm
        self.open = defaultdict[str, asyncio.Semaphore](lambda: asyncio.Semaphore(NUM_OPEN))

    async def answer(self, tenant: str, message: str) -> str:
        text = ""
        async with self.open[tenant]:
            async for output in self.llm.generate(message, SamplingParams(max_tokens=8), tenant=tenant):
                text = output.outputs[0].text  # send it to the user as it grows
        return text


async def main(llm: AsyncLLM | None = None) -> Counter[str]:
    """How many answers each tenant got."""
    answered = Counter[str]()

    async def talk(bot: Bot, tenant: str, number: int) -> None:
        try:
            if await bot.answer(tenant, f"Message {number} of {tenant}: tell me more"):
                answered[tenant] += 1
        except RequestError as error:  # of this message; the others go on
            print(f"{tenant}: {error}")

    async with llm or AsyncLLM("storyteller", scheduling_policy="vtc") as engine:
        bot = Bot(engine)
        async with asyncio.TaskGroup() as tasks:
            for number in range(NUM_MESSAGES):
                for tenant in range(NUM_TENANTS):
                    tasks.create_task(talk(bot, f"tenant{tenant}", number))
    return answered


if __name__ == "__main__":
    print(*(f"{tenant}: {number}" for tenant, number in sorted(asyncio.run(main()).items())), sep="\n")
