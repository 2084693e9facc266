"""Tiny random models that take images, each with a processor, in a folder as the hub has them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {% for part in message.content %}"
    "{% if part.type == 'image' %}<image>{% else %}{{ part.text }}{% endif %}{% endfor %}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
WORDS = ["<unk>", "<s>", "</s>", "<pad>", "<image>"]
VOCAB = 300
IMAGE_SIZE, PATCH = 30, 10


def picture(seed: int, width: int = 40, height: int = 32) -> Image.Image:
    """An image of noise."""
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8))


def save_llava(folder: Path) -> Path:
    """A LLaVA of CLIP and Llama: an image has 9 rows."""
    from transformers import (
        CLIPImageProcessorPil,
        CLIPVisionConfig,
        LlamaConfig,
        LlavaConfig,
        LlavaForConditionalGeneration,
        LlavaProcessor,
    )

    vision = CLIPVisionConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=2,
        image_size=IMAGE_SIZE,
        patch_size=PATCH,
    )
    text = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=3,
    )
    config = LlavaConfig(vision_config=vision, text_config=text, image_token_index=WORDS.index("<image>"))
    torch.manual_seed(0)
    model: Any = LlavaForConditionalGeneration(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # so that what is sampled depends on everything
            parameter.mul_(1.0 if parameter.ndim < 2 else 6.0)
    model.save_pretrained(folder)
    resized = {"height": IMAGE_SIZE, "width": IMAGE_SIZE}
    processor = LlavaProcessor(
        image_processor=CLIPImageProcessorPil(size={"shortest_edge": IMAGE_SIZE}, crop_size=resized),
        tokenizer=_tokenizer(),
        patch_size=PATCH,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=TEMPLATE,
    )
    processor.save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 2}))
    return folder


def _tokenizer() -> Any:
    """Bytes, and the special tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {word: number for number, word in enumerate([*WORDS, *letters])}
    made = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    tokenizer: Any = PreTrainedTokenizerFast(
        tokenizer_object=made, unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    return tokenizer


def generated(folder: Path, text: str, images: list[Image.Image], num_tokens: int) -> list[int]:
    """What transformers' `generate` makes, greedily."""
    from transformers import AutoModelForImageTextToText, AutoProcessor

    processor: Any = AutoProcessor.from_pretrained(folder)
    model: Any = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    given = processor(text=[text], images=images, return_tensors="pt")
    with torch.no_grad():
        ids = model.generate(**given, max_new_tokens=num_tokens, do_sample=False, eos_token_id=None)
    made: list[int] = ids[0, given["input_ids"].shape[1] :].tolist()
    return made
