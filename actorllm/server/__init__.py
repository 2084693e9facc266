"""The engine over HTTP, as clients of OpenAI's API and of vLLM's server know it. Needs the extra `actorllm[serve]`.

    from actorllm import AsyncLLM
    from actorllm.server import create_app

    my_app.mount("/llm", create_app(AsyncLLM("storyteller")))

Reading order: what may come (`protocol`), what the engine is asked (`sampling`), what goes back (`completions` and `chat`). Then
how it goes back: whole or streamed, and what happens when the client leaves (`answer`). Everything that is not generation is in
`operations`, keys and limits are in `guards`, and `app` puts all of it together. `warmup` runs before the first request;
`listener` and `launcher` make a process of its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from actorllm.server.app import create_app
    from actorllm.server.warmup import warm_up

__all__ = ("create_app", "warm_up")


def __getattr__(name: str) -> Any:
    if name == "create_app":
        try:
            from actorllm.server.app import create_app
        except ModuleNotFoundError as error:
            needs = f"serving needs more packages ({error.name}): pip install 'actorllm[serve]'"
            raise ModuleNotFoundError(needs, name=error.name) from error
        return create_app
    if name == "warm_up":
        from actorllm.server.warmup import warm_up

        return warm_up
    raise AttributeError(f"module 'actorllm.server' has no attribute {name!r}")
