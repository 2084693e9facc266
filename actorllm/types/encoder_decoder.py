"""`EncoderDecoder`: what a model with an encoder beside its decoder takes, read from config.json and the engine's arguments.

The rows of the encoder stand before the tokens of the decoder in the blocks of a request (`model.encoder_decoder`). So the engine's
`max_model_len` is what both have at most, together. Read by `config`; used by the intake and by the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from actorllm.errors import ConfigError, CorruptModelError
from actorllm.types.media_rules import checked_domains, checked_folder
from actorllm.types.model_files import MAX_HEADS, MAX_LAYERS
from actorllm.types.quantization import ROUNDING

Kind: TypeAlias = Literal["text", "audio"]
"""What the encoder takes."""

ARCHITECTURES: dict[str, Kind] = {
    "BartForConditionalGeneration": "text",
    "MBartForConditionalGeneration": "text",
    "PegasusForConditionalGeneration": "text",
    "M2M100ForConditionalGeneration": "text",
    "BlenderbotForConditionalGeneration": "text",
    "MarianMTModel": "text",
    "T5ForConditionalGeneration": "text",
    "MT5ForConditionalGeneration": "text",
    "WhisperForConditionalGeneration": "audio",
}
"""Those that were compared with transformers."""


@dataclass(frozen=True, slots=True)
class EncoderDecoder:
    """Of one model."""

    kind: Kind
    max_source: int
    """Most rows of the encoder."""
    max_target: int
    """Most tokens of the decoder, those of its prompt included."""
    start_ids: tuple[int, ...]
    """What the decoder's prompt begins with; nothing: each prompt has to say it."""
    never: tuple[int, ...] = ()
    """Tokens that are not to be written."""
    local_path: str | None = None
    """Recordings below this folder may be read (allowed_local_media_path); None: none may be."""
    domains: tuple[str, ...] = ()
    """Hosts that may be asked for recordings (allowed_media_domains)."""

    @property
    def max_model_len(self) -> int:
        """Positions of a request: rows, and tokens behind them."""
        return self.max_source + self.max_target

    @classmethod
    def from_tree(cls, tree: dict[str, Any] | None) -> EncoderDecoder | None:
        """Of a configuration that was written as JSON."""
        if tree is None:
            return None
        listed = ("start_ids", "never", "domains")
        return cls(**tree | {name: tuple(tree.get(name, ())) for name in listed})

    @classmethod
    def read(
        cls, architecture: str, hf: Mapping[str, Any], generation: Mapping[str, Any] | None, given: Mapping[str, Any]
    ) -> EncoderDecoder | None:
        """Of a model. None: it is none of these.

        Arguments:
            architecture: of config.json.
            hf: config.json.
            generation: generation_config.json, if there is one.
            given: the engine's arguments; max_model_len bounds the encoder's input and the decoder's tokens, each for itself.

        Raises:
            ConfigError: an argument does not go together with such a model.
            CorruptModelError: config.json says nonsense.
        """
        if architecture not in ARCHITECTURES:
            return None
        kind = ARCHITECTURES[architecture]
        _check(architecture, given)
        _check_sizes(hf)
        source, target = _lengths(kind, hf, given["max_model_len"])
        first = [_token(tree or {}, "decoder_start_token_id") for tree in (generation, hf)]
        forced = [_token(tree or {}, "forced_bos_token_id") for tree in (generation, hf)]
        start = next((one for one in first if one is not None), None)
        behind = next((one for one in forced if one is not None), None) if kind == "text" else None
        ids = tuple(one for one in (start, behind) if one is not None) if start is not None else ()
        path, domains = given["allowed_local_media_path"], given["allowed_media_domains"]
        never = _never(hf if generation is None else generation, hf) if kind == "text" else ()
        return cls(kind, source, target, ids, never, checked_folder(path), checked_domains(domains))


def _check(architecture: str, given: Mapping[str, Any]) -> None:
    """Raises ConfigError for what is not made for these models."""
    told = f"is not supported for {architecture}, a model with an encoder and a decoder"
    if given["device"] not in ("auto", "cpu"):
        raise ConfigError(f"device={given['device']!r} {told}, yet; use device='cpu'")
    unused: tuple[tuple[str, tuple[Any, ...]], ...] = (
        ("enable_prompt_embeds", (False, None)),
        ("enable_lora", (False, None)),
        ("speculative_config", (None,)),
        ("quantization", (None, *ROUNDING)),
        ("kv_cache_dtype", ("auto",)),
        ("batch_invariant", (False, None)),
        ("tensor_parallel_size", (1,)),
        ("pipeline_parallel_size", (1,)),
    )
    for name, values in unused:
        if name in given and given[name] not in values:
            raise ConfigError(f"{name}={given[name]!r:.80} {told}; leave it out")


SIZES = {
    **dict.fromkeys(("encoder_layers", "decoder_layers", "num_layers", "num_decoder_layers"), MAX_LAYERS),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads", "num_heads"), MAX_HEADS),
}
"""Of config.json, with the most that is known of each: whatever is made of each layer would not end."""


def _check_sizes(hf: Mapping[str, Any]) -> None:
    """Raises CorruptModelError."""
    for key, most in SIZES.items():
        value = hf.get(key)
        is_number = isinstance(value, int) and not isinstance(value, bool)
        if value is not None and not (is_number and 1 <= value <= most):
            raise CorruptModelError(f"config.json: {key} is {value!r:.40}, a number from 1 to {most} is needed")


def _lengths(kind: Kind, hf: Mapping[str, Any], given: Any) -> tuple[int, int]:
    """Most rows of the encoder, and most tokens of the decoder."""
    if kind == "audio":
        source, target = _count(hf, "max_source_positions"), _count(hf, "max_target_positions")
        return source, target if given is None else _within(given, target)
    key = next((key for key in ("max_position_embeddings", "n_positions") if hf.get(key) is not None), None)
    has_table = key == "max_position_embeddings"
    if key is None:
        length = DEFAULT_LENGTH
    else:
        length = _count(hf, key)
    if given is not None:
        length = _within(given, length if has_table else None)
    return length, length


DEFAULT_LENGTH = 512
"""Where config.json says none, and positions are only distances."""


def _within(given: Any, most: int | None) -> int:
    if given == -1 and not isinstance(given, bool) and most is not None:
        return most
    if isinstance(given, bool) or not isinstance(given, int) or given < 2:
        raise ConfigError(f"max_model_len={given!r} must be a number of tokens, 2 or more")
    if most is not None and given > most:
        raise ConfigError(f"max_model_len={given} is more than the {most} positions of the model; use {most} or less")
    return given


def _count(hf: Mapping[str, Any], key: str) -> int:
    value = hf.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < 2:
        raise CorruptModelError(f"config.json: {key} is {value!r}; it must be a number of positions")
    return value


def _token(tree: Mapping[str, Any], key: str) -> int | None:
    value = tree.get(key)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
        raise CorruptModelError(f"{key} is {value!r}; it must be a token id")
    return value


def _never(tree: Mapping[str, Any], hf: Mapping[str, Any]) -> tuple[int, ...]:
    """Single tokens among `bad_words_ids`: models of Marian never learned that they must not write padding.

    tree: generation_config.json, or config.json where there is none.
    """
    listed = tree.get("bad_words_ids") or []
    is_list = isinstance(listed, list) and all(isinstance(one, list) and one for one in listed)
    if not is_list or not all(type(token) is int for one in listed for token in one):
        raise CorruptModelError(f"bad_words_ids is {listed!r:.80}; it must be a list of lists of token ids")
    found = tuple(one[0] for one in listed if len(one) == 1)
    vocab_size = hf.get("vocab_size")
    if isinstance(vocab_size, int) and not all(0 <= token < vocab_size for token in found):
        raise CorruptModelError(f"bad_words_ids is {listed!r:.80}; the vocabulary has {vocab_size} tokens")
    return found
