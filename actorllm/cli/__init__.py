"""The `actorllm` command: what runs it, and what it ends with. Bad input ends with one line on stderr and exit status 2."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from actorllm.errors import ActorLLMError, DownloadError, EngineError, RequestFailedError, TransportError

BUILDERS = ("serve", "run-batch", "generate", "chat", "bench")
"""Commands that build an engine from arguments, which may be spelled as vLLM spells them."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point: exit status 0, or what the command returns, 2 for bad input, 1 when the engine failed, 130 after Ctrl-C.

    Without cyclopts, which the extra `actorllm[cli]` installs, it says so and returns 2.
    """
    try:
        from actorllm.cli.commands import app
        from actorllm.types.command_words import spelled_out
        from actorllm.types.config_file import with_config

        words = sys.argv[1:] if arguments is None else list(arguments)
        given = with_config(spelled_out(words) if words[:1] and words[0] in BUILDERS else words)
        result = app(given, result_action="return_value", exit_on_error=True)
        if sys.stdout is not None:
            sys.stdout.flush()
    except ModuleNotFoundError as error:
        if error.name != "cyclopts":
            raise
        print("actorllm: the command needs cyclopts: pip install 'actorllm[cli]'", file=sys.stderr)
        return 2
    except ActorLLMError as error:
        print(f"actorllm: {type(error).__name__}: {error}", file=sys.stderr)
        return 1 if isinstance(error, EngineError | TransportError | RequestFailedError | DownloadError) else 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # what reads has seen enough; Python would try once more to write what is left, and say so
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return result if isinstance(result, int) else 0
