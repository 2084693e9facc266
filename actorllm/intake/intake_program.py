"""The main program of an intake process: renders conversations and tokenizes texts, one after the other, until it is killed.

Run as `python -P intake_program.py <socket> <pid of the owner> <bytes of memory> <sys.path as JSON> [<module>]`, by path, so that
the owner's `__main__` is never imported. A module has an `obey` and a PROCESS_NAME of its own, and its memory is not limited.
Without one, it loads neither torch nor an engine, and each library when it is first needed.

Frames: a head (kind, length), then so many bytes.

    owner → program    a JSON list: ["render", folder, most, fields of the conversation]
                       or ("encode" or "encode_within", folder, arguments ...]
    program → owner    BEGUN when it has loaded what it needs · then RESULT, text or int32 ids, or ERROR, "class\\nmessage"

Started by `intake_process` only.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import signal
import socket
import struct
import sys
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from actorllm.text.chat_template import ChatTemplate
    from actorllm.text.tokenizer import Tokenizer

HEAD = struct.Struct("<BQ")
BEGUN, RESULT, ERROR = 1, 2, 3

SUFFIXES = (".json", ".jinja", ".model", ".txt")
"""Of the files that a tokenizer is read from."""
FolderState: TypeAlias = tuple[tuple[str, int, int, int], ...]

NOT_VALID = "the chat template made text that is not valid Unicode"


def main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    sys.path[:] = json.loads(sys.argv[4])
    from actorllm.actors.child import FOR_THE_OWNER, die_with_owner, name_process

    die_with_owner(int(sys.argv[2]))
    other = importlib.import_module(sys.argv[5]) if len(sys.argv) > 5 else None
    name_process("actor:intake" if other is None else other.PROCESS_NAME)
    answer = obey if other is None else other.obey
    control.set_inheritable(False)
    for number in FOR_THE_OWNER:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FOR_THE_OWNER)
    memory = int(sys.argv[3])
    if other is None:
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    while True:
        _, length = HEAD.unpack(exactly(control, HEAD.size))
        request = json.loads(exactly(control, length))
        try:
            kind, payload = RESULT, answer(control, *request)
        except BaseException as error:  # a panic in Rust, no memory: all of them belong to the request
            kind, payload = ERROR, describe(error)
        del request
        send(control, kind, payload)


def exactly(control: socket.socket, length: int) -> bytes:
    data = bytearray()
    while len(data) < length:
        piece = control.recv(min(length - len(data), 1 << 20))
        if not piece:
            os._exit(0)  # the owner is gone, or is done with this process
        data += piece
    return bytes(data)


def send(control: socket.socket, kind: int, payload: bytes) -> None:
    control.sendall(HEAD.pack(kind, len(payload)) + payload)


def obey(control: socket.socket, operation: str, folder: str, *arguments: Any) -> bytes:
    if operation == "render":
        return render(control, folder, *arguments)
    tokenizer = tokenizer_of(folder, state_of(folder))
    send(control, BEGUN, b"")
    method = tokenizer.encode if operation == "encode" else tokenizer.encode_within
    ids: bytes = method(*arguments).tobytes()
    return ids


def render(control: socket.socket, folder: str, most: int, fields: dict[str, Any]) -> bytes:
    import transformers.utils.chat_template_utils  # noqa: F401 - takes long, and is none of the request's time

    from actorllm.errors import InvalidPromptError
    from actorllm.text.chat_template import Conversation

    template = template_of(folder, state_of(folder))
    send(control, BEGUN, b"")
    text = template.render(Conversation(**fields))
    if len(text) > most:
        raise InvalidPromptError(
            f"the prompt has {len(text)} characters, and at most {most} are taken (max_prompt_characters); shorten it"
        )
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise InvalidPromptError(NOT_VALID) from error


def state_of(folder: str) -> FolderState:
    """What changes with the files of a tokenizer: those of an adapter may be written anew."""
    try:
        with os.scandir(folder) as entries:
            found = [(entry.name, entry.stat()) for entry in entries if entry.name.endswith(SUFFIXES)]
    except OSError:
        return ()
    return tuple(sorted((name, stat.st_ino, stat.st_size, stat.st_mtime_ns) for name, stat in found))


@lru_cache(maxsize=4)  # adapters may have their own
def tokenizer_of(folder: str, state: FolderState) -> Tokenizer:
    from actorllm.text.tokenizer import Tokenizer

    return Tokenizer(folder)


@lru_cache(maxsize=4)
def template_of(folder: str, state: FolderState) -> ChatTemplate:
    from actorllm.text.chat_template import ChatTemplate

    return ChatTemplate(tokenizer_of(folder, state))


def describe(error: BaseException) -> bytes:
    from actorllm.errors import ActorLLMError

    if isinstance(error, ActorLLMError):
        name, message = type(error).__name__, str(error)
    elif isinstance(error, MemoryError):
        name, message = "InvalidPromptError", "reading this prompt takes more memory than it may; change or shorten it"
    else:
        name, message = "InvalidPromptError", f"this prompt cannot be read ({type(error).__name__}: {error!s:.200})"
    return f"{name}\n{message}".encode(errors="replace")


if __name__ == "__main__":
    main()
