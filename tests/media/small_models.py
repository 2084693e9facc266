"""Tiny random models that take images or audio, each with a processor, in a folder as the hub has them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from actorllm.intake.media.processor import load_processor, without_videos

TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {% for part in message.content %}"
    "{% if part.type == 'image' %}IMAGE{% elif part.type == 'audio' %}AUDIO{% else %}{{ part.text }}{% endif %}{% endfor %}\n"
    "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)
SPECIAL = ["<unk>", "<s>", "</s>", "<pad>"]
VOCAB = 300
IMAGE_SIZE, PATCH = 30, 10
RATE = 16_000

TEXT: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 3,
    "tie_word_embeddings": False,
}


def picture(seed: int, width: int = 40, height: int = 32) -> Image.Image:
    """An image of noise."""
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8))


def sound(seed: int, seconds: float = 0.5) -> NDArray[np.float32]:
    """A recording of noise."""
    return np.random.default_rng(seed).standard_normal(int(seconds * RATE)).astype(np.float32) * 0.1


def save_llava(folder: Path) -> Path:
    """A LLaVA of CLIP and Llama: an image has 9 rows."""
    import transformers as t

    vision = t.CLIPVisionConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=2,
        image_size=IMAGE_SIZE,
        patch_size=PATCH,
    )
    tokenizer = _tokenizer("<image>")
    config = t.LlavaConfig(vision_config=vision, text_config=t.LlamaConfig(**TEXT), image_token_index=4)
    processor = t.LlavaProcessor(
        image_processor=t.CLIPImageProcessorPil(
            size={"shortest_edge": IMAGE_SIZE}, crop_size={"height": IMAGE_SIZE, "width": IMAGE_SIZE}
        ),
        tokenizer=tokenizer,
        patch_size=PATCH,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=TEMPLATE.replace("IMAGE", "<image>"),
    )
    return _saved(folder, t.LlavaForConditionalGeneration(config), processor)


def _save_idefics(folder: Path, kind: str) -> Path:
    """Of SigLIP and Llama. An image is cut into tiles: each has 4 rows, with text between them."""
    import transformers as t

    vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    vision |= {"image_size": 32, "patch_size": 8}
    tokenizer = _tokenizer("<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>", *_tiles(3))
    config = getattr(t, f"{kind}Config")(
        vision_config=vision, text_config=t.LlamaConfig(**TEXT), image_token_id=4, scale_factor=2, pad_token_id=3
    )
    processor = without_videos(getattr(t, f"{kind}Processor"))(
        image_processor=getattr(t, f"{kind}ImageProcessorPil")(
            size={"longest_edge": 64}, max_image_size={"longest_edge": 32}, do_image_splitting=True
        ),
        tokenizer=tokenizer,
        image_seq_len=4,
        **({} if kind == "Idefics3" else {"video_processor": None}),
        chat_template=TEMPLATE.replace("IMAGE", "<image>"),
    )
    return _saved(folder, getattr(t, f"{kind}ForConditionalGeneration")(config), processor)


def save_idefics3(folder: Path) -> Path:
    return _save_idefics(folder, "Idefics3")


def save_smolvlm(folder: Path) -> Path:
    return _save_idefics(folder, "SmolVLM")


def _tiles(most: int) -> list[str]:
    return [f"<row_{row}_col_{column}>" for row in range(1, most + 1) for column in range(1, most + 1)]


def save_gemma3(folder: Path) -> Path:
    """Of SigLIP and Gemma 3, with a window shorter than some prompts: an image has 16 rows that see each other."""
    import transformers as t

    vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    vision |= {"image_size": 32, "patch_size": 4}
    text = TEXT | {"head_dim": 16, "sliding_window": 12, "num_hidden_layers": 3, "query_pre_attn_scalar": 16}
    text["layer_types"] = ["sliding_attention", "full_attention", "sliding_attention"]
    tokenizer = _tokenizer("<image_soft_token>", "<start_of_image>", "<end_of_image>")
    tokenizer._set_model_specific_special_tokens(
        {"image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"}
    )
    config = t.Gemma3Config(
        vision_config=vision,
        text_config=t.Gemma3TextConfig(**text),
        image_token_index=4,
        boi_token_index=5,
        eoi_token_index=6,
        mm_tokens_per_image=16,
    )
    processor = t.Gemma3Processor(
        image_processor=t.Gemma3ImageProcessorPil(size={"height": 32, "width": 32}),
        tokenizer=tokenizer,
        image_seq_length=16,
        chat_template=TEMPLATE.replace("IMAGE", "<start_of_image>"),
    )
    return _saved(folder, t.Gemma3ForConditionalGeneration(config), processor)


def _qwen_processor(kind: str, tokenizer: Any) -> Any:
    import transformers as t

    sizes = {"patch_size": 4, "temporal_patch_size": 2, "merge_size": 2}
    images = t.Qwen2VLImageProcessorPil(**sizes, size={"shortest_edge": 64, "longest_edge": 4096})
    return without_videos(getattr(t, f"{kind}Processor"))(
        image_processor=images,
        tokenizer=tokenizer,
        chat_template=TEMPLATE.replace("IMAGE", "<|vision_start|><|image_pad|><|vision_end|>"),
    )


def save_qwen2_5_vl(folder: Path) -> Path:
    """Of Qwen's own tower and Qwen2: the rows of an image stand in a grid that is as large as the image."""
    import transformers as t

    tokenizer = _tokenizer("<|image_pad|>", "<|vision_start|>", "<|vision_end|>", "<|video_pad|>")
    vision = {"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64}
    vision |= {"patch_size": 4, "window_size": 16, "fullatt_block_indexes": [1]}
    rope = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0}
    config = t.Qwen2_5_VLConfig(
        vision_config=vision,
        text_config={**TEXT, "rope_parameters": rope},
        image_token_id=4,
        vision_start_token_id=5,
        vision_end_token_id=6,
        video_token_id=7,
    )
    return _saved(folder, t.Qwen2_5_VLForConditionalGeneration(config), _qwen_processor("Qwen2_5_VL", tokenizer))


def save_qwen2_vl(folder: Path) -> Path:
    """The one before it, whose tower looks at all of an image in every layer."""
    import transformers as t

    tokenizer = _tokenizer("<|image_pad|>", "<|vision_start|>", "<|vision_end|>", "<|video_pad|>")
    vision = {"depth": 2, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "mlp_ratio": 2, "patch_size": 4}
    rope = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0}
    config = t.Qwen2VLConfig(
        vision_config=vision,
        text_config={**TEXT, "rope_parameters": rope},
        image_token_id=4,
        vision_start_token_id=5,
        vision_end_token_id=6,
        video_token_id=7,
    )
    return _saved(folder, t.Qwen2VLForConditionalGeneration(config), _qwen_processor("Qwen2VL", tokenizer))


def save_qwen3_vl(folder: Path) -> Path:
    """The same with states of the tower added to those behind the first layers."""
    import transformers as t

    tokenizer = _tokenizer("<|image_pad|>", "<|vision_start|>", "<|vision_end|>", "<|video_pad|>")
    vision = {"depth": 3, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64}
    vision |= {"patch_size": 4, "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]}
    rope = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0, "mrope_interleaved": True}
    config = t.Qwen3VLConfig(
        vision_config=vision,
        text_config={**TEXT, "head_dim": 16, "num_hidden_layers": 3, "rope_parameters": rope},
        image_token_id=4,
        vision_start_token_id=5,
        vision_end_token_id=6,
        video_token_id=7,
    )
    return _saved(folder, t.Qwen3VLForConditionalGeneration(config), _qwen_processor("Qwen3VL", tokenizer))


def save_qwen2_audio(folder: Path) -> Path:
    """Of a Whisper encoder and Qwen2, for recordings of up to 2 s: a second has 25 rows."""
    import transformers as t

    tokenizer = _tokenizer("<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>")
    audio = {"d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 48}
    audio |= {"num_mel_bins": 16, "max_source_positions": 100}
    config = t.Qwen2AudioConfig(audio_config=audio, text_config=t.Qwen2Config(**TEXT), audio_token_index=4)
    processor = t.Qwen2AudioProcessor(
        feature_extractor=t.WhisperFeatureExtractor(feature_size=16, chunk_length=2),
        tokenizer=tokenizer,
        chat_template=TEMPLATE.replace("AUDIO", "<|audio_bos|><|AUDIO|><|audio_eos|>"),
    )
    return _saved(folder, t.Qwen2AudioForConditionalGeneration(config), processor)


SAVE: dict[str, Callable[[Path], Path]] = {
    "gemma3": save_gemma3,
    "idefics3": save_idefics3,
    "qwen2_5_vl": save_qwen2_5_vl,
    "qwen2_audio": save_qwen2_audio,
    "qwen2_vl": save_qwen2_vl,
    "qwen3_vl": save_qwen3_vl,
    "smolvlm": save_smolvlm,
}
"""Those that have a test of their own each."""


def _saved(folder: Path, model: Any, processor: Any) -> Path:
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.eval().named_parameters():  # so that what is sampled depends on everything
            if parameter.ndim >= 2:
                scale = 0.1 if "embed_tokens" in name else 2.0  # what comes last must not decide alone
                parameter.normal_(0.0, scale / parameter[0].numel() ** 0.5)
            elif "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 2}))
    return folder


def _tokenizer(*words: str) -> Any:
    """Bytes, and the special tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {word: number for number, word in enumerate([*SPECIAL, *words, *letters])}
    made = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    tokenizer: Any = PreTrainedTokenizerFast(
        tokenizer_object=made, unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )
    tokenizer.add_special_tokens({"additional_special_tokens": list(words)})
    return tokenizer


def generated(folder: Path, text: str, items: list[Any], num_tokens: int) -> list[int]:
    """What transformers' `generate` makes, greedily."""
    from transformers import AutoModelForMultimodalLM

    processor = load_processor(str(folder))
    model: Any = AutoModelForMultimodalLM.from_pretrained(folder, dtype=torch.float32).eval()
    is_audio = bool(items) and isinstance(items[0], np.ndarray)
    media: dict[str, Any] = {"audio": items, "sampling_rate": RATE} if is_audio else {"images": items or None}
    given = processor(text=[text], **media, return_tensors="pt")
    with torch.no_grad():
        ids = model.generate(**given, max_new_tokens=num_tokens, do_sample=False, eos_token_id=None)
    made: list[int] = ids[0, given["input_ids"].shape[1] :].tolist()
    return made
