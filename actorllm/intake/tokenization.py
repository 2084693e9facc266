"""`PromptReader`: a prompt as its user writes it, as token ids that are checked against the model.

Text, token ids, vLLM's mappings (`types.prompts`) and conversations all become a `TokenizedPrompt`. Works on any thread. The
engine's tokenizer workers (`actorllm.intake`) hand in a `Workplace` for what may take long; without one, everything is done here.
Texts are bounded before they are tokenized, by `max_prompt_characters` and by what the model has room for.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from numbers import Integral
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from actorllm.config import ModelConfig
from actorllm.errors import ConfigError, InvalidParameterError, InvalidPromptError, nearest_name, shown
from actorllm.messages import I32, NO_I32, U8, no_u8
from actorllm.messages.embeds import EMBEDDED, MAX_PROMPT_BYTES, encode_rows, read_rows, salt_of
from actorllm.text.chat_template import ChatTemplate, Conversation
from actorllm.text.tokenizer import Side, Tokenizer, transformers_tokenizer
from actorllm.types.media_rules import Modality, processor_kwargs
from actorllm.types.params import MAX_LABEL, PoolingParams, SamplingParams, check_truncation, is_text

if TYPE_CHECKING:
    from actorllm.intake.media.media_reader import GivenMedia, MediaReader, PlacedItem
    from actorllm.intake.sources import SourceReader
    from actorllm.types.encoder_decoder import EncoderDecoder

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class TextPair:
    """Two texts that a model reads as one prompt: a question and what may answer it."""

    first: str
    second: str

    @property
    def num_characters(self) -> int:
        return len(self.first) + len(self.second)


Prompt: TypeAlias = str | Mapping[str, Any] | Iterable[int] | Conversation | TextPair
"""Text, token ids, a mapping as in vLLM (PROMPT_KEYS), a conversation for the model's chat template, or a pair of texts.

A mapping may hold a pair, too."""

PROMPT_KEYS = ("prompt_token_ids", "prompt")
"""Where a prompt mapping holds the prompt; of both, the ids count. Beside it there may be a 'cache_salt'."""

EMBEDS_KEYS = ("prompt_embeds", "prompt_is_token_ids")
"""Of a prompt that is given as embeddings, as a whole or in part; the second says where 'prompt_token_ids' count."""

MEDIA_KEY, UUIDS_KEY, PROCESSOR_KEY = "multi_modal_data", "multi_modal_uuids", "mm_processor_kwargs"
"""Of a prompt with images or audio, for a model that takes them: the items, their names, and how they are processed."""

VLLM_PROMPT_KEYS = (
    MEDIA_KEY,
    UUIDS_KEY,
    PROCESSOR_KEY,
    "encoder_prompt",
    "decoder_prompt",
)
"""What vLLM's prompts may hold beside that; accepted as None."""

TOKENIZATION_KEYS = ("truncate_prompt_tokens", "add_special_tokens", "truncation_side")
"""What tokenization_kwargs may hold."""


LARGE_TEXT = 1 << 18
"""Texts of more characters take long: they are read in a process that can be ended."""


class Workplace(Protocol):
    """Where texts are read that may take long. Both raise as `ChatTemplate.render` and `Tokenizer.encode`."""

    @property
    def takes_all(self) -> bool:
        """Also what is short."""

    def render(self, tokenizer: Tokenizer, conversation: Conversation, most: int) -> str | None:
        """The text of a conversation, with `most` characters at most. None: only this process can render it."""

    def encode(self, tokenizer: Tokenizer, method: Literal["encode", "encode_within"], *arguments: Any) -> I32:
        """What this method of the tokenizer returns."""

    def wait(self, future: Future[T]) -> T:
        """The result of another thread. Raises what it raised, or that nothing waits for it any more."""


class EncoderInput(NamedTuple):
    """What an encoder made rows of."""

    text: str | None
    token_ids: list[int] | None
    num_rows: int


@dataclass(frozen=True, slots=True, eq=False)
class TokenizedPrompt:
    """A prompt as the engine takes it."""

    ids: I32
    text: str | None
    cache_salt: str | None = None
    """Requests share cached blocks only with those of the same salt."""
    embeds: U8 = field(default_factory=no_u8)
    """The rows of the positions whose id is EMBEDDED."""
    pair_start: int = 0
    """Where the second text of a pair begins; 0: there is none, or the model does not tell them apart."""
    shown_ids: list[int] | None = None
    """What outputs show of a prompt with embeddings: the ids beside them, or as many zeros."""
    items: tuple[PlacedItem, ...] = ()
    """What the rows are of; without items, they are the caller's."""
    encoder_input: EncoderInput | None = None
    """What the encoder beside the decoder got; then the ids shown are the decoder's."""

    def continued(self, token_ids: list[int]) -> Prompt:
        """The prompt of a request that goes on from this one."""
        if self.encoder_input is not None:
            raise InvalidPromptError("beam search is not supported for a model with an encoder and a decoder; use n")
        if self.embeds.size:
            raise InvalidPromptError("beam search goes on from token ids; prompt_embeds have none")
        return {"prompt_token_ids": token_ids, "cache_salt": self.cache_salt}


class PromptReader:
    """Reads prompts for one model. Tokenizer and chat template are loaded when first needed."""

    def __init__(self, model: ModelConfig) -> None:
        self._model = model
        self.media: MediaReader | None = None
        """Reads prompts with images; None: they are not taken here."""
        self.sources: SourceReader | None = None
        """Reads prompts of a model with an encoder beside its decoder; None: it has none."""
        self._tokenizer: Tokenizer | None = None
        self._chat_template: ChatTemplate | None = None

    @property
    def tokenizer(self) -> Tokenizer:
        """Loaded when first needed. Raises ModelError, or InvalidPromptError when the engine was built without one."""
        tokenizer = self._tokenizer  # another thread may forget it
        if tokenizer is None:
            if self._model.tokenizer is None:
                raise InvalidPromptError("the engine was built with skip_tokenizer_init=True; give token ids")
            tokenizer = self._tokenizer = Tokenizer(self._model.tokenizer)
        return tokenizer

    def forget(self) -> None:
        """Give back what was loaded; it is loaded again when it is needed."""
        self._tokenizer = self._chat_template = None
        self.__dict__.pop("transformers_tokenizer", None)
        if self.media is not None:
            self.media.forget()
        if self.sources is not None:
            self.sources.forget()

    def close(self) -> None:
        """Read no more images, and ask no encoder."""
        if self.media is not None:
            self.media.close()
        if self.sources is not None:
            self.sources.close()

    @property
    def pad_token_id(self) -> int | None:
        """The tokenizer's, if there is one."""
        return None if self._model.tokenizer is None else self.tokenizer.pad_token_id

    @functools.cached_property
    def transformers_tokenizer(self) -> Any:
        """The same as transformers has it, for programs that do more with one. Raises as `tokenizer`."""
        return transformers_tokenizer(self.tokenizer.path)

    def tokenize(
        self,
        prompt: Prompt,
        *,
        truncate_prompt_tokens: int | None = None,
        add_special_tokens: bool | None = None,
        truncation_side: Side | None = None,
        workplace: Workplace | None = None,
    ) -> TokenizedPrompt:
        """The token ids of a prompt, checked against the model. Raises InvalidPromptError.

        truncate_prompt_tokens: keep so many; -1: what the model's length has room for. truncation_side: which end of the
        prompt is left out; None: the beginning ("left"), or in an engine that pools what the tokenizer says. Of a text, the
        special tokens around it stay then. add_special_tokens: None: those of the model, except around a conversation, whose
        template writes them itself.
        """
        num_kept = self._kept_tokens(truncate_prompt_tokens)
        if self._model.encoder_decoder is not None:
            if num_kept is not None:
                raise InvalidPromptError(
                    f"truncate_prompt_tokens={truncate_prompt_tokens}: prompts of a model with an encoder are not cut; leave it out"
                )
            return self._with_source(prompt, self._model.encoder_decoder, add_special_tokens is not False, workplace)
        if (media := self._media_of(prompt)) is not None:
            if num_kept is not None:
                raise InvalidPromptError(
                    f"truncate_prompt_tokens={truncate_prompt_tokens}: prompts with images or audio are not cut; leave it out"
                )
            return self._with_media(prompt, media, add_special_tokens, workplace)
        salt: str | None = None
        pooler = self._model.pooler
        text = prompt_text(prompt)
        embeds: NDArray[np.float32] | None = None
        shown_ids: list[int] | None = None
        if isinstance(prompt, Mapping):
            salt = prompt.get("cache_salt")
            if prompt.get("prompt_embeds") is not None:
                embeds, ids, shown_ids = self._embedded(prompt)
            else:
                prompt = _unwrap(prompt)
        if isinstance(prompt, Conversation):
            prompt = text = self._render(prompt, workplace)
            add_special_tokens = bool(add_special_tokens)
        pair_start = 0
        if embeds is not None:
            pass
        elif isinstance(prompt, TextPair):
            ids, pair_start = self._encode_pair(prompt, num_kept, truncation_side, workplace)
        elif isinstance(prompt, str):
            self._check_length(prompt, is_truncated=num_kept is not None)
            ids = self._encode(prompt, add_special_tokens is not False, num_kept, truncation_side, workplace)
        else:
            ids = _checked_ids(prompt, self._model.vocab_size)
        if not ids.size:
            raise InvalidPromptError("the prompt is empty")
        if num_kept is not None and ids.size > num_kept:
            keeps_first = truncation_side == "right" if pooler is None else self._truncates_end(truncation_side)
            kept = slice(num_kept) if keeps_first else slice(ids.size - num_kept, None)
            ids = ids[kept]
            if embeds is not None and shown_ids is not None:
                embeds, shown_ids = embeds[kept], shown_ids[kept]
        limit = self._model.max_model_len
        most = limit - (pooler is None)  # a token is to come
        if ids.size > most:
            instead = "" if pooler is None else ", or set truncate_prompt_tokens (-1: to what there is room for)"
            raise InvalidPromptError(
                f"the prompt has {ids.size} tokens and max_model_len is {limit}, the maximum context length: shorten it to "
                f"{most} or fewer{instead}"
            )
        if embeds is None:
            return TokenizedPrompt(ids, text, salt, pair_start=pair_start)
        rows = encode_rows(embeds[ids == EMBEDDED], self._model.dtype)
        if rows.size > MAX_PROMPT_BYTES:
            most = MAX_PROMPT_BYTES // self._model.embedding_bytes
            raise InvalidPromptError(
                f"prompt_embeds of {rows.size} bytes are more than a request may carry ({MAX_PROMPT_BYTES}): shorten "
                f"them to {most} tokens or fewer"
            )
        return TokenizedPrompt(ids, text, salt_of(rows, salt), rows, shown_ids=shown_ids)

    def _with_source(
        self, prompt: Prompt, rules: EncoderDecoder, adds_special: bool, workplace: Workplace | None
    ) -> TokenizedPrompt:
        """A prompt of the encoder, or of encoder and decoder."""
        from actorllm.intake.media.media_reader import PlacedItem
        from actorllm.intake.sources import GivenSource

        if self.sources is None or isinstance(prompt, Conversation | TextPair):
            raise InvalidPromptError(
                "a model with an encoder and a decoder takes no conversation; give 'encoder_prompt' and 'decoder_prompt'"
            )

        def to_ids(part: Any, adds_special: bool) -> I32:
            if not isinstance(part, str):
                return _checked_ids(part, self._model.vocab_size)
            self._check_length(part, is_truncated=False)
            return self._encode(part, adds_special, None, None, workplace)

        given = GivenSource.of(prompt, rules)
        check_salt(given.salt)
        made = self.sources.read(given, to_ids, adds_special, workplace)
        return TokenizedPrompt(
            made.ids,
            made.target_text,
            given.salt,
            made.rows,
            shown_ids=made.ids[made.num_rows :].tolist(),
            items=(PlacedItem(0, made.num_rows, made.digest),),
            encoder_input=EncoderInput(made.source_text, made.source_ids, made.num_rows),
        )

    def _media_of(self, prompt: Prompt) -> GivenMedia | None:
        """What is beside the text of a prompt. Raises InvalidPromptError for what this model does not take."""
        items, modality = items_of(prompt), None if self._model.media is None else self._model.media.modality
        if not items:
            return None
        if self.media is None:
            raise InvalidPromptError(
                f"prompts with {MEDIA_KEY!r} are not supported by this model; give text or token ids"
            )
        other = next((name for name in items if name != modality), None)
        if other is not None:
            raise InvalidPromptError(
                f"{MEDIA_KEY}: {other!r:.80} is not supported; prompts of this model may have {modality!r}"
            )
        assert modality is not None
        return given_media(prompt if isinstance(prompt, Mapping) else {}, modality, items[modality])

    def _with_media(
        self, prompt: Prompt, media: GivenMedia, adds_special: bool | None, workplace: Workplace | None
    ) -> TokenizedPrompt:
        """A text, or a conversation, with a placeholder for each item."""
        assert self.media is not None
        salt: str | None = None
        if isinstance(prompt, Mapping):
            salt = prompt.get("cache_salt")
            prompt = _unwrap({key: value for key, value in prompt.items() if key not in VLLM_PROMPT_KEYS[:3]})
        if isinstance(prompt, Conversation):
            text = self._render(prompt, workplace)
            adds_special = bool(adds_special)
        elif isinstance(prompt, str):
            text = prompt
        else:
            raise InvalidPromptError(f"a prompt with {MEDIA_KEY!r} must be text: give it under 'prompt'")
        self.check_characters(len(text))
        most = self._model.max_model_len - 1  # a token is to come
        made = self.media.read(text, media, adds_special is not False, most, workplace)
        return TokenizedPrompt(made.ids, text, salt, made.rows, shown_ids=made.shown_ids, items=made.items)

    def ids_of(self, prompt: str | Conversation, adds_special: bool, workplace: Workplace | None = None) -> list[int]:
        """The token ids of a text, or of a conversation, however many the model has room for. Raises as `tokenize`."""
        if items_of(prompt):
            raise InvalidPromptError(
                "the tokens of a conversation with images or audio are known when it is answered; ask without"
            )
        text = self._render(prompt, workplace) if isinstance(prompt, Conversation) else prompt
        self.check_characters(len(text))
        if workplace is not None and (workplace.takes_all or len(text) > LARGE_TEXT):
            ids = workplace.encode(self.tokenizer, "encode", text, adds_special)
        else:
            ids = self.tokenizer.encode(text, adds_special)
        listed: list[int] = ids.tolist()
        return listed

    def is_large(self, prompt: Prompt) -> bool:
        """Whether reading a prompt may take long, or what its own template pleases, as far as that is seen at once."""
        if self.sources is not None or (self.media is not None and items_of(prompt)):
            return True
        if isinstance(prompt, Mapping):
            prompt = next((prompt[key] for key in PROMPT_KEYS if prompt.get(key) is not None), "")
        if isinstance(prompt, TextPair):
            return LARGE_TEXT < prompt.num_characters <= self._model.max_prompt_characters
        if isinstance(prompt, Conversation):
            return prompt.has_own_template or prompt.num_characters > LARGE_TEXT
        return isinstance(prompt, str) and LARGE_TEXT < len(prompt) <= self._model.max_prompt_characters

    def check_characters(self, num_characters: int) -> None:
        """Raises InvalidPromptError for a text that is longer than this engine takes."""
        most = self._model.max_prompt_characters
        if num_characters > most:
            raise InvalidPromptError(too_many_characters(num_characters, most))

    def _check_length(self, text: str, is_truncated: bool) -> None:
        """Before a text is tokenized. Raises InvalidPromptError for one that cannot fit, whatever its tokens are."""
        self.check_characters(len(text))
        room = self._model.max_model_len - (self._model.pooler is None)
        if is_truncated or len(text) <= room or self._model.tokenizer is None:
            return
        longest = self.tokenizer.max_token_characters
        if longest is not None and len(text) > longest * room:
            raise InvalidPromptError(
                f"the prompt has {len(text)} characters and max_model_len is {self._model.max_model_len}: so many tokens "
                f"have at most {longest * room} characters; shorten it to the maximum context length"
            )

    def _render(self, conversation: Conversation, workplace: Workplace | None) -> str:
        """What a request brings of its own (a template, a long conversation) is rendered at the workplace."""
        self.check_characters(conversation.num_characters)
        if workplace is not None and (workplace.takes_all or self.is_large(conversation)):
            text = workplace.render(self.tokenizer, conversation, self._model.max_prompt_characters)
            if text is not None:
                return text
        return self.chat_template.render(conversation)

    def _encode(
        self, text: str, adds_special: bool, most: int | None, side: Side | None, workplace: Workplace | None
    ) -> I32:
        pooler, tokenizer = self._model.pooler, self.tokenizer
        method: Literal["encode", "encode_within"] = "encode"
        arguments: tuple[Any, ...] = (text, adds_special, most if side is None else None)
        if pooler is not None:
            if not text and not pooler.is_encoder:  # an encoder puts ids of its own around any text
                raise InvalidPromptError("the prompt is empty")
            method = "encode_within"
            arguments = (text.lower() if pooler.lowercases else text, adds_special, most, side)
        if workplace is not None and (workplace.takes_all or len(text) > LARGE_TEXT):
            return workplace.encode(tokenizer, method, *arguments)
        ids: I32 = getattr(tokenizer, method)(*arguments)
        return ids

    def _encode_pair(
        self, pair: TextPair, most: int | None, side: Side | None, workplace: Workplace | None
    ) -> tuple[I32, int]:
        """Each text is encoded for itself, as every tokenizer does, and the special tokens are put around both."""
        if not isinstance(pair.first, str) or not isinstance(pair.second, str):
            raise InvalidPromptError("a cross-encoder compares texts; token ids are not supported")
        self.check_characters(pair.num_characters)
        first, second = (
            self._encode(text, False, None, side, workplace) if text else NO_I32 for text in (pair.first, pair.second)
        )
        return self.tokenizer.pair_layout.joined(first, second, most, side or self.tokenizer.truncation_side)

    def _kept_tokens(self, truncate_prompt_tokens: int | None) -> int | None:
        """How many tokens of a prompt are left at most; None: all of them."""
        if truncate_prompt_tokens is None:
            return None
        limit = self._model.max_model_len
        if truncate_prompt_tokens > limit:
            raise InvalidParameterError(
                f"truncate_prompt_tokens={truncate_prompt_tokens} is more than max_model_len={limit}; use -1 to keep "
                f"what there is room for"
            )
        if truncate_prompt_tokens > 0:
            return truncate_prompt_tokens
        return limit - (self._model.pooler is None)

    def _truncates_end(self, side: Side | None) -> bool:
        """Of a prompt to be pooled."""
        if side is None and self._model.tokenizer is not None:
            side = self.tokenizer.truncation_side
        return side != "left"

    def _embedded(self, prompt: Mapping[str, Any]) -> tuple[NDArray[np.float32], I32, list[int]]:
        """Of a prompt with embeddings: the rows, the ids (EMBEDDED where the row counts), and the ids to be shown."""
        model = self._model
        if model.prompt_embedding_size is None or not model.takes_prompt_embeds:
            raise InvalidPromptError("prompt_embeds need an engine that is built with enable_prompt_embeds=True")
        _check_prompt_keys(prompt)
        rows = read_rows(prompt["prompt_embeds"], model.prompt_embedding_size)
        ids, is_id = prompt.get("prompt_token_ids"), prompt.get("prompt_is_token_ids")
        if (ids is None) != (is_id is None):
            there, missing = ("prompt_token_ids", "prompt_is_token_ids")[:: 1 if is_id is None else -1]
            raise InvalidPromptError(f"prompt_embeds with {there} need {missing}, too: it says where the ids count")
        if ids is None or is_id is None:
            return rows, np.full(len(rows), EMBEDDED, np.int32), [0] * len(rows)
        if not isinstance(ids, Iterable) or isinstance(ids, str | bytes):
            raise InvalidPromptError(f"prompt_token_ids={shown(ids)} must be a list of token ids")
        all_ids = ids.tolist() if isinstance(ids, np.ndarray) else list(ids)
        mask = _mask(is_id)
        if len(all_ids) != len(rows) or mask.shape != (len(rows),):
            raise InvalidPromptError(
                f"prompt_embeds of {len(rows)} tokens need as many prompt_token_ids and prompt_is_token_ids (booleans), "
                f"not {len(all_ids)} and {mask.size}"
            )
        mixed = np.full(len(rows), EMBEDDED, np.int32)
        mixed[mask] = _checked_ids(
            [i for i, counts in zip(all_ids, mask.tolist(), strict=True) if counts], model.vocab_size
        )
        return rows, mixed, all_ids

    @property
    def chat_template(self) -> ChatTemplate:
        """Read when first needed; raises as `tokenizer` does, and CorruptModelError."""
        template = self._chat_template
        if template is None:
            template = self._chat_template = ChatTemplate(self.tokenizer)
        return template


def too_many_characters(num_characters: int, most: int) -> str:
    """What is told of a text that is longer than an engine takes."""
    return (
        f"the prompt has {num_characters} characters, and at most {most} are taken (max_prompt_characters); shorten it"
    )


def as_batch(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A list of token ids is one prompt, a list of anything else is many."""
    if isinstance(prompts, str | Mapping | Conversation | TextPair):
        return [prompts]
    if isinstance(prompts, bytes) or not isinstance(prompts, Iterable):
        raise InvalidPromptError(f"prompts must be text, token ids or a list of prompts, not {type(prompts).__name__}")
    items: list[Any] = list(prompts)
    return [items] if items and all(isinstance(item, Integral) for item in items) else items


def prompt_text(prompt: Prompt) -> str | None:
    """What a prompt says in text, if it does."""
    if isinstance(prompt, Mapping):
        text = prompt.get("prompt")
        return text if isinstance(text, str) else None
    return prompt if isinstance(prompt, str) else None


def checked_tokenization(given: Mapping[str, Any] | None, params: SamplingParams | PoolingParams) -> dict[str, Any]:
    """The keyword arguments of `PromptReader.tokenize`: tokenization_kwargs go before the parameter."""
    if given is not None and not isinstance(given, Mapping):
        raise InvalidParameterError(f"tokenization_kwargs={shown(given)} must be a mapping")
    checked = {} if params.truncate_prompt_tokens is None else {"truncate_prompt_tokens": params.truncate_prompt_tokens}
    for name, value in (given or {}).items():
        if name not in TOKENIZATION_KEYS:
            raise InvalidParameterError(
                f"tokenization_kwargs: {name!r} is not one of {', '.join(map(repr, TOKENIZATION_KEYS))}"
                f"{nearest_name(str(name), TOKENIZATION_KEYS)}"
            )
        if name == "truncate_prompt_tokens" and value is not None:
            checked[name] = check_truncation(value)
        elif name == "truncation_side":
            if value not in (None, "left", "right"):
                raise InvalidParameterError(
                    f"tokenization_kwargs: truncation_side={value!r:.80} must be 'left' or 'right'"
                )
            checked[name] = value
        elif isinstance(value, bool):
            checked[name] = value
        elif value is not None:
            raise InvalidParameterError(f"tokenization_kwargs: {name}={value!r} must be True or False")
    return checked


def items_of(prompt: Prompt) -> dict[str, list[Any]]:
    """The images and recordings of a prompt as its caller gave them, by modality; those that are not there are left out."""
    if isinstance(prompt, Mapping) and isinstance(inner := prompt.get("prompt"), Conversation):
        prompt = inner
    if isinstance(prompt, Conversation):
        return {} if prompt.modality is None or not prompt.items else {prompt.modality: list(prompt.items)}
    data = prompt.get(MEDIA_KEY) if isinstance(prompt, Mapping) else None
    if not isinstance(data, Mapping):
        return {}  # what else it is, is told where the keys are checked
    listed = {
        name: list(given) if isinstance(given, list) or (name == "image" and isinstance(given, tuple)) else [given]
        for name, given in data.items()
        if given is not None
    }
    return {name: given for name, given in listed.items() if given}


def with_processor_kwargs(prompt: Prompt, given: object, model: ModelConfig) -> Prompt:
    """A prompt with arguments of the model's processor, before which its own count. One without items is left as it is.

    Raises InvalidParameterError: they are no mapping of plain values, or the model has an encoder and a decoder.
    """
    try:
        options = processor_kwargs(PROCESSOR_KEY, given)
    except ConfigError as error:
        raise InvalidParameterError(str(error)) from error
    if options and model.encoder_decoder is not None:
        raise InvalidParameterError(
            f"{PROCESSOR_KEY}={shown(given)}: a model with an encoder and a decoder takes none; leave it out"
        )
    if not options or not items_of(prompt):
        return prompt
    if not isinstance(prompt, Mapping):
        return {"prompt": prompt, PROCESSOR_KEY: options}
    own = prompt.get(PROCESSOR_KEY)
    if own is not None and not isinstance(own, Mapping):
        return prompt  # that it is none is told where the keys are checked
    return {**prompt, PROCESSOR_KEY: {**options, **(own or {})}}


def given_media(prompt: Mapping[str, Any], modality: Modality, items: list[Any]) -> GivenMedia:
    """With what stands beside the items in the mapping of a prompt. Raises InvalidPromptError."""
    from actorllm.intake.media.media_reader import GivenMedia

    uuids = prompt.get(UUIDS_KEY)
    given = uuids.get(modality) if isinstance(uuids, Mapping) else uuids
    named = [] if given is None else list(given) if isinstance(given, list | tuple) else [given]
    is_text = all(name is None or (isinstance(name, str) and 0 < len(name) <= MAX_UUID) for name in named)
    if not is_text or (named and len(named) != len(items)):
        raise InvalidPromptError(
            f"{UUIDS_KEY}={shown(uuids)} must be {{{modality!r}: [...]}} with a short text or None for each of {len(items)} items"
        )
    try:
        options = processor_kwargs(PROCESSOR_KEY, prompt.get(PROCESSOR_KEY))
    except ConfigError as error:
        raise InvalidPromptError(str(error)) from error
    return GivenMedia(items, named, options)


MAX_UUID = 256
"""Characters of the name that a caller gives to an item."""


def snapshot(prompt: Prompt) -> Prompt:
    """What the caller changes after the call is none of this request's business."""
    if isinstance(prompt, Mapping):
        return {k: _copied(v) for k, v in prompt.items()}
    return prompt.copy() if isinstance(prompt, list | np.ndarray) else prompt


def _copied(value: Any) -> Any:
    if isinstance(value, list | np.ndarray):
        return value.copy()
    if isinstance(value, Mapping):
        return {k: _copied(v) for k, v in value.items()}
    return value.detach().clone() if hasattr(value, "detach") else value  # a tensor


def _check_prompt_keys(prompt: Mapping[str, Any]) -> None:
    for key, value in prompt.items():
        if key in VLLM_PROMPT_KEYS[:3] and isinstance(value, Mapping) and not items_of(prompt):
            continue  # of no items
        if key in VLLM_PROMPT_KEYS and value is not None:
            raise InvalidPromptError(f"prompts with {key!r} are not supported; give text or token ids")
        if key not in (*PROMPT_KEYS, *EMBEDS_KEYS) and key != "cache_salt" and value is not None:
            raise InvalidPromptError(
                f"a prompt mapping has {' and '.join(map(repr, PROMPT_KEYS))}, not {key!r}"
                f"{nearest_name(str(key), (*PROMPT_KEYS, *EMBEDS_KEYS, 'cache_salt'))}"
            )
    check_salt(prompt.get("cache_salt"))


def check_salt(salt: Any) -> None:
    """Raises InvalidPromptError for what is no `cache_salt`. Every request of a body with many prompts carries it."""
    if salt is not None and not (isinstance(salt, str) and 0 < len(salt) <= MAX_LABEL and is_text(salt)):
        told = f"a string of valid Unicode with at least one character and at most {MAX_LABEL}"
        raise InvalidPromptError(f"cache_salt={shown(salt)} must be {told}")


def _unwrap(prompt: Mapping[str, Any]) -> Prompt:
    _check_prompt_keys(prompt)
    if prompt.get("prompt_is_token_ids") is not None:
        raise InvalidPromptError("prompt_is_token_ids belong to a prompt with prompt_embeds, which is missing")
    for key in PROMPT_KEYS:
        if prompt.get(key) is not None:
            inner: Prompt = prompt[key]
            return inner
    raise InvalidPromptError(f"a prompt mapping needs 'prompt' or 'prompt_token_ids'; it has {list(prompt)}")


def _mask(is_id: object) -> NDArray[np.bool_]:
    if hasattr(is_id, "tolist"):
        is_id = is_id.tolist()
    values = list(is_id) if isinstance(is_id, Iterable) else None
    if values is None or isinstance(is_id, str | bytes | Mapping):
        raise InvalidPromptError(f"prompt_is_token_ids={shown(is_id)} must be a list of booleans, one for each token")
    for place, value in enumerate(values):
        if not isinstance(getattr(value, "tolist", lambda value=value: value)(), bool):
            raise InvalidPromptError(f"prompt_is_token_ids must be booleans, and item {place} is {shown(value)}")
    return np.array(values, np.bool_)


_BOOLEANS = frozenset((bool, np.bool_))
"""Among integers numpy takes them for integers."""


def _checked_ids(prompt: object, vocab_size: int) -> I32:
    if isinstance(prompt, bytes) or not isinstance(prompt, Iterable):
        raise InvalidPromptError(f"a prompt must be text or token ids, not {type(prompt).__name__}")
    items = prompt if isinstance(prompt, np.ndarray) else list(prompt)
    if isinstance(items, list) and not _BOOLEANS.isdisjoint(map(type, items)):
        raise InvalidPromptError("token ids must be a flat list of integers, and a bool is among them")
    try:
        ids = np.array(items)
    except (ValueError, TypeError, OverflowError):  # what numpy says of it names no value and no fix
        raise InvalidPromptError(_wrong_id(items, vocab_size)) from None
    if ids.size and (ids.ndim != 1 or ids.dtype.kind not in "iu"):
        if isinstance(items, list):
            raise InvalidPromptError(_wrong_id(items, vocab_size))
        raise InvalidPromptError(f"token ids must be a flat list of integers, not {ids.dtype} in {ids.ndim} dimensions")
    if ids.size and (int(ids.min()) < 0 or int(ids.max()) >= vocab_size):
        bad = ids[(ids < 0) | (ids >= vocab_size)][0]
        raise InvalidPromptError(_outside(int(bad), vocab_size))
    checked: I32 = ids.astype(np.int32)
    return checked


def _wrong_id(items: Iterable[object], vocab_size: int) -> str:
    """About the first of the items that is no token id."""
    for place, item in enumerate(items):
        if not isinstance(item, Integral):
            return (
                f"token ids must be a flat list of integers, and item {place} is {shown(item)} ({type(item).__name__})"
            )
        if not 0 <= int(item) < vocab_size:
            return _outside(int(item), vocab_size)
    return "token ids must be a flat list of integers"


def _outside(token_id: int, vocab_size: int) -> str:
    return f"token id {shown(token_id)} is outside the vocabulary of {vocab_size} tokens"
