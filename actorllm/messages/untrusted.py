"""What the scheduler takes from a frontend that runs in another program.

The ring has checked that a frame is whole, and `messages.unpack` that it has the columns of its type. Messages from the engine's
own scheduler and frontend need no more checks; the scheduler checks workers against the table. An attached program may be wrong in
any way, and what it sends is worked on together with what others sent. So every value is checked here before anything uses it. The
checks are the table of messages (`messages.schema`), and what the table cannot say. Called by SchedulerActor for attached frontends
only.
"""

from __future__ import annotations

from collections.abc import Sequence

from actorllm.messages import U8, Ask, Message, Submit
from actorllm.messages.schema import FRONTEND, shown, violation
from actorllm.types.adapter_folder import is_digest
from actorllm.types.logits_processors.travel import decode_params
from actorllm.types.lora_request import MAX_PATH
from actorllm.types.objective import SLO
from actorllm.types.params import MAX_N

HASH_BYTES = 32

OWNER_VERBS = frozenset(
    (
        *("stage_weights", "discard_weights", "commit_weights", "transfer_weights", "call_workers", "sleep", "wake_up"),
        *("check_policy", "set_policy", "request_log"),
    )
)
"""What only the program that owns an engine asks of its scheduler: it alone can tell all replicas and every later process."""


def check_foreign(message: Message, vocab_size: int) -> None:
    """ValueError when no frontend of this version would have sent this."""
    wrong = violation(message, FRONTEND)
    if wrong is not None:
        raise ValueError(wrong)
    if isinstance(message, Ask) and message.verb in OWNER_VERBS:
        raise ValueError(f"the question {message.verb!r}, which only the owner of the engine asks")
    # What the table cannot say of a request: values of several fields, and what a field holds in a format of its own.
    if isinstance(message, Submit):
        if message.slo is not None and not _is_objective(message.slo):
            raise ValueError(f"Submit.slo={shown(message.slo)}")
        if any(not 0 <= token < vocab_size for token in message.stop_token_ids):
            raise ValueError(f"stop_token_ids={message.stop_token_ids!r:.80} with a vocabulary of {vocab_size}")
        if message.siblings.size >= MAX_N:
            raise ValueError(f"{message.siblings.size} siblings, and a request has at most {MAX_N} sequences")
        if message.processor_params.size and not _is_params(message.processor_params):
            raise ValueError(f"Submit.processor_params={shown(message.processor_params)}")
        if message.adapter is not None and not is_digest(message.adapter):
            raise ValueError(f"Submit.adapter={shown(message.adapter)}")
        if len(message.adapter_path or "") > MAX_PATH:
            raise ValueError(f"Submit.adapter_path={shown(message.adapter_path)}")
        if message.block_hashes.size % HASH_BYTES:
            raise ValueError(f"block_hashes of {message.block_hashes.size} bytes")


def _is_params(data: U8) -> bool:
    try:
        decode_params(data)
    except (TypeError, ValueError, RecursionError):
        return False
    return True


def _is_objective(value: Sequence[float | None]) -> bool:
    try:
        SLO.from_fields(value)
    except ValueError:
        return False
    return True
