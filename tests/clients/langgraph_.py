"""langgraph: a graph with a model and a tool, run whole and streamed."""

from __future__ import annotations

from typing import Literal

from checks import MODEL, TEXT, URL, check, run
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode


@tool
def weather(city: Literal["Berlin", "Paris"]) -> str:
    """The weather of a city."""
    return f"sunny in {city}"


def graph(use_responses_api: bool = False) -> object:
    chat = ChatOpenAI(
        model=MODEL,
        base_url=f"{URL}/v1",
        api_key="none",
        max_tokens=300,
        max_retries=0,
        use_responses_api=use_responses_api,
    )
    # Several calls of a model that means nothing may be cut off by max_tokens.
    model = chat.bind_tools([weather], tool_choice="required", parallel_tool_calls=False)

    async def ask(state: MessagesState) -> dict:
        return {"messages": [await model.ainvoke(state["messages"])]}

    made = StateGraph(MessagesState)
    made.add_node("ask", ask)
    made.add_node("tools", ToolNode([weather]))
    made.add_edge(START, "ask")
    made.add_edge("ask", "tools")
    made.add_edge("tools", END)
    return made.compile()


@check
async def whole_and_streamed() -> None:
    for use_responses_api in (False, True):
        state = await graph(use_responses_api).ainvoke({"messages": [("user", TEXT)]})
        assert state["messages"][-1].content in ("sunny in Berlin", "sunny in Paris")
    pieces = [piece async for piece, _ in graph().astream({"messages": [("user", TEXT)]}, stream_mode="messages")]
    assert len(pieces) > 3
    assert pieces[-1].content.startswith("sunny")


run("langgraph", "langchain-openai")
