"""What belongs to the whole process of an application is the same before, while and after it has an engine."""

from __future__ import annotations

import pytest

from tests.actors.scripted_topology import LIGHT_WORKERS
from tests.embedding.host_program import run_host
from tests.embedding.snapshots import ASYNC, SNAPSHOT

LIBRARIES = "import numpy, sympy, torch, transformers\ntorch.zeros(4).sum()\ntorch.set_num_threads(3)\n"
"""What an inline engine imports changes some of it, whoever imports it."""

IMPORT = """
import numpy  # its own filters of warnings are not ours
before = snapshot()
import actorllm
actorllm.LLM, actorllm.AsyncLLM, actorllm.SamplingParams
compare(before, "import")
"""

BLOCKING = """
from actorllm import LLM, SamplingParams
before = snapshot()
llm = LLM("storyteller", topology=TOPOLOGY, num_threads=1)
compare(before, "start")
params = SamplingParams(max_tokens=8, ignore_eos=True, temperature=1.0)
outputs = llm.generate(["Once upon a time", "The fox"], params)  # with a progress bar
compare(before, "run")
llm.shutdown()
compare(before, "end")
assert not [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()], threading.enumerate()
multiprocessing.set_start_method("forkserver")
logging.basicConfig(level=logging.INFO)
assert logging.getLogger().handlers
"""

STEPPED = """
from actorllm import EngineArgs, LLMEngine, SamplingParams
faulthandler.register(signal.SIGINT, chain=True)  # in front of Python's handler
signal.siginterrupt(signal.SIGINT, False)
before = snapshot()
llm = LLMEngine.from_engine_args(EngineArgs("storyteller", topology=TOPOLOGY, num_threads=1))
compare(before, "start")
llm.add_request("a", "Once upon a time", SamplingParams(max_tokens=8))
while llm.has_unfinished_requests():
    llm.step()
    compare(before, "step")
llm.shutdown()
compare(before, "end")
"""


FEATURES = """
from actorllm import AsyncLLM, SamplingParams
short = SamplingParams(max_tokens=4)
several = SamplingParams(n=2, max_tokens=4, logprobs=2, prompt_logprobs=1, stop=["."])
regex = SamplingParams(max_tokens=9, structured_outputs={"regex": "[a-z]{3}"})
template = "{% for message in messages %}{{ message.content }} {% endfor %}"
uses = {
    "a conversation": lambda llm: llm.chat([{"role": "user", "content": "Hello"}], short, chat_template=template),
    "several samples": lambda llm: llm.generate("Once", several),
    "a long text": lambda llm: llm.generate("once " * 50_000, short, tokenization_kwargs={"truncate_prompt_tokens": 10}),
}
if TOPOLOGY == "inline":  # otherwise it is the scheduler's
    uses["a grammar"] = lambda llm: llm.generate("Once", regex)
async def main():
    inside = snapshot()
    async with AsyncLLM("storyteller", topology=TOPOLOGY, num_threads=1) as llm:
        for name, use in uses.items():
            async for output in use(llm):
                compare(inside, name)
        if TOPOLOGY == "inline":  # it imports transformers
            llm.get_tokenizer()
        await llm.unload()
        compare(inside, "unload")
        await llm.complete("Once", short)
        await llm.drain()
        compare(inside, "drain")
before = snapshot()
asyncio.run(main())
compare(before, "end of the loop")
"""


@pytest.mark.parametrize(
    "program", [ASYNC, BLOCKING, STEPPED, FEATURES], ids=["AsyncLLM", "LLM", "LLMEngine", "what else there is"]
)
@pytest.mark.parametrize("topology", ["process", "inline"])
def test_nothing_of_the_process_is_changed(program: str, topology: str) -> None:
    libraries = LIBRARIES if topology == "inline" else LIGHT_WORKERS
    source = SNAPSHOT + f"TOPOLOGY = {topology!r}\n" + libraries + program
    host = run_host("-c", source)
    assert "CHANGED" not in host.output, host.output


@pytest.mark.parametrize("several", ["data_parallel_size=2, ready_replicas=2", "tensor_parallel_size=2"])
def test_several_workers_change_nothing(several: str) -> None:
    how = "topology=TOPOLOGY"
    assert how in ASYNC
    program = LIGHT_WORKERS + SNAPSHOT + ASYNC.replace(how, several)
    host = run_host("-c", program)
    assert "CHANGED" not in host.output, host.output


def test_an_import_changes_nothing() -> None:
    host = run_host("-c", SNAPSHOT + IMPORT)
    assert host.output == ""


def test_the_snapshot_sees_a_change() -> None:
    host = run_host("-c", SNAPSHOT + "before = snapshot()\nos.environ['NEW'] = '1'\ncompare(before, 'here')\n")
    assert host.output.startswith("CHANGED here environment")


def test_an_import_loads_no_library_that_is_slow_to_load() -> None:
    slow = ("torch", "transformers", "triton", "numpy", "tokenizers", "asyncio", "fastapi", "pydantic")
    host = run_host("-c", f"import sys, actorllm\nprint(sorted(set({slow!r}) & set(sys.modules)))")
    assert host.output == "[]\n"
