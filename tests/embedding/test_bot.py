"""A bot of many chats and tenants, as a program of its own: users interrupt answers, too many messages come, and a worker dies."""

from __future__ import annotations

import json
import textwrap
from typing import Any

from tests.embedding.host_program import PRINT_PIDS, run_host

BOT = PRINT_PIDS + textwrap.dedent("""
    import asyncio, collections, json, os, signal
    from actorllm import AsyncLLM, SamplingParams
    from actorllm.errors import EngineOverloaded

    NUM_CHATS, NUM_TENANTS, LENGTH = 96, 6, 10

    def params(chat, max_tokens=LENGTH):
        return SamplingParams(max_tokens=max_tokens, ignore_eos=True, seed=chat, temperature=0.9)

    def prompt(chat):
        return f"Chat {chat % 12} says: once upon a time"

    async def until(condition):
        while not condition(await llm.stats()):
            await asyncio.sleep(0.01)

    def num_running(stats):
        return stats["scheduler"]["scheduler"]["num_running"]

    class Bot:
        # One answer at a time for each chat: a message that comes while the bot answers takes the place of the answer.
        def __init__(self):
            self.answers = {}
            self.texts = {}
            self.counts = collections.Counter()

        def message(self, chat, max_tokens=LENGTH):
            if (before := self.answers.get(chat)) is not None and not before.done():
                before.cancel()
            self.answers[chat] = asyncio.create_task(self.answer(chat, max_tokens))

        async def answer(self, chat, max_tokens):
            tenant = f"tenant{chat % NUM_TENANTS}"
            try:
                while True:
                    try:
                        stream = llm.generate(prompt(chat), params(chat, max_tokens), tenant=tenant)
                        async for output in stream:
                            self.texts[chat] = output.outputs[0].text
                        break
                    except EngineOverloaded:
                        self.counts["overloaded"] += 1
                        await asyncio.sleep(0.02)
                self.counts["answered"] += 1
            except asyncio.CancelledError:
                self.counts["interrupted"] += 1
                raise

        async def done(self):
            return await asyncio.gather(*self.answers.values(), return_exceptions=True)

    async def main():
        global llm
        llm = AsyncLLM("storyteller", scheduling_policy="vtc", dtype="float32", max_num_seqs=16, max_model_len=256,
                       kv_cache_memory_bytes=8 << 20, max_waiting_requests=24, num_threads=1)
        async with llm:
            await llm.start()
            print_pids(llm)
            # Alone: what each chat is to be told, whatever happens beside it.
            expected = {}
            for chat in range(0, NUM_CHATS, 8):
                expected[chat] = (await llm.complete(prompt(chat), params(chat))).outputs[0].text
            bot = Bot()
            for chat in range(NUM_CHATS):
                bot.message(chat, 200 if chat % 3 == 0 else LENGTH)
            await until(lambda stats: num_running(stats) == 16)
            for chat in range(0, NUM_CHATS, 3):
                bot.message(chat)  # the user did not wait for the end
            if KILL:
                os.kill(llm._engine.pids["worker0"], signal.SIGKILL)
            failed = [error for error in await bot.done() if error is not None]
            await until(lambda stats: num_running(stats) == 0)
            scheduler = (await llm.stats())["scheduler"]["scheduler"]
            wrong = [chat for chat, text in expected.items() if bot.texts[chat] != text]
            print(json.dumps({"counts": bot.counts, "failed": list(map(repr, failed)), "wrong": wrong,
                              "waiting": scheduler["num_waiting"], "used": scheduler["kv"]["usage"],
                              "deaths": scheduler["num_worker_losses"]}))

    asyncio.run(main())
""")


def told(kills_the_worker: bool) -> dict[str, Any]:
    host = run_host("-c", f"KILL = {kills_the_worker}\n{BOT}", is_copied=True)
    found: dict[str, Any] = json.loads(host.output.splitlines()[-1])
    return found


def test_each_chat_is_answered_as_if_it_were_alone() -> None:
    found = told(kills_the_worker=False)
    assert found["counts"]["answered"] == 96
    assert found["counts"]["interrupted"] > 0
    assert found["counts"]["overloaded"] > 0
    assert not found["failed"]
    assert not found["wrong"]
    assert found["waiting"] == found["used"] == 0, "an answer that nobody waits for is still under way"


def test_a_worker_that_dies_costs_no_chat_its_answer() -> None:
    found = told(kills_the_worker=True)
    assert found["deaths"] == 1
    assert found["counts"]["answered"] == 96
    assert not found["failed"]
    assert not found["wrong"]
    assert found["waiting"] == found["used"] == 0
