"""`AnswerOptions`: what a server decides for requests that do not."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, get_args

from actorllm.errors import ConfigError
from actorllm.server.envelope import ErrorFormat
from actorllm.text.chat_template import ContentFormat

MAX_TEMPLATE_BYTES = 1 << 20
"""Of a file with a chat template."""

MAX_RESUME_S = 600.0
"""For which a stream may outlive its readers."""

SWITCHES = ("return_tokens_as_token_ids", "enable_force_include_usage", "exclude_tools_when_tool_choice_none")


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerOptions:
    """What a server decides for requests that do not. The fields are arguments of `create_app`, and options of `vllm serve`.

    chat_template: a file, or the text of a template, in place of the model's. chat_template_content_format: as in `LLM.chat`.
    default_chat_template_kwargs: variables of the template; those of a request count first. response_role: of messages in answers.
    return_tokens_as_token_ids: log-probabilities call tokens 'token_id:N'. enable_force_include_usage: every stream ends with
    its usage.
    exclude_tools_when_tool_choice_none: with tool_choice 'none' the template is not shown the tools.
    error_format: 'vllm': the code of an error is its status, a number; 'openai': a name, or null, as in OpenAI's description.
    resume_streams_for: seconds for which streams outlive their readers (`outliving.streams`); 0: not at all.
    """

    chat_template: str | None = None
    chat_template_content_format: ContentFormat = "auto"
    default_chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    response_role: str = "assistant"
    return_tokens_as_token_ids: bool = False
    enable_force_include_usage: bool = False
    exclude_tools_when_tool_choice_none: bool = False
    resume_streams_for: float = 0.0
    error_format: ErrorFormat = "vllm"

    @classmethod
    def of(cls, **given: Any) -> AnswerOptions:
        """Checked, with the text of the template. Raises ConfigError."""
        made = cls(**given)
        if made.chat_template_content_format not in get_args(ContentFormat):
            known = ", ".join(map(repr, get_args(ContentFormat)))
            raise ConfigError(
                f"chat_template_content_format={made.chat_template_content_format!r:.80} must be one of {known}"
            )
        if made.error_format not in get_args(ErrorFormat):
            raise ConfigError(f"error_format={made.error_format!r:.80} must be 'vllm' or 'openai'")
        if not isinstance(made.default_chat_template_kwargs, Mapping):
            told = f"default_chat_template_kwargs={made.default_chat_template_kwargs!r:.80} must be a mapping"
            raise ConfigError(told)
        for name in ("chat_template", "response_role"):
            if not isinstance(getattr(made, name), str | None):
                raise ConfigError(f"{name}={getattr(made, name)!r:.80} must be a string")
        for name in SWITCHES:
            if not isinstance(getattr(made, name), bool):
                raise ConfigError(f"{name}={getattr(made, name)!r:.80} must be True or False")
        seconds = made.resume_streams_for
        if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds <= MAX_RESUME_S:
            raise ConfigError(f"resume_streams_for={seconds!r:.40} must be between 0 and {MAX_RESUME_S:g} seconds")
        if not made.response_role:
            raise ConfigError("response_role is empty: leave it out, or give the name of a role")
        return cls(**{**given, "chat_template": template_text(made.chat_template)})


def template_text(given: str | None) -> str | None:
    """The text of a chat template that is given as a file or as text. Raises ConfigError."""
    if given is None or any(mark in given for mark in ("{", "\n")):
        return given
    try:
        # A pipe or a device may have no end, or nothing to read for ever.
        if os.path.exists(given) and not os.path.isfile(given):
            raise OSError("it is no regular file")
        if os.path.getsize(given) > MAX_TEMPLATE_BYTES:
            raise ConfigError(f"chat_template={given!r:.200} has more than {MAX_TEMPLATE_BYTES} bytes")
        with open(given, encoding="utf-8") as file:
            return file.read()
    except (OSError, ValueError) as error:  # ValueError: it is no UTF-8, or no path
        raise ConfigError(
            f"chat_template={given!r:.200} is neither a file that can be read nor the text of a template: {error}"
        ) from error
