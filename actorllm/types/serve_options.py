"""The options of `vllm serve`, by what becomes of each.

`SERVE_OPTIONS` is the one table. The command checks its options against it, and docs/compatibility.md is generated from it.
Options of the engine are not in it: `types.vllm_options` has these. Standard library only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

from actorllm.errors import ConfigError

Treatment: TypeAlias = Literal["taken", "always", "warned", "refused"]


class ServeOption(NamedTuple):
    """What becomes of one option of `vllm serve`.

    treatment: 'taken': it does what it says. 'always': it is so anyway. 'warned': it changes no answer, and other values than
    the default are taken with a warning. 'refused': other values than the default end the command.
    """

    treatment: Treatment
    note: str = ""


_AGENTS = "other machines run `actorllm node`, which the engine watches"

SERVE_OPTIONS: dict[str, ServeOption] = {
    # Where it listens, and for which clients.
    "host": ServeOption("taken", "default 127.0.0.1, and not every interface"),
    "port": ServeOption("taken", "0 for one that is free"),
    "uds": ServeOption("taken"),
    "api_key": ServeOption("taken", "also from $VLLM_API_KEY"),
    "api_server_count": ServeOption("taken"),
    "config": ServeOption("taken", "a YAML file; options of the command line count first"),
    "allowed_origins": ServeOption("taken", "by default no other page may call the server"),
    "allowed_methods": ServeOption("taken"),
    "allowed_headers": ServeOption("taken"),
    "allow_credentials": ServeOption("taken"),
    "ssl_keyfile": ServeOption("taken"),
    "ssl_certfile": ServeOption("taken"),
    "ssl_ca_certs": ServeOption("taken"),
    "ssl_cert_reqs": ServeOption("taken"),
    "ssl_ciphers": ServeOption("refused", "the ciphers are those of this Python"),
    "enable_ssl_refresh": ServeOption("refused", "certificates are read once; start the server again"),
    "root_path": ServeOption("taken"),
    "middleware": ServeOption("taken"),
    "uvicorn_log_level": ServeOption("taken"),
    "disable_uvicorn_access_log": ServeOption("taken"),
    "disable_access_log_for_endpoints": ServeOption("warned", "the access log has every request or none"),
    "disable_fastapi_docs": ServeOption("taken"),
    "enable_offline_docs": ServeOption("warned", "/docs loads its scripts from elsewhere; /openapi.json does not"),
    "h11_max_incomplete_event_size": ServeOption("warned", "the parser of HTTP is another; its limits are fixed"),
    "h11_max_header_count": ServeOption("warned", "the parser of HTTP is another; its limits are fixed"),
    # How requests are read.
    "served_model_name": ServeOption("taken"),
    "chat_template": ServeOption("taken", "a file or the text of a template"),
    "chat_template_content_format": ServeOption("taken"),
    "default_chat_template_kwargs": ServeOption("taken"),
    "trust_request_chat_template": ServeOption("taken"),
    "trust_request_mm_kwargs": ServeOption("warned", "requests cannot bring `mm_processor_kwargs`"),
    "tool_call_parser": ServeOption("taken", "default: as the chat template shows calls"),
    "tool_parser_plugin": ServeOption(
        "taken",
        "a file that is [written for vLLM](tools.md#files-that-are-written-for-vllm), or for this package",
    ),
    "reasoning_parser_plugin": ServeOption(
        "taken",
        "a file that is [written for vLLM](tools.md#files-that-are-written-for-vllm), or for this package",
    ),
    "enable_auto_tool_choice": ServeOption("always"),
    "exclude_tools_when_tool_choice_none": ServeOption("taken"),
    "tool_strict_level": ServeOption("warned", "tools that say `strict` are held to their schema"),
    "tool_server": ServeOption("refused", "the server calls no tools"),
    "cohere_is_reasoning_model": ServeOption("warned", "there is no API of Cohere's for chats"),
    "cohere_format": ServeOption("warned", "there is no API of Cohere's for chats"),
    "anthropic_disabled_thinking_effort": ServeOption("warned", "thinking is the chat template's"),
    "lora_modules": ServeOption("taken", "the folders are on the machine of the server"),
    # How they are answered.
    "response_role": ServeOption("taken"),
    "return_tokens_as_token_ids": ServeOption("taken"),
    "enable_prompt_tokens_details": ServeOption("always"),
    "enable_force_include_usage": ServeOption("taken"),
    "enable_request_id_headers": ServeOption("always"),
    "enable_per_request_metrics": ServeOption("warned", "a request asks for them with `return_metrics`"),
    "sse_keep_alive_interval": ServeOption("warned", "streams have no comments"),
    "fingerprint_mode": ServeOption("warned", "answers have no fingerprint"),
    "fingerprint_value": ServeOption("warned", "answers have no fingerprint"),
    "enable_server_load_tracking": ServeOption("always"),
    "enable_tokenizer_info_endpoint": ServeOption("always"),
    "tokens_only": ServeOption("refused", "the server has texts, too"),
    "enable_scale_out": ServeOption("refused", "the number of processes is fixed"),
    # What is logged.
    "enable_log_requests": ServeOption("taken"),
    "enable_log_outputs": ServeOption("warned", "no texts of clients are logged"),
    "enable_log_deltas": ServeOption("warned", "no texts of clients are logged"),
    "max_log_len": ServeOption("warned", "no texts of clients are logged"),
    "log_error_stack": ServeOption("warned", "the log has the stacks of unexpected errors"),
    "otlp_traces_endpoint": ServeOption("taken"),
    # Other ways to run it.
    "headless": ServeOption("refused", _AGENTS),
    "grpc": ServeOption("refused", "the server speaks HTTP"),
    "grpc_port": ServeOption("warned", "the server speaks HTTP"),
    "data_parallel_supervisor_port": ServeOption("warned", _AGENTS),
    "dp_supervisor_probe_interval_s": ServeOption("warned", _AGENTS),
    "dp_supervisor_probe_timeout_s": ServeOption("warned", _AGENTS),
    "dp_supervisor_probe_failure_threshold": ServeOption("warned", _AGENTS),
    "enable_flash_late_interaction": ServeOption("warned", "the kernels are those of the backend"),
}
"""Of 0.32, by name, with underscores."""


@dataclass(frozen=True, kw_only=True)
class VLLMServeOptions:
    """Options of `vllm serve` that have no counterpart here, at the values that are taken in silence."""

    ssl_ciphers: str | None = None
    enable_ssl_refresh: bool = False
    disable_access_log_for_endpoints: str | None = None
    enable_offline_docs: bool = False
    h11_max_incomplete_event_size: int | None = None
    h11_max_header_count: int | None = None
    trust_request_mm_kwargs: bool = False
    tool_strict_level: str = "auto"
    tool_server: str | None = None
    cohere_is_reasoning_model: bool = True
    cohere_format: str = "cmd4"
    anthropic_disabled_thinking_effort: str = "auto"
    enable_prompt_tokens_details: bool = False
    enable_request_id_headers: bool = False
    enable_per_request_metrics: bool = False
    sse_keep_alive_interval: int = 0
    fingerprint_mode: str = "full"
    fingerprint_value: str | None = None
    enable_server_load_tracking: bool = False
    enable_tokenizer_info_endpoint: bool = False
    tokens_only: bool = False
    enable_scale_out: bool = False
    enable_log_outputs: bool = False
    enable_log_deltas: bool = True
    max_log_len: int | None = None
    log_error_stack: bool = False
    headless: bool = False
    grpc: bool = False
    grpc_port: int | None = None
    data_parallel_supervisor_port: int = 9256
    dp_supervisor_probe_interval_s: float = 5.0
    dp_supervisor_probe_timeout_s: float = 5.0
    dp_supervisor_probe_failure_threshold: int = 3
    enable_flash_late_interaction: bool = True

    def warnings(self) -> list[str]:
        """What is to be said of those that have no effect. Raises ConfigError for one that is refused."""
        told = []
        for name in self.__dataclass_fields__:
            value, option = getattr(self, name), SERVE_OPTIONS[name]
            if value == self.__dataclass_fields__[name].default or option.treatment == "always":
                continue
            shown = f"--{name.replace('_', '-')}" + ("" if isinstance(value, bool) else f" {value!s:.80}")
            if option.treatment == "refused":
                raise ConfigError(f"{shown} is not supported: {option.note}")
            told.append(f"{shown} has no effect: {option.note}")
        return told
