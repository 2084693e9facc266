"""A LangGraph agent without a server; its text comes out of the graph. Needs `pip install langgraph 'actorllm[structured]'`."""

import asyncio
import json
import operator
from typing import Annotated, Any, TypedDict

from langgraph.config import get_stream_writer
from langgraph.graph import END, START, StateGraph

from actorllm import AsyncLLM, RequestOutputKind, SamplingParams, StructuredOutputsParams

FACTS = {"fox": "The fox lives in the forest.", "king": "The king has lost his crown."}
FIELDS = {"action": {"enum": ["look_up", "answer"]}, "about": {"enum": [*FACTS]}}
CHOICE = {"type": "object", "properties": FIELDS, "required": [*FIELDS], "additionalProperties": False}
CHOOSE = SamplingParams(
    max_tokens=64, structured_outputs=StructuredOutputsParams(json=CHOICE, disable_any_whitespace=True)
)
ANSWER = SamplingParams(max_tokens=64, output_kind=RequestOutputKind.DELTA)


class State(TypedDict):
    messages: Annotated[list[dict[str, str]], operator.add]
    choice: dict[str, str]


def agent(llm: AsyncLLM) -> Any:
    """The graph: choose an action, look something up and choose again, or answer."""

    async def choose(state: State) -> dict[str, Any]:
        async for output in llm.chat(state["messages"], CHOOSE):
            text = output.outputs[0].text  # grows; the grammar holds it to the schema
        return {"choice": json.loads(text)}

    async def look_up(state: State) -> dict[str, Any]:
        return {"messages": [{"role": "user", "content": FACTS[state["choice"]["about"]]}]}

    async def answer(state: State) -> dict[str, Any]:
        write, text = get_stream_writer(), ""
        async for output in llm.chat(state["messages"], ANSWER):
            write(output.outputs[0].text)
            text += output.outputs[0].text
        return {"messages": [{"role": "assistant", "content": text}]}

    graph = StateGraph(State).add_node(choose).add_node(look_up).add_node(answer)
    graph.add_edge(START, "choose").add_edge("look_up", "choose").add_edge("answer", END)
    graph.add_conditional_edges("choose", lambda state: state["choice"]["action"], ["look_up", "answer"])
    return graph.compile()


async def main() -> None:
    async with AsyncLLM("storyteller") as llm:
        asked = {"messages": [{"role": "user", "content": "Tell me of the fox."}]}
        async for mode, news in agent(llm).astream(asked, stream_mode=["updates", "custom"]):
            print(news if mode == "custom" else f"\n{news}\n", end="", flush=True)


if __name__ == "__main__":
    asyncio.run(main())
