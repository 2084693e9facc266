"""A scheduling policy of one's own: tried in the simulator, then run unchanged on the engine.

Least relative slack (LARS, of Medha): how much of a request's time would be left over, in proportion to its work. Long
prompts get ahead of short ones in time, and not only when their deadline is near.
"""

import math

import anyio

from actorllm import SLO, AsyncLLM, SamplingParams
from actorllm.scheduling.cost_model import preset
from actorllm.scheduling.policy import KeyPolicy, register_policy
from actorllm.slo.simulator import EngineShape, simulate
from actorllm.slo.traces import SAMPLE, load_trace


class LeastRelativeSlack(KeyPolicy):
    tokens_per_s = 8000.0

    def key(self, sequence, view):  # lower is sooner
        due = math.inf if sequence.slo is None else sequence.arrival + sequence.slo.ttft_limit(sequence.num_prompt)
        slack = due - view.now - view.remaining(sequence) / self.tokens_per_s
        return (slack / sequence.num_prompt,)

    def key_horizon(self, sequence, view):  # the key changes with time, so the order is made anew ten times a second
        return view.now + 0.1


register_policy("lars", LeastRelativeSlack)


def in_the_simulator() -> None:
    workload = load_trace(SAMPLE).workload.repeated(600).at_rate(2.5)
    shape = EngineShape(num_blocks=25_000, max_num_batched_tokens=512)
    for policy in ("fcfs", "lars"):
        run = simulate(workload, shape, preset("a100-llama-3-8b"), policy=policy)
        print(f"{policy}: {run.evaluate().worst('deadline'):.0%} of the worst class keep their objective", flush=True)


async def on_the_engine() -> None:
    # A class of the program itself is there only for a scheduler in the same process; one in a module is for any.
    async with AsyncLLM("storyteller", topology="inline", scheduling_policy="lars") as llm:
        output = await llm.complete(
            "Once upon a time", SamplingParams(max_tokens=30, seed=3), slo=SLO(ttft=1.0, tpot=0.05)
        )
    print(f"lars: Once upon a time{output.outputs[0].text}")


if __name__ == "__main__":
    in_the_simulator()
    anyio.run(on_the_engine)
