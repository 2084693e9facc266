"""`POST /v1/chat/completions`: a conversation through the model's template, and the shape of what goes back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from actorllm.intake.tokenization import Prompt
from actorllm.server.completions import Asked, check_length, check_stream, view_of_logprobs
from actorllm.server.copies import check_copies
from actorllm.server.envelope import ApiError
from actorllm.server.logprob_format import of_prompt
from actorllm.server.message_parts import MessageParts
from actorllm.server.protocol import ChatCompletionRequest, TokenizeRequest
from actorllm.server.sampling import Defaults, extras_of, sampling_params
from actorllm.server.shape import AnswerView, OpenAIShape, PromptState, versions_of
from actorllm.server.tools import ToolUse, tool_use_of, warnings_of
from actorllm.text.chat_template import Conversation
from actorllm.text.reasoning.counting import ThoughtCount
from actorllm.text.reasoning.parsers import ReasoningParser
from actorllm.types.outputs import CompletionOutput, RequestOutput
from actorllm.types.params import RequestOutputKind

ROLE = "assistant"
NUM_LAST = 64
"""Tokens at the end of a prompt in which a template's marker of a thought may be."""


def ask(
    body: ChatCompletionRequest,
    headers: Mapping[str, str],
    defaults: Defaults,
    model: str,
    decode: Callable[[list[int]], str],
) -> Asked:
    """Raises ApiError, InvalidParameterError and InvalidPromptError."""
    extras = extras_of(body, headers)
    check_stream(body)
    is_streamed = bool(body.stream)
    tool_use = tool_use_of(body, defaults.tool_parser)
    conversation, prompt = prompt_of(body, defaults)
    if body.chat_template is None:
        extras.warnings += defaults.warnings_of_effort(body.reasoning_effort)
        if body.documents and "documents" not in defaults.read_by_templates:
            extras.warnings.append("documents has no effect here: the model's chat template does not show them")
    decided: dict[str, Any] = {}
    if body.max_completion_tokens is not None:
        if body.max_tokens not in (None, body.max_completion_tokens):
            told = f"max_tokens={body.max_tokens} beside max_completion_tokens={body.max_completion_tokens}"
            raise ApiError(400, f"{told}: these are two names of one limit; give one of them", "max_tokens")
        decided["max_tokens"] = body.max_completion_tokens
    elif body.max_tokens is None:
        decided["max_tokens"] = defaults.sampling.get("max_tokens")
    number = _num_logprobs(body)
    if number is not None:
        decided["logprobs"] = None if body.logprob_token_ids else number
    if tool_use is not None or defaults.reasoning is not None:
        decided["skip_special_tokens"] = False  # markers may be special
    if tool_use is not None:
        decided["structured_outputs"] = tool_use.structured
        extras.warnings += tool_use.warnings(defaults.shows_tools or body.chat_template is not None)
    kind = RequestOutputKind.DELTA if is_streamed else RequestOutputKind.FINAL_ONLY
    params = sampling_params(body, defaults, kind, **decided)
    extras.warnings += warnings_of(params.structured_outputs)
    logprobs = view_of_logprobs(number, body.logprob_token_ids, body.return_tokens_as_token_ids)
    view = AnswerView.of(body, model, logprobs)
    shape = ChatShape(view, 1, params.n, extras.slo, decode, body.request_id)
    reads_thoughts = tool_use is not None and tool_use.parser.READS_THOUGHTS
    if tool_use is not None or defaults.reasoning is not None:
        is_asked = body.include_reasoning is not False
        needs_prompt = defaults.reasoning is not None or reads_thoughts
        reasoning = defaults.reasoning_of(body)
        shape.read_parts(MessageParts(tool_use, reasoning, is_asked), needs_prompt, reasoning)
    shape.shows_prompt_logprobs = params.prompt_logprobs is not None
    shape.tool_use = tool_use
    shape.role = defaults.answers.response_role
    last = conversation.messages[-1]
    if view.echo and last["role"] == ROLE and isinstance(last.get("content"), str):
        shape.echoed = last["content"]
        check_copies([shape.echoed], params.n, "echo")
    if view.has_token_ids and is_streamed:
        check_copies(_texts(conversation), params.n, "return_token_ids")
    return Asked([prompt], params, extras, shape, is_streamed)


def prompt_of(body: ChatCompletionRequest, defaults: Defaults) -> tuple[Conversation, Prompt]:
    """The conversation of a body, and as the engine takes it. Raises as `Defaults.conversation`."""
    conversation = conversation_of(body, defaults)
    if body.truncate_prompt_tokens is None:
        for text in _texts(conversation):
            check_length(text, defaults.max_prompt_characters)
    if body.cache_salt is None:
        return conversation, conversation
    return conversation, {"prompt": conversation, "cache_salt": body.cache_salt}


def conversation_of(body: ChatCompletionRequest | TokenizeRequest, defaults: Defaults) -> Conversation:
    """Raises as `Defaults.conversation`."""
    tools = body.tools or None
    if defaults.answers.exclude_tools_when_tool_choice_none and getattr(body, "tool_choice", None) == "none":
        tools = None
    return defaults.conversation(
        body.messages,
        chat_template=body.chat_template,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        tools=tools,
        chat_template_kwargs=body.chat_template_kwargs,
        effort=getattr(body, "reasoning_effort", None),
        documents=getattr(body, "documents", None),
    )


def _texts(conversation: Conversation) -> list[str]:
    return [content for message in conversation.messages if isinstance(content := message.get("content"), str)]


def _num_logprobs(body: ChatCompletionRequest) -> int | None:
    """A switch and a number in this API."""
    if not body.logprobs:
        if body.top_logprobs:
            raise ApiError(400, f"top_logprobs={body.top_logprobs} needs logprobs=true", "top_logprobs")
        if body.logprob_token_ids:
            raise ApiError(400, "logprob_token_ids needs logprobs=true", "logprob_token_ids")
        return None
    number = body.top_logprobs or 0
    if number < -1:
        raise ApiError(400, f"top_logprobs={number} must be >= 0, or -1 for those of all tokens", "top_logprobs")
    return number


class ChatShape(OpenAIShape):
    WHOLE = "chat.completion"
    CHUNK = "chat.completion.chunk"
    PREFIX = "chatcmpl"
    PLAIN = (b',"delta":{"content":', b'},"logprobs":null,"finish_reason":null,"token_ids":null}')

    tool_use: ToolUse | None = None
    role = ROLE
    echoed = ""
    """The last message, which the answer goes on from, when it was asked for."""
    shows_prompt_logprobs = False
    _parts: MessageParts | None = None
    _needs_prompt = False
    reasoning: Callable[[str], ReasoningParser] | None = None
    """What makes a parser of thoughts, of the end of the prompt."""

    def read_parts(
        self, parts: MessageParts, needs_prompt: bool, reasoning: Callable[[str], ReasoningParser] | None
    ) -> None:
        """The text is looked through for thoughts and calls. needs_prompt: the end of the prompt says how it begins.
        reasoning: what tells the tokens of a thought, which are counted."""
        self._parts = parts
        self._needs_prompt = needs_prompt
        self.reasoning = reasoning
        self._counts: dict[int, ThoughtCount] = {}
        self.is_plain = False

    def read_as(self, other: ChatShape) -> None:
        """As another shape does, whose request differs in its messages only."""
        self.role = other.role
        if other._parts is not None:
            self.read_parts(other._parts, other._needs_prompt, other.reasoning)

    def _see_prompt(self, ids: Sequence[int]) -> None:
        if self._parts is not None and self._needs_prompt:
            self._parts.prompt = self._decode(list(ids[-NUM_LAST:]))

    def _count(self, index: int, one: CompletionOutput) -> None:
        """The tokens of the thought."""
        if self.reasoning is None or self._parts is None:
            return
        count = self._counts.get(index)
        if count is None:
            count = self._counts[index] = ThoughtCount(self.reasoning(self._parts.prompt), self._decode)
        count.push(one.token_ids)
        if one.finish_reason is not None:
            count.finish()

    def _usage(self, states: Sequence[PromptState]) -> dict[str, Any]:
        told = super()._usage(states)
        if self.reasoning is not None:
            told["completion_tokens_details"] = {"reasoning_tokens": sum(c.num for c in self._counts.values())}
        return told

    def _whole_choice(self, index: int, output: RequestOutput, one: CompletionOutput) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": index,
            "token_ids": None,
            "message": {"role": self.role, "content": self.echoed + one.text, "refusal": None, "reasoning": None},
            "logprobs": None if self.view.logprobs is None else self.view.logprobs.of_message(self._positions(one)),
            "finish_reason": one.finish_reason,
            "stop_reason": one.stop_reason,
        }
        if self._parts is not None:
            self._see_prompt(output.prompt_token_ids)
            self._parts.put_into(choice, one.text, self.echoed, one.token_ids)
            self._count(index, one)
        if self.view.has_token_ids:
            choice["token_ids"] = one.token_ids
            choice["weight_versions"] = versions_of(one)
        return choice

    def _add_to_whole(self, tree: dict[str, Any], outputs: Sequence[RequestOutput]) -> None:
        tree["prompt_logprobs"] = of_prompt(outputs[0]) if self.shows_prompt_logprobs else None
        tree["prompt_token_ids"] = outputs[0].prompt_token_ids if self.view.has_token_ids else None

    def _opening(self, index: int, state: PromptState, output: RequestOutput) -> list[bytes]:
        self._see_prompt(state.ids)
        delta = {"role": self.role, "content": self.echoed}
        choice: dict[str, Any] = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        if self.view.has_token_ids:
            choice["prompt_token_ids"] = state.ids
        return [self._event(choice, state, 0)]

    def _choice(self, index: int, one: CompletionOutput) -> dict[str, Any] | None:
        choice: dict[str, Any] = {"index": index, "delta": {"content": one.text}, "logprobs": None, "token_ids": None}
        if self.view.logprobs is not None:
            choice["logprobs"] = self.view.logprobs.of_message(self._positions(one))
        choice["finish_reason"] = one.finish_reason
        if one.finish_reason is not None:
            choice["stop_reason"] = one.stop_reason
        if self.view.has_token_ids:
            choice["token_ids"] = one.token_ids
            if one.finish_reason is not None:
                choice["weight_versions"] = versions_of(one)
        if self._parts is not None:
            self._count(index, one)
            is_news = self._parts.put_into_delta(index, choice, one.text, one.token_ids)
            if not is_news and self.view.logprobs is None and not self.view.has_token_ids:
                return None
        return choice
