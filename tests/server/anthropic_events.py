"""Streams of Anthropic's API, put together as its client does it."""

from __future__ import annotations

import json
from typing import Any

import httpx
import orjson

MESSAGES = [{"role": "user", "content": "Once upon a time"}]
BODY = {"model": "storyteller", "messages": MESSAGES, "max_tokens": 12, "temperature": 0}


async def streamed(client: httpx.AsyncClient, **fields: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The message that the events make together, as Anthropic's client puts it together; and the events."""
    response = await client.post("/v1/messages", json={**BODY, **fields, "stream": True})
    assert response.status_code == 200, response.text
    events = []
    for block in response.text.split("\n\n")[:-1]:
        kind, data = block.split("\n")
        events.append(orjson.loads(data.removeprefix("data: ")))
        assert kind == f"event: {events[-1]['type']}"
    message: dict[str, Any] = {}
    parts = ""
    for event in events:
        match event["type"]:
            case "message_start":
                message = event["message"]
            case "content_block_start":
                assert event["index"] == len(message["content"])
                message["content"].append(event["content_block"])
                parts = ""
            case "content_block_delta":
                delta, block = event["delta"], message["content"][event["index"]]
                if delta["type"] == "text_delta":
                    block["text"] += delta["text"]
                elif delta["type"] == "thinking_delta":
                    block["thinking"] += delta["thinking"]
                else:
                    parts += delta["partial_json"]
                    block["input"] = parts
            case "content_block_stop":
                if (block := message["content"][event["index"]])["type"] == "tool_use":
                    block["input"] = json.loads(block["input"])
            case "message_delta":
                message |= event["delta"]
                message["usage"] |= event["usage"]
    return message, events


def alike(message: dict[str, Any]) -> dict[str, Any]:
    """Without what differs from one request to the next."""
    content = [{name: value for name, value in block.items() if name != "id"} for block in message["content"]]
    usage = message["usage"]
    num_input = usage["input_tokens"] + usage["cache_read_input_tokens"]
    return {**message, "id": None, "content": content, "usage": [num_input, usage["output_tokens"]]}
