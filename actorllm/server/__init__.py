"""The engine over HTTP, as clients of OpenAI's API and of vLLM's server know it. Needs the extra `actorllm[serve]`.

    from actorllm import AsyncLLM
    from actorllm.server import create_app

    my_app.mount("/llm", create_app(AsyncLLM("storyteller")))

Reading order: `protocol` (what may come), `sampling` (what the engine is asked), `completions` and `chat` (what goes back),
`answer` (how it goes: whole or streamed, and what happens when the client leaves), `operations` (everything that is not
generation), `guards` (keys and limits), `app` (all of it together), `warmup` (before the first request), `listener` and
`launcher` (a process of its own).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from actorllm.server.app import create_app
    from actorllm.server.warmup import warm_up

__all__ = ("create_app", "warm_up")


def __getattr__(name: str) -> Any:
    if name == "create_app":
        from actorllm.server.app import create_app

        return create_app
    if name == "warm_up":
        from actorllm.server.warmup import warm_up

        return warm_up
    raise AttributeError(f"module 'actorllm.server' has no attribute {name!r}")
