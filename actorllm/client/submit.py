"""`SubmitMaker`: what a caller asks for, checked, as the message `Submit` that the scheduler gets.

What can be told without the prompt is told in the call (`carried`); what depends on its length, on the intake thread
(`generating`, `pooling`). A maker of messages is what the frontend is given, as only it knows the number of a request.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable
from hashlib import blake2b
from typing import Any, cast

import numpy as np

from actorllm.clock import from_epoch, now
from actorllm.config import EngineConfig
from actorllm.errors import InvalidParameterError, shown
from actorllm.intake.adapter_tokenizers import AdapterTokenizers
from actorllm.intake.media.media_reader import block_keys
from actorllm.intake.tokenization import PromptReader, TokenizedPrompt
from actorllm.kvcache.prefix_index import extra_key, hash_blocks
from actorllm.messages import NO_I64, NO_U8, Submit
from actorllm.messages.logit_rules import rules_of
from actorllm.text.reasoning.thought import grammar_of
from actorllm.types.adapter_folder import Adapter, AdapterDigests
from actorllm.types.kv_transfer import read_transfer
from actorllm.types.logits_processors.checks import ParameterChecks
from actorllm.types.lora_request import LoRARequest
from actorllm.types.objective import SLO
from actorllm.types.params import MAX_LABEL, MAX_SECONDS, RequestOutputKind, SamplingParams, check_timeout, is_text
from actorllm.types.pooling_params import Pooling
from actorllm.types.structured_outputs import StructuredOutputsParams, with_engine_options

logger = logging.getLogger(__name__)

MAX_OBJECTIVES = 1000
"""So many different ones are remembered."""

JOURNAL_INTERVAL = 64
"""New tokens per row of a request that is told everything at its end: what the journal has is not computed again when the
scheduler dies."""


class SubmitMaker:
    """Makes the messages of one engine's requests."""

    def __init__(self, config: EngineConfig, prompts: PromptReader, weights: Callable[[], str] = str) -> None:
        """weights: the identity of those that are computed with now; the default: of those of the start."""
        self._config = config
        self._weights = weights
        self._prompts = prompts
        self._objectives: set[SLO] = set()  # that were looked at
        paths = config.model.logits_processors
        self._processors = ParameterChecks(paths) if paths else None
        self.digests = None if config.lora is None else AdapterDigests(config.lora.max_lora_rank)
        self._tokenizers = AdapterTokenizers(config.model, lambda: prompts.tokenizer)

    def checked_adapter(self, lora_request: object) -> LoRARequest | None:
        """Raises InvalidParameterError for what is none, and where the engine takes none."""
        if lora_request is None:
            return None
        if not isinstance(lora_request, LoRARequest):
            raise InvalidParameterError(f"lora_request={shown(lora_request)} must be a LoRARequest, or None")
        if self.digests is None:
            raise InvalidParameterError(
                f"lora_request={lora_request.lora_name!r}: this engine takes no adapters; build it with enable_lora=True"
            )
        return lora_request

    def adapter_of(self, lora_request: LoRARequest | None) -> Adapter | None:
        """What the scheduler is told of it. Reads its files where they have changed, and so runs on no loop."""
        if lora_request is None or self.digests is None:
            return None
        return self.digests.adapter_of(lora_request.lora_path, lora_request.lora_int_id)

    def is_unread(self, lora_request: LoRARequest | None) -> bool:
        """Whether an adapter has to be read first: its whole content, and its tokenizer if it brings one. Reads nothing."""
        return (
            lora_request is not None and self.digests is not None and not self.digests.has_read(lora_request.lora_path)
        )

    def prompts_of(self, lora_request: LoRARequest | None) -> PromptReader:
        """What reads the prompts of this adapter. Reads its files where they have changed, and so runs on no loop."""
        if lora_request is None:
            return self._prompts
        return self._tokenizers.texts_of(lora_request.lora_path).prompts or self._prompts

    def forget(self) -> None:
        """Give back the tokenizers of adapters; they are loaded again when they are needed."""
        self._tokenizers.forget()

    def carried(
        self,
        *,
        priority: int = 0,
        slo: SLO | float | None = None,
        is_latency_sensitive: bool = False,
        type_info: str | None = None,
        tenant: str | None = None,
        deadline: float | None = None,
        timeout: float | None = None,
        arrival_time: float | None = None,
    ) -> tuple[float, dict[str, Any]]:
        """When a request arrived, and the fields of its message that any request may have.

        Arguments as in `Engine.submit`. Raises InvalidParameterError.
        """
        if isinstance(priority, bool) or not isinstance(priority, int) or not -(2**63) <= priority < 2**63:
            raise InvalidParameterError(f"priority={shown(priority)} must be a 64-bit integer; lower is sooner")
        _check_seconds("deadline", deadline, "monotonic")
        if timeout is not None:
            deadline = min(now() + check_timeout(timeout), math.inf if deadline is None else deadline)
        _check_seconds("arrival_time", arrival_time, "epoch")
        for name, label in (("type_info", type_info), ("tenant", tenant)):
            if label is not None and (not is_text(label) or len(label) > MAX_LABEL):
                raise InvalidParameterError(
                    f"{name}={shown(label)} must be a string of valid Unicode with at most {MAX_LABEL} characters, or None"
                )
        if not isinstance(is_latency_sensitive, bool | int | np.bool_ | None):
            raise InvalidParameterError(f"is_latency_sensitive={shown(is_latency_sensitive)} must be True or False")
        objective = SLO.from_value(slo)
        if objective is not None and objective not in self._objectives:
            self._note_objective(objective)
        arrival = now() if arrival_time is None else from_epoch(arrival_time)
        return arrival, {
            "priority": priority,
            "slo": None if objective is None else list(_slo_fields(objective)),
            "is_latency_sensitive": bool(is_latency_sensitive),
            "type_info": type_info,
            "tenant": tenant,
            "deadline": None if deadline is None else float(deadline),  # an integer may be too large for a message
        }

    def _note_objective(self, objective: SLO) -> None:
        """Warn of one that no engine can keep, once."""
        if len(self._objectives) >= MAX_OBJECTIVES:
            self._objectives.clear()
        self._objectives.add(objective)
        if (reason := objective.contradiction()) is not None:
            logger.warning("%s can never be kept: %s", objective, reason)

    def generating(
        self,
        prompt: TokenizedPrompt,
        params: SamplingParams,
        number: int,
        arrival: float,
        carried: dict[str, Any],
        lora_request: LoRARequest | None = None,
    ) -> Callable[[int], Submit]:
        """For a request for text. Raises InvalidParameterError for what this prompt leaves no room for."""
        adapter = self.adapter_of(lora_request)
        model, ids = self._config.model, prompt.ids
        room = model.max_model_len - ids.size
        if model.encoder_decoder is not None and prompt.encoder_input is not None:
            room = model.encoder_decoder.max_target - (ids.size - prompt.encoder_input.num_rows)
        max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        if params.max_tokens is None and params.min_tokens > room:
            raise InvalidParameterError(
                f"min_tokens={params.min_tokens} is more than the {room} tokens that max_model_len={model.max_model_len} "
                f"leaves room for behind this prompt"
            )
        stop_ids = cast("list[int]", params.stop_token_ids)
        if prompt.embeds.size and params.prompt_logprobs is not None:
            has_encoder = prompt.encoder_input is not None
            what = (
                "of a model with an encoder and a decoder"
                if has_encoder
                else "where the prompt has embeddings and no token ids"
            )
            raise InvalidParameterError(f"prompt_logprobs={params.prompt_logprobs}: there are none {what}")
        if lora_request is not None and not params.ignore_eos:
            stop_ids = [*stop_ids, *self._tokenizers.texts_of(lora_request.lora_path).end_ids]
        prompts = self.prompts_of(lora_request)
        rules = rules_of(params, model.vocab_size, model.max_logprobs, lambda: prompts.tokenizer)
        processor_params = NO_U8 if self._processors is None else self._processors.checked(params)
        structured = cast("StructuredOutputsParams | None", params.structured_outputs)
        if structured is not None and model.structured_outputs:
            structured = with_engine_options(structured, model.structured_outputs)
        grammar = grammar_of(structured, params.thinking_token_budget, model.marks)
        transfer = read_transfer(params.extra_args, params.max_tokens, bool(self._config.roles))
        seed = params.seed if params.seed is not None else self._new_seed(number)
        hashes, salt, weights = NO_U8, self._salt_of(prompt), self._weights()
        digest, path = (None, None) if adapter is None else (adapter.digest, adapter.path)
        if self._config.cache.enable_prefix_caching:
            size, kind = self._config.cache.block_size, self._config.cache.hash_key
            keys = block_keys(prompt.items, ids.size // size, size)
            if -1 in keys:  # an image in the first block, which may be a partial one
                salt = f"{salt or ''}\0{keys[-1].decode()}"
            hashes = hash_blocks(ids, size, extra_key(salt, digest, weights, kind), keys)
        interval = max(params.stream_interval or 1, self._config.stream_interval)
        is_final_only = params.output_kind is RequestOutputKind.FINAL_ONLY

        def make_submit(rid: int) -> Submit:
            return Submit(
                rid=rid,
                arrival=arrival,
                prompt=ids,
                prompt_embeds=prompt.embeds,
                max_tokens=max_tokens,
                min_tokens=min(params.min_tokens, max_tokens),
                temperature=params.temperature,
                top_k=params.top_k if 0 < params.top_k < model.vocab_size else 0,
                top_p=params.top_p,
                min_p=params.min_p,
                seed=seed,
                ignore_eos=params.ignore_eos,
                stop_token_ids=stop_ids,
                stop=cast("list[str]", params.stop),
                include_stop=params.include_stop_str_in_output,
                detokenize=params.detokenize and model.tokenizer is not None,
                skip_special_tokens=params.skip_special_tokens,
                spaces_between_special_tokens=params.spaces_between_special_tokens,
                stream_interval=JOURNAL_INTERVAL if is_final_only else interval,
                rules=None if rules is None else rules.to_fields(),
                grammar=grammar,
                processor_params=processor_params,
                block_hashes=hashes,
                weights=weights,
                cache_salt=salt,
                skip_reading_prefix_cache=bool(params.skip_reading_prefix_cache),
                adapter=digest,
                adapter_path=path,
                hands_off=transfer.hands_off,
                kv_lease=np.array(transfer.lease, np.int64) if transfer.lease else NO_I64,
                **carried,
            )

        return make_submit

    def pooling(
        self,
        prompt: TokenizedPrompt,
        pooling: Pooling,
        skips_cache: bool,
        number: int,
        arrival: float,
        carried: dict[str, Any],
        lora_request: LoRARequest | None = None,
    ) -> Callable[[int], Submit]:
        """For a request for a vector."""
        hashes, salt, weights = NO_U8, self._salt_of(prompt), self._weights()
        pooler = self._config.model.pooler
        adapter = self.adapter_of(lora_request)
        digest, path = (None, None) if adapter is None else (adapter.digest, adapter.path)
        assert pooler is not None
        if self._config.cache.enable_prefix_caching:
            hashes = hash_blocks(prompt.ids, self._config.cache.block_size, extra_key(salt, digest, weights))

        def make_submit(rid: int) -> Submit:
            return Submit(
                rid=rid,
                arrival=arrival,
                prompt=prompt.ids,
                prompt_embeds=prompt.embeds,
                max_tokens=1,
                pooling=pooling.kind,
                pair_start=prompt.pair_start,
                is_chunkable=not (pooler.is_encoder or pooling.is_of_tokens),
                detokenize=False,
                block_hashes=hashes,
                weights=weights,
                cache_salt=salt,
                skip_reading_prefix_cache=skips_cache,
                adapter=digest,
                adapter_path=path,
                **carried,
            )

        return make_submit

    def _salt_of(self, prompt: TokenizedPrompt) -> str | None:
        """Of the blocks that this request finds and leaves behind. Weights that the application changes have one each."""
        module = self._config.model.module
        return prompt.cache_salt if module is None else module.salted(prompt.cache_salt)

    def _new_seed(self, number: int) -> int:
        """Of a request that brings none: drawn, or the engine's own seed and the number of the request make it."""
        if self._config.seed is None:
            return int.from_bytes(os.urandom(8), "little")
        return int.from_bytes(blake2b(b"%d:%d" % (self._config.seed, number), digest_size=8).digest(), "little")


def _check_seconds(name: str, value: object, base: str) -> None:
    if value is not None and (
        isinstance(value, bool) or not isinstance(value, int | float) or not -MAX_SECONDS <= value <= MAX_SECONDS
    ):
        raise InvalidParameterError(f"{name}={shown(value)} must be a time in {base} seconds, or None")


def _slo_fields(slo: SLO) -> tuple[float | None, ...]:
    limits = slo.ttft, slo.tpot, slo.e2e, slo.ttft_per_prompt_token
    return tuple(None if limit is None else float(limit) for limit in limits)
