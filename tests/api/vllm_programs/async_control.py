"""Requests that are aborted, alone and together, and an engine that is paused and goes on; prompts as token ids."""

import asyncio
import sys

from vllm import AsyncEngineArgs, RequestOutput, SamplingParams, TokensPrompt
from vllm.v1.engine.async_llm import AsyncLLM

LONG = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)
SHORT = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


async def last_output(
    engine: AsyncLLM, prompt, params: SamplingParams, request_id: str, started: asyncio.Event | None = None
) -> RequestOutput:
    final_output = None
    async for output in engine.generate(prompt, params, request_id):
        final_output = output
        if started is not None and output.outputs[0].token_ids:
            started.set()
    assert final_output is not None
    assert final_output.finished
    return final_output


def start(engine: AsyncLLM, prompt, params: SamplingParams, request_id: str) -> tuple[asyncio.Task, asyncio.Event]:
    started = asyncio.Event()
    return asyncio.create_task(last_output(engine, prompt, params, request_id, started)), started


async def abort_one_and_several(engine: AsyncLLM, prompt) -> None:
    tasks = {}
    for request_id in ("one", "two", "three", "four"):
        tasks[request_id], started = start(engine, prompt, LONG, request_id)
        await started.wait()
    await engine.abort("one")
    aborted = await tasks["one"]
    print("one:", aborted.outputs[0].finish_reason)
    await engine.abort(request_id=["two", "three", "nobody"])
    for request_id in ("two", "three"):
        output = (await tasks[request_id]).outputs[0]
        assert output.finish_reason == "abort"
        assert 0 < len(output.token_ids) < 400
    print("four:", (await tasks["four"]).outputs[0].finish_reason)


async def pause_and_resume(engine: AsyncLLM, prompt, text: str) -> None:
    # in flight: ended
    task, started = start(engine, prompt, LONG, "ended-by-pause")
    await started.wait()
    await engine.pause_generation()
    print("paused:", await engine.is_paused(), (await task).outputs[0].finish_reason)
    # new: waits until the engine goes on
    task, started = start(engine, prompt, SHORT, "waits-for-resume")
    await asyncio.sleep(0.05)
    assert not started.is_set()
    await engine.resume_generation()
    assert (await task).outputs[0].text == text
    # in flight: finishes first
    task, started = start(engine, prompt, SHORT, "finishes-first")
    await started.wait()
    await engine.pause_generation(mode="wait")
    assert (await task).outputs[0].text == text
    await engine.resume_generation()
    # in flight: kept as it is, and goes on
    task, started = start(engine, prompt, SHORT, "goes-on")
    await started.wait()
    await engine.pause_generation(mode="keep", clear_cache=False)
    assert await engine.is_paused()
    await engine.resume_generation()
    assert (await task).outputs[0].text == text
    print("resumed:", await engine.is_paused())


async def main() -> None:
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model=sys.argv[1], max_model_len=512, enforce_eager=True))
    try:
        tokenizer = engine.get_tokenizer()
        prompt = TokensPrompt(prompt_token_ids=tokenizer.encode("Once upon a time"))
        output = (await last_output(engine, prompt, SHORT, "by-ids")).outputs[0]
        assert tokenizer.decode(output.token_ids, skip_special_tokens=True).strip() == output.text.strip()
        assert (await last_output(engine, "Once upon a time", SHORT, "by-text")).outputs[0].text == output.text
        await abort_one_and_several(engine, prompt)
        await pause_and_resume(engine, prompt, output.text)
        await engine.reset_prefix_cache()
        await engine.check_health()
    finally:
        engine.shutdown()


if __name__ == "__main__":
    asyncio.run(main())
