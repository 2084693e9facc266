"""Logits processors of the application: classes that change logits before a token is chosen, by vLLM's two interfaces.

An engine takes them by `logits_processors=`; its worker builds and calls them (`actorllm.model.processors`). `interface` has the
classes to derive from, `paths` how a worker finds a class, `travel` how a request's parameters get to it. Nothing here imports
torch.
"""

from actorllm.types.logits_processors.interface import (
    AdapterLogitsProcessor,
    AddedRequest,
    BatchUpdate,
    LogitsProcessor,
    MoveDirectionality,
    MovedRequest,
    RemovedRequest,
    RequestLogitsProcessor,
    process_dict_updates,
)

__all__ = [
    "AdapterLogitsProcessor",
    "AddedRequest",
    "BatchUpdate",
    "LogitsProcessor",
    "MoveDirectionality",
    "MovedRequest",
    "RemovedRequest",
    "RequestLogitsProcessor",
    "process_dict_updates",
]
