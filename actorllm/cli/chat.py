"""`actorllm chat`: a conversation on the terminal.

Owns the history, which holds every question that was answered, and the commands that begin with a slash. A message that
cannot be answered leaves the history as it was. Called by the command line.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from actorllm.cli.options import EngineFlags, GenerationRun, SamplingOptions
from actorllm.errors import ConfigError, InvalidPromptError, RequestError, RequestFailedError, nearest_name

if TYPE_CHECKING:
    from actorllm.client.engine import Engine
    from actorllm.types.params import SamplingParams

COMMANDS = {"/clear": "forget the conversation", "/exit": "end it, as does the end of the input", "/help": "this"}


def chat(
    *,
    engine_options: EngineFlags = EngineFlags(),  # noqa: B008 - frozen
    sampling: SamplingOptions = SamplingOptions(),  # noqa: B008 - frozen
    system: str | None = None,
    once: str | None = None,
    chat_template: str | None = None,
    stats: bool = False,
) -> None:
    """Talk to a model: each line of standard input is a message, each answer is streamed to standard output.

    An answer has 512 tokens at most, unless the model's author or --max-tokens says otherwise. Lines that begin with a
    slash are commands: /clear, /exit, /help. Ctrl-C ends an answer.

    Parameters
    ----------
    system
        What the model is told before the conversation.
    once
        Send this one message, print the answer, and end.
    chat_template
        A Jinja template, or a file with one, instead of the model's own.
    stats
        Print time to first token and tokens per second to standard error after each answer.
    """
    from actorllm.types.params import RequestOutputKind

    engine = engine_options.make_engine()
    try:
        params = sampling.params(engine, 512, output_kind=RequestOutputKind.DELTA)
        talk = Talk(engine, params, system, _template(chat_template), stats)
        if once is not None:
            talk.say(once)
        else:
            _talk(talk)
    finally:
        engine.shutdown()


class Talk:
    """A conversation so far."""

    def __init__(
        self, engine: Engine, params: SamplingParams, system: str | None, template: str | None, shows_stats: bool
    ) -> None:
        self._engine = engine
        self._params = params
        self._template = template
        self._shows_stats = shows_stats
        self._opening = [] if system is None else [{"role": "system", "content": system}]
        self.messages: list[dict[str, Any]] = [*self._opening]

    def clear(self) -> None:
        """Forget everything but what the model is told before."""
        self.messages = [*self._opening]

    def say(self, message: str) -> None:
        """Print the answer as it comes; Ctrl-C ends it, and what there is of it counts. Raises RequestError."""
        from actorllm.text.chat_template import Conversation

        asked = [*self.messages, {"role": "user", "content": message}]
        answer = GenerationRun(self._engine, Conversation.of(asked, chat_template=self._template), self._params)
        text = ""
        try:
            for output in answer:
                text += output.outputs[0].text
                print(output.outputs[0].text, end="", flush=True)
        except KeyboardInterrupt:
            answer.abort()
            if not sys.stdin.isatty():
                raise
        print()
        self.messages = [*asked, {"role": "assistant", "content": text}]
        if self._shows_stats:
            print(answer.figures(), file=sys.stderr)


def _talk(talk: Talk) -> None:
    prompt = "> " if sys.stdin.isatty() else ""
    if prompt:
        print("Type a message, or /help.", file=sys.stderr)
    while True:
        try:
            line = input(prompt).strip()
        except EOFError:
            return
        except UnicodeDecodeError as error:
            raise InvalidPromptError(
                f"the message is not valid {error.encoding}; this terminal may use another encoding"
            ) from error
        match line:
            case "":
                pass
            case "/exit":
                return
            case "/clear":
                talk.clear()
            case "/help":
                print("\n".join(f"{name:8} {what}" for name, what in COMMANDS.items()))
            case _ if line.startswith("/"):
                print(f"actorllm: there is no command {line!r}{nearest_name(line, COMMANDS)}", file=sys.stderr)
            case _:
                try:
                    talk.say(line)
                except RequestFailedError:
                    raise
                except RequestError as error:
                    print(f"actorllm: {error}" + (" (/clear forgets)" if talk.messages else ""), file=sys.stderr)


def _template(given: str | None) -> str | None:
    """The text of a template: given itself, or a file that holds it."""
    if given is None or "{" in given:
        return given
    try:
        return Path(given).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"chat_template={given!r} is neither a Jinja template nor a file that can be read") from error
