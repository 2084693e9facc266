"""From a checked body to what the engine is asked: sampling parameters, and what a request brings beside them.

Invariant: what a client sends has an effect, or is refused with the name of the field, or is named in a warning. Nothing is
dropped in silence. Called by `completions` and `chat`.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from actorllm.config import ModelConfig
from actorllm.errors import InvalidParameterError, nearest_name
from actorllm.intake.tokenization import check_salt
from actorllm.server.answer_options import AnswerOptions
from actorllm.server.envelope import ApiError
from actorllm.server.protocol import Body, ChatCompletionRequest, CompletionRequest, Generation, StreamOptions
from actorllm.server.tool_parsers import DEFAULT_PARSER, PARSERS, ToolParser, parser_named
from actorllm.server.tools import response_format_of
from actorllm.text.chat_template import Conversation, chat_templates
from actorllm.text.reasoning.parsers import ReasoningParser, reasoning_named
from actorllm.types.kv_transfer import NAME as KV_TRANSFER
from actorllm.types.media_rules import Modality
from actorllm.types.objective import SLO
from actorllm.types.params import VLLM_PARAMETERS, RequestOutputKind, SamplingParams
from actorllm.types.structured_outputs import StructuredOutputsParams

SAMPLING_FIELDS = (
    *("n", "best_of", "temperature", "top_p", "top_k", "min_p", "seed", "max_tokens", "min_tokens", "ignore_eos"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "length_penalty", "use_beam_search"),
    *("stop", "stop_token_ids", "include_stop_str_in_output", "skip_special_tokens", "spaces_between_special_tokens"),
    *("logit_bias", "allowed_token_ids", "bad_words", "prompt_logprobs", "logprob_token_ids", "repetition_detection"),
    *("thinking_token_budget", "stream_interval"),
)
"""Fields of a body that are sampling parameters under the same name."""

TOKENIZATION_FIELDS = ("truncate_prompt_tokens", "truncation_side", "add_special_tokens")

IDLE: dict[str, tuple[Any, ...]] = {
    **VLLM_PARAMETERS,
    "tools": (None, []),
    "tool_choice": (None, "none"),
    "functions": (None, []),
    "function_call": (None, "none"),
    "structural_tag": (None,),
    "suffix": (None, ""),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "prediction": (None,),
    "web_search_options": (None,),
    "kv_transfer_params": (None,),
    "prompt_embeds": (None,),
    "mm_processor_kwargs": (None, {}),
    "lora_request": (None,),
    "ec_transfer_params": (None,),
    "media_io_kwargs": (None, {}),
    "mm_payload": (None,),
    "return_mm_kwargs": (None, False),
    "return_prompt_text": (None, False),
    "return_token_offsets": (None, False),
    "token_offsets": (None, False),
    "enable_response_messages": (None, False),
    "previous_input_messages": (None, []),
    "reasoning_ended": (None,),
}
"""Fields of OpenAI and vLLM that are accepted at these values, where they ask for what is done anyway."""

WITHOUT_EFFECT = frozenset(
    (*("user", "metadata", "safety_identifier", "prompt_cache_key", "include_reasoning", "parallel_tool_calls"),)
)
"""Fields that ask nothing of an engine that keeps no accounts and calls no tools."""

NOT_HONOURED: dict[str, tuple[Any, ...]] = {
    "store": (None, False),
    "service_tier": (None, "auto", "default"),
    "prompt_cache_retention": (None, "in_memory", "in-memory"),
    "guided_decoding_backend": (None, "auto"),
    "stream_include_usage": (None, False),
    "verbosity": (None,),
    "session_id": (None,),
    "max_tool_calls": (None,),
}
"""Fields without which the answer is the same: other values than these, which ask for nothing, are warned of."""

OLDER_CONSTRAINTS = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "guided_json_object": "json_object",
    "guided_whitespace_pattern": "whitespace_pattern",
}
"""What fields of structured_outputs were called when each stood in the body by itself."""

EFFORT = ("reasoning_effort", "enable_thinking")
"""The variables by which a chat template is told how much to think, as in vLLM."""
SHOWN_BY_TEMPLATES = ("tools", "documents", *EFFORT)

STREAMED_WITH_USAGE = (CompletionRequest, ChatCompletionRequest)
"""Bodies of streams that say how many tokens there were only when they are asked to."""

MAX_WARNED = 200
MAX_UNKNOWN = 10
"""So many unknown fields are named, and for the first MAX_COMPARED a name is looked for that may be meant."""
MAX_COMPARED = 3
MAX_NAME = 256


@dataclass(frozen=True, slots=True)
class Defaults:
    """What the server decides for requests that do not."""

    sampling: Mapping[str, Any]
    """What the model's author recommends."""
    max_prompt_characters: int
    """The engine's."""
    trusts_chat_templates: bool = False
    modality: Modality | None = None
    """What messages may hold beside text."""
    tool_parser: type[ToolParser] = PARSERS[DEFAULT_PARSER]
    """Which one, may depend on the model's chat templates: known after `ServerState.read_templates`."""
    reasoning: type[ReasoningParser] | None = None
    """How the model marks what it thinks; None: it is not looked for."""
    read_by_templates: frozenset[str] = frozenset(SHOWN_BY_TEMPLATES)
    """Which of these variables the model's chat templates read. Known then, too."""
    answers: AnswerOptions = field(default_factory=AnswerOptions)
    """Of the command line, or of `create_app`."""

    @classmethod
    def of(cls, model: ModelConfig, answers: AnswerOptions, *, trusts_chat_templates: bool = False) -> Defaults:
        """Of a server for this model."""
        return cls(
            sampling=model.sampling_defaults,
            max_prompt_characters=model.max_prompt_characters,
            trusts_chat_templates=trusts_chat_templates,
            modality=model.modality,
            reasoning=None if model.reasoning_parser is None else reasoning_named(model.reasoning_parser),
            answers=answers,
        )

    def with_templates(self, folder: str | None, tool_call_parser: str | None) -> Defaults:
        """With what the model's chat templates say of tools. Reads files. folder: of the tokenizer. tool_call_parser: as in
        `create_app`.

        Raises ConfigError.
        """
        own = self.answers.chat_template
        templates = [own] if own is not None else [] if folder is None else chat_templates(folder)
        read = frozenset(name for name in SHOWN_BY_TEMPLATES if any(name in template for template in templates))
        return replace(
            self,
            tool_parser=parser_named(tool_call_parser, templates).for_folder(folder),
            reasoning=None if self.reasoning is None else self.reasoning.for_folder(folder),
            read_by_templates=read,
        )

    def reasoning_of(self, body: Any) -> Callable[[str], ReasoningParser] | None:
        """What makes a parser of thoughts for this request, of the end of its prompt."""
        return None if self.reasoning is None else self.reasoning.for_request(body)

    @property
    def shows_tools(self) -> bool:
        """The model's chat template shows tools to the model."""
        return "tools" in self.read_by_templates

    def warnings_of_effort(self, effort: str | None) -> list[str]:
        """What is to be said where the chat template does not look at it."""
        is_read = effort in (None, "none") or not self.read_by_templates.isdisjoint(EFFORT)
        return [] if is_read else ["reasoning_effort has no effect here: the model's chat template does not read it"]

    def conversation(
        self, messages: Any, *, effort: str | None = None, documents: Any = None, **options: Any
    ) -> Conversation:
        """Of messages that no caller keeps. options: of `Conversation`; None: as the server has it.

        effort: how much the model is to think; "none": not at all. documents: mappings that the template shows.

        Raises InvalidPromptError and InvalidParameterError, and ApiError for a template of the client's own unless that is
        trusted: it is a program that runs here.
        """
        if options.get("chat_template") is not None and not self.trusts_chat_templates:
            raise ApiError(
                400,
                "chat_template: this server uses the model's own; it takes others with --trust-request-chat-template",
                "chat_template",
            )
        answers = self.answers
        if options.get("chat_template") is None:
            options["chat_template"] = answers.chat_template
        further = options.get("chat_template_kwargs")
        if answers.default_chat_template_kwargs and (further is None or isinstance(further, Mapping)):
            options["chat_template_kwargs"] = {**answers.default_chat_template_kwargs, **(further or {})}
        if effort is not None or documents:
            told = options.get("chat_template_kwargs")
            if told is None or isinstance(told, Mapping):  # else Conversation says what is wrong with it
                options["chat_template_kwargs"] = _with_variables(told or {}, further or {}, effort, documents)
        options["chat_template_content_format"] = answers.chat_template_content_format
        return Conversation.of(messages, is_own=True, modality=self.modality, **options)

    def fill(self, body: Body) -> None:
        """Put into a body what it leaves to the server."""
        if not isinstance(body, Generation):
            return
        if self.answers.return_tokens_as_token_ids and body.return_tokens_as_token_ids is None:
            body.return_tokens_as_token_ids = True
        if self.answers.enable_force_include_usage and body.stream and isinstance(body, STREAMED_WITH_USAGE):
            options = body.stream_options or StreamOptions()
            body.stream_options = options.model_copy(update={"include_usage": True})


@dataclass(slots=True)
class Extras:
    """What a request brings beside prompt and parameters, and what is to be said of it."""

    arguments: dict[str, Any] = field(default_factory=dict)
    """Of `AsyncLLM.generate`."""
    slo: SLO | None = None
    warnings: list[str] = field(default_factory=list)

    def headers(self) -> dict[str, str]:
        """Of the response."""
        return {"x-actorllm-warning": "; ".join(self.warnings)} if self.warnings else {}


def name_request(body: Any, headers: Mapping[str, str]) -> None:
    """Call a request what its client calls it: in `request_id`, else in the header x-request-id.

    That name is in every event, and at the head of every line of the log about the request. It is short, and ends no line. Raises
    ApiError for a `request_id` that is not so; a header, which proxies set as well, is made so.
    """
    name = body.request_id
    if name is None:
        given = headers.get("x-request-id")
        body.request_id = None if given is None else short_name(given)
    elif len(name) > MAX_NAME or not name.isprintable():
        told = f"request_id={name[:MAX_NAME]!r:.80} must be at most {MAX_NAME} printable characters"
        raise ApiError(400, told, "request_id")


def short_name(name: str) -> str:
    """Printable, and of MAX_NAME characters at most. Names that differ stay different, and each stays what it is."""
    printable = "".join([character if character.isprintable() else "?" for character in name[:MAX_NAME]])
    if len(name) <= MAX_NAME:
        return printable
    digest = hashlib.blake2b(name.encode(errors="replace"), digest_size=8).hexdigest()
    return f"{printable[: MAX_NAME - len(digest) - 1]}-{digest}"


def sampling_params(body: Generation, defaults: Defaults, kind: RequestOutputKind, **decided: Any) -> SamplingParams:
    """decided: what the endpoint says itself, in the place of fields of the same name. Raises InvalidParameterError."""
    given = body.given()
    asked = {name: given[name] for name in SAMPLING_FIELDS if name in given}
    if "vllm_xargs" in given:
        asked["extra_args"] = given["vllm_xargs"]
    if given.get(KV_TRANSFER) is not None:
        asked["extra_args"] = {**(asked.get("extra_args") or {}), KV_TRANSFER: given[KV_TRANSFER]}
    if decided.get("structured_outputs") is None:
        decided["structured_outputs"] = response_format_of(body)
    extra = body.model_extra or {}
    # false, too, asks for nothing: it is what clients send in guided_json_object where they want no JSON.
    older = {
        name: extra[name] for name in OLDER_CONSTRAINTS if extra.get(name) is not None and extra[name] is not False
    }
    if older:
        decided["structured_outputs"] = _older_constraint(older, decided["structured_outputs"])
    return SamplingParams.from_optional(**{**defaults.sampling, **asked, **decided, "output_kind": kind})


def _older_constraint(given: Mapping[str, Any], other: Any) -> StructuredOutputsParams:
    """Of the fields of OLDER_CONSTRAINTS that are given. other: what the body asks for beside them. Raises ApiError."""
    name = next(iter(given))
    if other is not None:
        raise ApiError(400, f"{name} beside another constraint of the output: give one of them", name)
    try:
        return StructuredOutputsParams(**{OLDER_CONSTRAINTS[one]: value for one, value in given.items()}).named(name)
    except InvalidParameterError as error:
        raise ApiError(400, f"{name}: {error}", name) from error


def _with_variables(
    told: Mapping[str, Any], further: Mapping[str, Any], effort: str | None, documents: Any
) -> dict[str, Any]:
    """The variables of a chat template, with what fields of a body add. told: all so far; further: those of the body."""
    variables = dict(told)
    if documents:
        variables["documents"] = documents
    if effort is not None:
        variables["reasoning_effort"] = effort
        if "enable_thinking" not in further:
            variables["enable_thinking"] = effort != "none"
    return variables


def extras_of(body: Body, headers: Mapping[str, str]) -> Extras:
    """Everything else. Raises InvalidParameterError, InvalidPromptError, or ApiError for a field that cannot be honoured."""
    # Fields that no model of a body declares: those that would have to be honoured are refused, of others there is a warning.
    extra = body.model_extra or {}
    for name, value in extra.items():
        if name in IDLE:
            check_idle(name, value)
    known = {*type(body).model_fields, *IDLE, *WITHOUT_EFFECT, *NOT_HONOURED}
    if isinstance(body, Generation):
        known |= OLDER_CONSTRAINTS.keys()
    found = Extras(warnings=_of_unknown([name for name in extra if name not in known], known))
    found.warnings += [
        f"{name} has no effect here"
        for name, accepted in NOT_HONOURED.items()
        if name in extra and extra[name] not in accepted
    ]
    # Declared fields that are about neither the prompt nor its sampling.
    given = body.given()
    options = given.get("stream_options")
    if isinstance(options, StreamOptions) and options.include_obfuscation:
        found.warnings.append("stream_options.include_obfuscation has no effect here")
    check_salt(given.get("cache_salt"))
    found.slo = objective_of(given.get("slo"), headers)
    found.arguments = {
        name: given[name] for name in ("priority", "is_latency_sensitive", "type_info", "tenant") if name in given
    }
    if found.slo is not None:
        found.arguments["slo"] = found.slo
        found.warnings += contradictions_of(found.slo)
    tokenization = {name: given[name] for name in TOKENIZATION_FIELDS if name in given}
    if tokenization:
        found.arguments["tokenization_kwargs"] = tokenization
    return found


def _of_unknown(names: Sequence[str], known: Collection[str]) -> list[str]:
    """Of fields without effect. They go into one header, which clients and proxies read up to a few kilobytes."""
    warnings = []
    for place, name in enumerate(names[:MAX_UNKNOWN]):
        near = nearest_name(name, known) if place < MAX_COMPARED else ""
        told = f"field {name[:MAX_NAME]!r:.60} is not known and has no effect{near}"
        warnings.append(told.encode("ascii", "replace").decode()[:MAX_WARNED])
    if len(names) > MAX_UNKNOWN:
        warnings.append(f"so it is with {len(names) - MAX_UNKNOWN} more fields")
    return warnings


def contradictions_of(slo: SLO) -> list[str]:
    """What is to be said of an objective whose parts do not go together."""
    contradiction = slo.contradiction()
    return [] if contradiction is None else [f"slo: {contradiction}"]


def check_idle(name: str, value: Any) -> None:
    for accepted in IDLE[name]:
        if type(value) is type(accepted) and value == accepted:
            return
        if isinstance(value, int | float) and not isinstance(value, bool) and value == accepted is not False:
            return
    raise ApiError(400, f"{name} is not supported by this server yet; leave it out", name)


def objective_of(slo: Any, headers: Mapping[str, str]) -> SLO | None:
    """What the body says, and where it says nothing the headers x-slo-ttft-ms and x-slo-tpot-ms."""
    parts: dict[str, Any] = {}
    for header, part in (("x-slo-ttft-ms", "ttft"), ("x-slo-tpot-ms", "tpot")):
        text = headers.get(header)
        if text is not None:
            parts[part] = _seconds(header, text, 1000.0)
    if isinstance(slo, str):
        slo = _seconds("slo", slo, 1.0)
    if isinstance(slo, Mapping):
        parts |= {name: value for name, value in slo.items() if value is not None}
    elif slo is not None:
        stated = SLO.from_value(slo)
        assert stated is not None
        parts["tpot"] = stated.tpot
    return SLO.from_mapping(parts) if parts else None


def _seconds(name: str, text: str, per_second: float) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise InvalidParameterError(f"{name}={text!r:.80} must be a number")
    return value / per_second
