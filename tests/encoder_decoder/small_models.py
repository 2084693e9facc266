"""Small random models with an encoder and a decoder, in folders, and what transformers makes with them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

VOCABULARY = 300
START, END, PAD = 2, 2, 1


def _bart_like(kind: str, **more: Any) -> Callable[[Path], Path]:
    def save(folder: Path) -> Path:
        import transformers as t

        config = getattr(t, f"{kind}Config")(
            vocab_size=VOCABULARY,
            d_model=48,
            encoder_layers=2,
            decoder_layers=3,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=64,
            decoder_ffn_dim=80,
            max_position_embeddings=64,
            decoder_start_token_id=START,
            bos_token_id=0,
            eos_token_id=END,
            pad_token_id=PAD,
            **more,
        )
        auto: Any = t.AutoModelForSeq2SeqLM
        return saved(folder, auto.from_config(config))

    return save


def _t5_like(kind: str, **more: Any) -> Callable[[Path], Path]:
    def save(folder: Path) -> Path:
        import transformers as t

        config = getattr(t, f"{kind}Config")(
            vocab_size=VOCABULARY,
            d_model=48,
            d_kv=20,
            d_ff=80,
            num_layers=2,
            num_decoder_layers=3,
            num_heads=4,
            relative_attention_num_buckets=8,
            relative_attention_max_distance=20,
            decoder_start_token_id=0,
            eos_token_id=1,
            pad_token_id=0,
            **more,
        )
        auto: Any = t.AutoModelForSeq2SeqLM
        return saved(folder, auto.from_config(config))

    return save


SAVE: dict[str, Callable[[Path], Path]] = {
    "bart": _bart_like("Bart"),
    "bart, scaled": _bart_like("Bart", scale_embedding=True, activation_function="relu"),
    "mbart": _bart_like("MBart", scale_embedding=True),
    "marian": _bart_like("Marian", scale_embedding=True, activation_function="silu"),
    "t5": _t5_like("T5", n_positions=64),
    "t5, gated": _t5_like("T5", feed_forward_proj="gated-gelu", tie_word_embeddings=False),
    "mt5": _t5_like("MT5", feed_forward_proj="gated-gelu", tie_word_embeddings=False),
    "pegasus": _bart_like("Pegasus", activation_function="relu"),
    "m2m100": _bart_like("M2M100", scale_embedding=True, activation_function="relu"),
    "blenderbot": _bart_like("Blenderbot"),
}


WINDOW_S, RATE = 2, 16_000
LANGUAGES = ("en", "de")


def save_whisper(folder: Path) -> Path:
    """For recordings of up to 2 s, which become 100 rows; a time stamp counts 0.02 s."""
    import transformers as t

    words = ["<|endoftext|>", "<|startoftranscript|>", *(f"<|{language}|>" for language in LANGUAGES)]
    words += ["<|translate|>", "<|transcribe|>", "<|startofprev|>", "<|notimestamps|>"]
    words += [f"<|{number * 0.02:.2f}|>" for number in range(101)]
    tokenizer = _bytes(words)
    tokenizer.save_pretrained(folder)
    t.WhisperFeatureExtractor(feature_size=16, chunk_length=WINDOW_S).save_pretrained(folder)
    id_of = tokenizer.convert_tokens_to_ids
    config = t.WhisperConfig(
        vocab_size=len(tokenizer),
        d_model=48,
        encoder_layers=2,
        decoder_layers=3,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=64,
        decoder_ffn_dim=80,
        num_mel_bins=16,
        max_source_positions=100,
        max_target_positions=64,
        decoder_start_token_id=id_of("<|startoftranscript|>"),
        bos_token_id=id_of("<|endoftext|>"),
        eos_token_id=id_of("<|endoftext|>"),
        pad_token_id=id_of("<|endoftext|>"),
        suppress_tokens=None,
        begin_suppress_tokens=None,
    )
    saved(folder, t.WhisperForConditionalGeneration(config))
    end = id_of("<|endoftext|>")
    generation = {"decoder_start_token_id": id_of("<|startoftranscript|>"), "eos_token_id": end, "pad_token_id": end}
    write_json(folder, "generation_config.json", generation)
    return folder


def sound(seed: int, seconds: float = 1.0) -> Any:
    """float32 [num_samples], at 16 kHz."""
    import numpy as np

    time = np.arange(int(seconds * RATE)) / RATE
    noise = np.random.default_rng(seed).normal(0, 0.05, time.size)
    return (0.4 * np.sin(2 * np.pi * (200 + 170 * seed) * time) + noise).astype(np.float32)


def _bytes(words: list[str]) -> Any:
    """A tokenizer of bytes, with these words as special tokens behind them."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {word: number for number, word in enumerate([*letters, *words])}
    made = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    tokenizer: Any = PreTrainedTokenizerFast(tokenizer_object=made, eos_token=words[0], pad_token=words[0])
    tokenizer.add_special_tokens({"additional_special_tokens": words})
    return tokenizer


def saved(folder: Path, model: Any) -> Path:
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.eval().named_parameters():  # so that what is sampled depends on everything
            if parameter.ndim >= 2:
                is_outer = any(part in name for part in ("embed", "shared", "lm_head", "bias"))
                parameter.normal_(
                    0.0, 1.0 if "attention_bias" in name else (1.0 if is_outer else 2.0) / parameter.shape[-1] ** 0.5
                )
            else:
                parameter.add_(torch.randn_like(parameter) * 0.1)
        if hasattr(model, "final_logits_bias"):
            model.final_logits_bias.normal_(0.0, 0.1)
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    return folder


def save_tokenizer(folder: Path) -> None:
    """Of bytes, with special tokens around a text, as BART has them."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {word: number for number, word in enumerate(["<s>", "<pad>", "</s>", "<unk>", *letters])}
    made = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", END)]
    )
    tokenizer: Any = PreTrainedTokenizerFast(
        tokenizer_object=made, unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )
    tokenizer.save_pretrained(folder)


def ids(seed: int, count: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    found: list[int] = torch.randint(4, VOCABULARY, (count,), generator=generator).tolist()
    return found


def stock(folder: Path) -> Any:
    from transformers import AutoModelForSeq2SeqLM

    auto: Any = AutoModelForSeq2SeqLM
    return auto.from_pretrained(folder, dtype=torch.float32).eval()


@torch.no_grad()
def logits(model: Any, source: list[int], target: list[int]) -> torch.Tensor:
    """float32 [len(target), vocab_size]."""
    made = model(input_ids=torch.tensor([source]), decoder_input_ids=torch.tensor([target]), use_cache=False)
    found: torch.Tensor = made.logits[0].float()
    return found


def write_json(folder: Path, name: str, tree: Any) -> None:
    (folder / name).write_text(json.dumps(tree))
