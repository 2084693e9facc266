"""What does a flood of images do to the streams of text beside it?

    python bench/images.py [--rounds 3] [--tokens 200] [--step-tokens 40] [--json FILE]

One engine in its processes, with a LLaVA of random weights: a tower of 12 layers for 224 pixels, whose images have 256 rows, and a
decoder of the sizes of a small model. Requests of text stream, in rounds in turns: undisturbed, beside a flood of images, and
beside a flood of bad ones. A flood is always so many requests at once, each with an image of its own. The bad ones are bombs,
truncated files and GIFs of a hundred pages. Compared are the p99 and the median of the gaps between the reads of a stream. A
stream is lost if it ends early, and differs if it has other tokens than in the first round.

The rows of an image are a prompt as any other: a gap is as long as the step that computes a chunk of it. So `--step-tokens` bounds
the gaps, and by default it leaves a chunk 32 tokens beside the streams.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import io
import os
import struct
import tempfile
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from report import compared, finish, informative, quantile

STREAMS, FLOOD = 8, 4
TARGET = 1.5
"""Times the p99 of the gaps without a flood."""
SIDES = ("text alone", "images", "bad images")
PLACEHOLDER = "See <image> here."


@dataclass
class Round:
    """What the streams of text got, and how many requests with images ended meanwhile."""

    gaps: list[float] = field(default_factory=list)
    tokens: list[list[int]] = field(default_factory=list)
    num_images: int = 0


def save_model(folder: Path) -> Path:
    import tokenizers
    import torch
    import transformers as t

    words = {word: i for i, word in enumerate(["<unk>", "<s>", "</s>", "<pad>", "<image>"])}
    words |= {f"w{i}": len(words) + i for i in range(8000)}
    raw = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    raw.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    raw.add_special_tokens(["<image>"])
    tokenizer = t.PreTrainedTokenizerFast(
        tokenizer_object=raw, unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )
    vision = t.CLIPVisionConfig(
        hidden_size=384,
        intermediate_size=1536,
        num_hidden_layers=12,
        num_attention_heads=6,
        image_size=224,
        patch_size=14,
    )
    text = t.LlamaConfig(
        vocab_size=len(words),
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=2048,
        eos_token_id=2,
        bos_token_id=1,
        pad_token_id=3,
    )
    torch.manual_seed(0)
    model = t.LlavaForConditionalGeneration(t.LlavaConfig(vision_config=vision, text_config=text, image_token_index=4))
    model.save_pretrained(folder)
    size = {"shortest_edge": 224}
    t.LlavaProcessor(
        image_processor=t.CLIPImageProcessorPil(size=size, crop_size={"height": 224, "width": 224}),
        tokenizer=tokenizer,
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    ).save_pretrained(folder)
    return folder


def address(data: bytes, kind: str) -> str:
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def photo(number: int) -> str:
    """Smooth, as photos are, of 1.6 million pixels."""
    small = np.random.default_rng(number).integers(0, 256, (24, 32, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(small).resize((1440, 1080), Image.Resampling.BICUBIC).save(file, "JPEG", quality=85)
    return address(file.getvalue(), "jpeg")


def bad(number: int) -> str:
    if number % 3 == 0:  # says that it has 81 million pixels
        parts = [b"IHDR" + struct.pack(">IIBBBBB", 9000, 9000, 8, 2, 0, 0, 0), b"IDAT" + number.to_bytes(9, "big")]
        chunks = [struct.pack(">I", len(part) - 4) + part + struct.pack(">I", zlib.crc32(part)) for part in parts]
        return address(b"\x89PNG\r\n\x1a\n" + b"".join(chunks), "png")
    if number % 3 == 1:
        whole = base64.b64decode(photo(number).partition(",")[2])
        return address(whole[: len(whole) // 2], "jpeg")
    pages = [Image.new("L", (64, 64), (number + i) % 256) for i in range(100)]
    file = io.BytesIO()
    pages[0].save(file, "GIF", save_all=True, append_images=pages[1:])
    return address(file.getvalue(), "gif")


async def one_stream(llm: Any, number: int, num_tokens: int, found: Round) -> None:
    from actorllm import SamplingParams

    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True, seed=number, temperature=0.9)
    ids: list[int] = []
    last = None
    async for output in llm.generate(f"w{number} w{number + 1} w{number + 2}", params):
        at = time.perf_counter()
        if last is not None:
            found.gaps.append(at - last)
        last, ids = at, list(output.outputs[0].token_ids)
    found.tokens[number] = ids


async def flood(llm: Any, images: list[str], found: Round, is_bad: bool) -> None:
    """One of the clients: a request after the other, each with an image of its own."""
    from actorllm import SamplingParams
    from actorllm.errors import InvalidPromptError

    while images:
        image = images.pop(0)
        if is_bad:  # nothing is kept of it, so that it is as new the next time
            images.append(image)
        given = {"prompt": PLACEHOLDER, "multi_modal_data": {"image": image}}
        try:
            await llm.complete(given, SamplingParams(max_tokens=2, temperature=0))
            if is_bad:
                raise SystemExit("a bad image was taken")
        except InvalidPromptError:
            if not is_bad:
                raise
        found.num_images += 1


async def one_round(llm: Any, num_tokens: int, images: list[str], is_bad: bool) -> Round:
    found = Round(tokens=[[] for _ in range(STREAMS)])
    clients = [asyncio.create_task(flood(llm, images, found, is_bad)) for _ in range(FLOOD if images else 0)]
    await asyncio.gather(*(one_stream(llm, number, num_tokens, found) for number in range(STREAMS)))
    for client in clients:
        if client.done() and images:
            client.result()
        client.cancel()
    for client in clients:
        with contextlib.suppress(asyncio.CancelledError):
            await client
    return found


async def measure(folder: Path, rounds: int, num_tokens: int, step_tokens: int) -> dict[str, list[Round]]:
    from actorllm import AsyncLLM, SamplingParams

    makers: dict[str, Callable[[int], str]] = {"images": photo, "bad images": bad}
    found: dict[str, list[Round]] = {side: [] for side in SIDES}
    options: dict[str, Any] = {"max_model_len": 1024, "max_num_seqs": 32, "dtype": "float32"}
    options["max_num_batched_tokens"] = step_tokens
    async with AsyncLLM(str(folder), **options) as llm:
        first = {"prompt": PLACEHOLDER, "multi_modal_data": {"image": photo(10**6)}}  # starts the encoder
        await llm.complete(first, SamplingParams(max_tokens=1))
        number = 0
        for _ in range(rounds):
            for side in SIDES:
                images = []
                if side in makers:  # made before, so that the making takes nothing from the engine
                    images = [makers[side](number + i) for i in range(num_tokens)]
                    number += num_tokens
                found[side].append(await one_round(llm, num_tokens, images, side == "bad images"))
                if side in makers and not images:
                    raise SystemExit(f"{side}: the flood ended before the streams; give fewer --tokens")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--step-tokens", type=int, default=32 + STREAMS, help="max_num_batched_tokens")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    load_before = os.getloadavg()
    with tempfile.TemporaryDirectory() as folder:
        save_model(Path(folder))
        found = asyncio.run(measure(Path(folder), arguments.rounds, arguments.tokens, arguments.step_tokens))
    rows = []
    of_text = {at: [1e3 * quantile(r.gaps, at) for r in found["text alone"]] for at in (0.99, 0.5)}
    first = found["text alone"][0].tokens
    for side in SIDES[1:]:
        ours = {at: [1e3 * quantile(r.gaps, at) for r in found[side]] for at in (0.99, 0.5)}
        measure_ = f"p99 of gaps beside {side}, ms"
        rows.append(compared(measure_, ours[0.99], "text alone", of_text[0.99], at_most=TARGET))
        rows.append(compared(f"median gap beside {side}, ms", ours[0.5], "text alone", of_text[0.5]))
        rows.append(
            informative(f"requests of {side} that ended in a round", [float(r.num_images) for r in found[side]])
        )
    all_rounds = [r for side in SIDES for r in found[side]]
    num_lost = sum(len(ids) != arguments.tokens for r in all_rounds for ids in r.tokens)
    num_other = sum(ids != other for r in all_rounds for ids, other in zip(r.tokens, first, strict=True))
    rows.append(informative("streams that were lost", [float(num_lost)]))
    rows.append(informative("streams with other tokens than in the first round", [float(num_other)]))
    for row in rows[-2:]:
        row |= {"target": "0", "met": row["actorllm"] == 0}
    finish(
        "images",
        f"{STREAMS} streams of text beside a flood of images",
        rows,
        arguments.json,
        load_before,
        configuration={
            "rounds": arguments.rounds,
            "streams": STREAMS,
            "tokens": arguments.tokens,
            "max_num_batched_tokens": arguments.step_tokens,
            "requests with images at once": FLOOD,
        },
    )


if __name__ == "__main__":
    main()
