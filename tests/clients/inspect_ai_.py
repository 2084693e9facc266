"""inspect-ai: a task with two samples, scored, and a tool that must be called."""

from __future__ import annotations

import os
import tempfile

from checks import MODEL, TEXT, URL, check, run
from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.model import GenerateConfig, get_model
from inspect_ai.scorer import includes
from inspect_ai.solver import generate
from inspect_ai.tool import ToolInfo, ToolParams

os.environ |= {"STORYTELLER_API_KEY": "none", "STORYTELLER_BASE_URL": f"{URL}/v1", "INSPECT_DISPLAY": "none"}
NAME = f"openai-api/storyteller/{MODEL}"


@check
def task() -> None:
    made = Task([Sample(TEXT, target="e"), Sample("The king", target="e")], solver=generate(), scorer=includes())
    with tempfile.TemporaryDirectory() as folder:
        (log,) = eval(made, model=NAME, max_tokens=16, log_dir=folder, display="none")
    assert (log.status, log.results.completed_samples) == ("success", 2)


@check
async def tools() -> None:
    from inspect_ai.util import JSONSchema

    place = ToolParams(properties={"city": JSONSchema(type="string", enum=["Berlin", "Paris"])}, required=["city"])
    model = get_model(NAME, config=GenerateConfig(max_tokens=300))
    answer = await model.generate(
        TEXT, tools=[ToolInfo(name="weather", description="", parameters=place)], tool_choice="any"
    )
    assert answer.message.tool_calls[0].arguments["city"] in ("Berlin", "Paris")


run("inspect-ai", "openai")
