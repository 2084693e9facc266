"""Prompts with images: tokens as of transformers' `generate`, one encoding for each image, and KV shared where it may be."""

from __future__ import annotations

import base64
import io
import os
import runpy
import signal
import struct
import time
import warnings
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image, PngImagePlugin

from actorllm import LLM, AsyncLLM, LLMEngine, SamplingParams
from actorllm.errors import ActorLLMError, ConfigError, InvalidParameterError, InvalidPromptError
from actorllm.intake.media import addresses
from actorllm.intake.media.images import read_image
from actorllm.server import create_app
from tests.media.small_models import generated, picture, save_llava

GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
TEXT = "What is in <image> here? And then we go on."
BLOCK = 16
ARGUMENTS: dict[str, Any] = {
    "dtype": "float32",
    "num_threads": 1,
    "block_size": BLOCK,
    "topology": "inline",
    "max_model_len": 256,
    "num_gpu_blocks_override": 200,
}


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llava(tmp_path_factory.mktemp("llava"))


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), **ARGUMENTS) as engine:
        yield engine


def prompt(text: str, *images: Any) -> dict[str, Any]:
    return {"prompt": text, "multi_modal_data": {"image": images[0] if len(images) == 1 else list(images)}}


def tokens(llm: LLM, *prompts: Any) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in llm.generate(list(prompts), GREEDY, use_tqdm=False)]


def cached(llm: LLM, given: Any) -> int:
    return int(llm.generate([given], GREEDY, use_tqdm=False)[0].num_cached_tokens or 0)


def encoder(llm: Any) -> dict[str, Any]:
    statistics: dict[str, Any] = llm._engine.statistics()["encoder"]
    return statistics


def address(image: Image.Image, kind: str = "PNG", **options: Any) -> str:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return f"data:image/{kind.lower()};base64," + base64.b64encode(file.getvalue()).decode()


def wait_for(is_so: Callable[[], bool]) -> None:
    until = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_tokens_are_those_of_generate(llm: LLM, folder: Path) -> None:
    """In one batch, with several images in a prompt, with one of another shape, and as an array."""
    two = "Two <image> and <image>: which?"
    wide = picture(5, 64, 20)
    given = [prompt(TEXT, picture(1)), prompt(two, picture(2), picture(3)), prompt(TEXT, wide), "No image here."]
    *seen, blind = tokens(llm, *given)
    assert seen[0] == generated(folder, TEXT, [picture(1)], 20)
    assert seen[1] == generated(folder, two, [picture(2), picture(3)], 20)
    assert seen[2] == generated(folder, TEXT, [wide], 20)
    assert seen[0] != seen[2]
    assert tokens(llm, prompt(TEXT, np.asarray(picture(1))), "No image here.") == [seen[0], blind]


def test_one_image_is_encoded_once_and_its_blocks_are_found(llm: LLM) -> None:
    before = encoder(llm)
    first = llm.generate([prompt(TEXT, picture(11))], GREEDY, use_tqdm=False)[0]
    again = llm.generate([prompt(TEXT, picture(11))], GREEDY, use_tqdm=False)[0]
    assert list(first.outputs[0].token_ids) == list(again.outputs[0].token_ids)
    assert again.num_cached_tokens == len(first.prompt_token_ids or ()) // BLOCK * BLOCK
    after = encoder(llm)
    assert after["num_encoded"] - before["num_encoded"] == 1
    assert after["num_hits"] - before["num_hits"] == 1


def test_blocks_are_shared_up_to_the_images_alone(llm: LLM) -> None:
    """Text before an image is shared, but for the block before it; other images are never taken for the same."""
    intro = "A long introduction of some sixty letters, that many may have."
    text = intro + "<image> and <image>, and so on."
    num_before = len(intro) // BLOCK * BLOCK
    llm.generate([prompt(text, picture(21), picture(22))], GREEDY, use_tqdm=False)
    assert num_before - BLOCK <= cached(llm, prompt(text, picture(22), picture(21))) <= num_before
    assert cached(llm, prompt(text, picture(21), picture(23))) <= num_before + BLOCK


@pytest.mark.parametrize("behind", ["", "x", "some letters."])
def test_output_behind_an_image_is_shared_with_the_same_image_alone(llm: LLM, folder: Path, behind: str) -> None:
    """The image ends in the last, partial block of the prompt, or begins in the first: hashes of output know of it."""
    seed = 30 + len(behind)
    for before in ("", "It is shown here: "):
        text = f"{before}<image>{behind}"
        first = llm.generate([prompt(text, picture(seed))], GREEDY, use_tqdm=False)[0].outputs[0]
        longer = text + first.text + " And"
        if first.text.isascii():
            assert cached(llm, prompt(longer, picture(seed))) >= len(text) // BLOCK * BLOCK
        other = tokens(llm, prompt(longer, picture(seed + 1)))[0]
        assert other == generated(folder, longer, [picture(seed + 1)], 20)


def test_a_conversation_may_hold_images(llm: LLM) -> None:
    as_text = prompt("user: See <image>!\nassistant: ", picture(41))
    expected = tokens(llm, as_text)[0]
    for part in (
        {"type": "image_url", "image_url": {"url": address(picture(41))}},
        {"type": "image_url", "image_url": address(picture(41))},
        {"type": "input_image", "image_url": address(picture(41), "BMP")},
        {"type": "image", "image": picture(41)},
    ):
        content = [{"type": "text", "text": "See "}, part, {"type": "text", "text": "!"}]
        sampled = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
        output = llm.chat([{"role": "user", "content": content}], sampled, use_tqdm=False)[0]
        got = llm.generate([prompt(output.prompt or "", picture(41))], GREEDY, use_tqdm=False)[0]
        assert output.prompt_token_ids is not None
        assert list(output.outputs[0].token_ids) == list(got.outputs[0].token_ids)[:20]
        assert (output.prompt or "").startswith("user: See <image>!")
    assert len(expected) == 20


@pytest.mark.parametrize(
    ("part", "told"),
    [
        (
            {"type": "video_url", "video_url": {"url": "data:video/mp4;base64,"}},
            "'video_url' are not supported: .*frames",
        ),
        (
            {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}},
            "'input_audio' .* takes text and image",
        ),
    ],
)
def test_parts_of_another_kind_are_refused_by_name(llm: LLM, part: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidPromptError, match=told):
        llm.chat([{"role": "user", "content": [{"type": "text", "text": "See "}, part]}], use_tqdm=False)


class Flood:
    """Files that cost more than they are worth."""

    @staticmethod
    def bomb(width: int = 9000, height: int | None = None) -> str:
        """The beginning of a file that says it has so many pixels."""
        header = b"IHDR" + struct.pack(">IIBBBBB", width, height or width, 8, 2, 0, 0, 0)
        chunks = [(header, 13), (b"IDAT" + bytes(9), 9)]
        parts = [struct.pack(">I", n) + data + struct.pack(">I", zlib.crc32(data)) for data, n in chunks]
        return "data:image/png;base64," + base64.b64encode(b"\x89PNG\r\n\x1a\n" + b"".join(parts)).decode()

    @staticmethod
    def large_bomb() -> str:
        return Flood.bomb(60_000)

    @staticmethod
    def bomb_of_webp() -> str:
        """Its decoder takes memory for all pixels before one is asked for."""
        canvas = struct.pack("<I", 0) + 2 * (16_383).to_bytes(3, "little")
        chunk = b"VP8X" + struct.pack("<I", len(canvas)) + canvas
        file = b"RIFF" + struct.pack("<I", 4 + len(chunk)) + b"WEBP" + chunk
        return "data:image/webp;base64," + base64.b64encode(file).decode()

    @staticmethod
    def thin() -> str:
        """Of few pixels, but for a tower that wants the shorter side at its own size."""
        return Flood.bomb(10, 3_000_000)

    @staticmethod
    def truncated() -> str:
        whole = base64.b64decode(address(picture(1, 200, 200)).partition(",")[2])
        return "data:image/png;base64," + base64.b64encode(whole[: len(whole) // 2]).decode()

    @staticmethod
    def pages() -> str:
        pages = [Image.new("L", (8, 8), number) for number in range(100)]
        return address(pages[0], "GIF", save_all=True, append_images=pages[1:])


BAD: list[tuple[Callable[[], Any], str]] = [
    (Flood.bomb, "9000 x 9000 pixels"),
    (lambda: Flood.bomb(10_000), "10000 x 10000 pixels"),  # so many that pillow warns
    (Flood.large_bomb, "60000 x 60000 pixels"),
    (Flood.bomb_of_webp, "too many pixels"),
    (Flood.thin, "10 x 3000000 pixels; a side may be 200 times"),
    (lambda: np.zeros((3, 601, 3), np.uint8), "601 x 3 pixels; a side may be"),
    (lambda: Image.new("RGB", (1, 201)), "1 x 201 pixels; a side may be"),
    (Flood.truncated, "cannot be decoded"),
    (Flood.pages, "several frames"),
    (lambda: "data:image/png;base64,????", "not base64"),
    (lambda: "data:image/svg+xml;base64,PHN2Zy8+", "no image"),
    (lambda: "data:image/png,x", "'data:image/png;base64,'"),
    (lambda: "data:image/png;base64," + "A" * (addresses.MAX_BYTES // 3 * 4 + 4), "more than"),
    (lambda: "https://example.com/a.png", "data: address"),
    (lambda: "file:///etc/passwd", "data: address"),
]


@pytest.mark.parametrize(("make", "told"), BAD, ids=[told for _, told in BAD])
def test_a_bad_image_fails_its_own_request(llm: LLM, make: Callable[[], Any], told: str) -> None:
    with pytest.raises(InvalidPromptError, match="image 0") as caught:
        llm.generate([prompt(TEXT, make())], GREEDY, use_tqdm=False)
    assert told in str(caught.value)


def test_filters_of_warnings_are_the_applications_while_an_image_is_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are those of all threads: of two that change them at once, one puts back what the other has set."""
    before, seen = list(warnings.filters), []
    right = PngImagePlugin.PngImageFile._open

    def opened(self: Any) -> None:
        seen.append(list(warnings.filters))
        right(self)

    monkeypatch.setattr(PngImagePlugin.PngImageFile, "_open", opened)
    assert read_image(address(picture(1)), addresses.Allowed(), "image 0").mode == "RGB"
    assert seen == [before]


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (prompt(TEXT, 7), "int is no image"),
        (prompt(TEXT, np.zeros((4, 4), np.uint8)), "uint8 [height, width, 3]"),
        (prompt(TEXT, picture(1), picture(2)), "1 placeholders '<image>' for 2 items"),
        (prompt("None.", picture(1)), "0 placeholders"),
        (prompt("<image>" * 9, *[picture(1)] * 9), "at most 8"),
        ({"prompt": TEXT, "multi_modal_data": {"video": [1]}}, "'video' is not supported"),
        ({"prompt": TEXT, "multi_modal_data": 3}, "'multi_modal_data'"),
        ({"prompt_token_ids": [1], "multi_modal_data": {"image": picture(1)}}, "must be text"),
        ({**prompt(TEXT, picture(1)), "mm_processor_kwargs": [9]}, "mm_processor_kwargs=[9]"),
        ({"prompt_embeds": np.zeros((2, 64), np.float32)}, "enable_prompt_embeds"),
        (prompt(TEXT + "long " * 60, picture(1)), "at most 255"),
    ],
)
def test_what_a_prompt_must_not_hold_is_named(llm: LLM, given: Any, told: str) -> None:
    with pytest.raises(InvalidPromptError) as caught:
        llm.generate([given], GREEDY, use_tqdm=False)
    assert told in str(caught.value)


def test_what_is_kept_of_images_is_forgotten_when_asked(llm: LLM) -> None:
    """And encoded, or sent, once more; tokens are the same."""
    given = prompt(TEXT, picture(91)) | {"multi_modal_uuids": {"image": ["kept"]}}
    again = given | {"multi_modal_data": {"image": [None]}}
    expected = tokens(llm, given)
    assert tokens(llm, again) == expected
    before = encoder(llm)["num_encoded"]
    llm.reset_encoder_cache()
    assert (encoder(llm)["num_cached"], encoder(llm)["cached_bytes"]) == (0, 0)
    assert tokens(llm, again) == expected
    assert encoder(llm)["num_encoded"] == before + 1
    llm.reset_mm_cache()
    with pytest.raises(InvalidPromptError, match="nothing is kept of uuid 'kept'"):
        tokens(llm, again)
    assert tokens(llm, given) == expected
    assert encoder(llm)["num_encoded"] == before + 1, "the rows were kept"


def test_an_image_may_have_a_name(llm: LLM) -> None:
    """It is sent once; its content alone says what it is. Of a name that is not known nothing is made."""
    named = prompt(TEXT, picture(81)) | {"multi_modal_uuids": {"image": ["mine"]}}
    plain = tokens(llm, prompt(TEXT, picture(81)))[0]
    assert tokens(llm, named) == [plain]
    again = {"prompt": TEXT, "multi_modal_data": {"image": [None]}, "multi_modal_uuids": {"image": ["mine"]}}
    before = encoder(llm)["num_encoded"]
    assert tokens(llm, again) == [plain]
    assert encoder(llm)["num_encoded"] == before
    renewed = prompt(TEXT, picture(82)) | {"multi_modal_uuids": {"image": ["mine"]}}
    assert tokens(llm, renewed, again) == tokens(llm, prompt(TEXT, picture(82))) * 2
    for uuids, part in (
        ({"image": ["other"]}, "'other'"),
        ({"image": ["a", "b"]}, "each of 1"),
        ({"image": [7]}, "each of 1"),
    ):
        with pytest.raises(InvalidPromptError) as caught:
            tokens(llm, again | {"multi_modal_uuids": uuids})
        assert part in str(caught.value)


def test_the_processor_takes_arguments_of_a_prompt(llm: LLM) -> None:
    """They count for it alone; what the processor does not take fails the request."""
    wide = picture(83, 90, 30)
    cut = tokens(llm, prompt(TEXT, wide))[0]
    options = {"do_center_crop": False, "size": {"height": 30, "width": 30}}
    assert tokens(llm, prompt(TEXT, wide) | {"mm_processor_kwargs": options})[0] != cut
    assert tokens(llm, prompt(TEXT, wide)) == [cut]
    with pytest.raises(InvalidPromptError, match="processor cannot take"):
        tokens(llm, prompt(TEXT, wide) | {"mm_processor_kwargs": {"size": "wide"}})


def test_a_call_has_arguments_of_the_processor_for_all_of_its_prompts(llm: LLM) -> None:
    """Those of a prompt itself go first, and texts have none."""
    options = {"do_center_crop": False, "size": {"height": 30, "width": 30}}
    wide = prompt(TEXT, picture(83, 90, 30))
    own = wide | {"mm_processor_kwargs": options}
    expected = tokens(llm, own, "Once upon")

    def generated_with(given: Any, *prompts: Any) -> list[list[int]]:
        outputs = llm.generate(list(prompts), GREEDY, use_tqdm=False, mm_processor_kwargs=given)
        return [list(output.outputs[0].token_ids) for output in outputs]

    assert generated_with(options, wide, "Once upon") == expected
    assert generated_with({"size": "wide"}, own, "Once upon") == expected
    assert generated_with({}, wide) != expected[:1]
    part = {"type": "image", "image": picture(83, 90, 30)}
    asked: Any = [{"role": "user", "content": [{"type": "text", "text": "See "}, part]}]
    (plain,) = llm.chat(asked, GREEDY, use_tqdm=False)
    (cut,) = llm.chat(asked, GREEDY, use_tqdm=False, mm_processor_kwargs=options)
    assert cut.outputs[0].token_ids != plain.outputs[0].token_ids
    llm.enqueue_chat(asked, GREEDY, mm_processor_kwargs=options)
    assert llm.wait_for_completion(use_tqdm=False)[0].outputs[0].token_ids == cut.outputs[0].token_ids
    with pytest.raises(InvalidParameterError, match=r"mm_processor_kwargs=\[9\] must be a mapping"):
        llm.chat(asked, GREEDY, use_tqdm=False, mm_processor_kwargs=[9])  # type: ignore[arg-type]


def test_arguments_by_kind_count_for_several_images_as_for_one(llm: LLM) -> None:
    options = {"do_center_crop": False, "size": {"height": 30, "width": 30}}
    two = "Two <image> and <image>: which?"
    for given in (prompt(TEXT, picture(85, 90, 30)), prompt(two, picture(85, 90, 30), picture(86, 30, 90))):
        kinds: list[dict[str, Any]] = [{}, options, {"images_kwargs": options}]
        plain, flat, nested = tokens(llm, *(given | {"mm_processor_kwargs": one} for one in kinds))
        assert nested == flat != plain


def test_what_is_transparent_is_white(llm: LLM, folder: Path) -> None:
    """As transformers makes it: a file may hide any colour there."""
    shown = picture(87).convert("RGBA")
    shown.putalpha(Image.fromarray(np.random.default_rng(88).integers(0, 256, (32, 40), np.uint8)))
    white = Image.alpha_composite(Image.new("RGBA", shown.size, "white"), shown).convert("RGB")
    expected = generated(folder, TEXT, [white], 20)
    assert tokens(llm, prompt(TEXT, shown), prompt(TEXT, address(shown))) == [expected] * 2
    assert expected != tokens(llm, prompt(TEXT, picture(87)))[0]
    # A palette, of which one colour is no colour.
    flat = Image.new("P", (40, 32), 1)
    flat.putpalette([200, 0, 0, 0, 0, 0])
    flat.paste(0, (0, 0, 20, 32))
    white = Image.new("RGB", (40, 32), "white")
    white.paste((200, 0, 0), (0, 0, 20, 32))
    expected = generated(folder, TEXT, [white], 20)
    assert tokens(llm, prompt(TEXT, address(flat, transparency=1)))[0] == expected


def test_of_a_photo_with_pictures_behind_it_the_first_one_counts(llm: LLM) -> None:
    """Phones write such files (MPO), and call them JPEG."""
    file = io.BytesIO()
    picture(89).save(file, "MPO", save_all=True, append_images=[picture(90)])
    url = "data:image/jpeg;base64," + base64.b64encode(file.getvalue()).decode()
    assert tokens(llm, prompt(TEXT, url)) == tokens(llm, prompt(TEXT, address(picture(89), "JPEG")))


def test_files_and_hosts_are_read_where_they_are_allowed(folder: Path, tmp_path: Path) -> None:
    picture(84).save(tmp_path / "image.png")
    options = {"allowed_local_media_path": str(tmp_path), "allowed_media_domains": ["localhost"]}
    with LLM(str(folder), **ARGUMENTS, **options) as engine:
        assert tokens(engine, prompt(TEXT, f"file://{tmp_path}/image.png")) == tokens(engine, prompt(TEXT, picture(84)))
        with pytest.raises(InvalidPromptError, match="private network"):
            tokens(engine, prompt(TEXT, "http://localhost/image.png"))


def test_no_images_are_no_images(llm: LLM) -> None:
    plain = tokens(llm, "Once upon")[0]
    for data in ({}, {"image": None}, {"image": []}, None):
        assert tokens(llm, {"prompt": "Once upon", "multi_modal_data": data})[0] == plain


def test_the_example_asks_about_an_image(folder: Path, tmp_path: Path) -> None:
    picture(71).save(tmp_path / "image.png")
    main = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "images.py"))["main"]
    assert isinstance(main(str(folder), str(tmp_path / "image.png"), "Why?", **ARGUMENTS), str)


def test_parameters_that_need_ids_are_refused(llm: LLM) -> None:
    with pytest.raises(InvalidParameterError, match="prompt_logprobs"):
        llm.generate([prompt(TEXT, picture(1))], SamplingParams(prompt_logprobs=1), use_tqdm=False)
    with pytest.raises(InvalidPromptError, match="truncate_prompt_tokens"):
        llm.generate([prompt(TEXT, picture(1))], SamplingParams(truncate_prompt_tokens=9), use_tqdm=False)


def test_a_stepped_engine_takes_images(llm: LLM, folder: Path) -> None:
    engine = LLMEngine(str(folder), **ARGUMENTS)
    try:
        engine.add_request("a", prompt(TEXT, picture(1)), GREEDY)
        outputs: list[Any] = []
        while engine.has_unfinished_requests():
            outputs += engine.step()
        assert list(outputs[-1].outputs[0].token_ids) == tokens(llm, prompt(TEXT, picture(1)))[0]
    finally:
        engine.shutdown()


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"limit_mm_per_prompt": {"image": -1}}, "image=-1"),
        ({"limit_mm_per_prompt": {"image": 65}}, "at most 64"),
        ({"limit_mm_per_prompt": {"smell": 1}}, "'smell'"),
        ({"limit_mm_per_prompt": "{"}, "not JSON"),
        ({"mm_processor_kwargs": [1]}, "must be a mapping"),
        ({"enable_lora": True}, "enable_lora=True"),
        ({"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}}, "speculative_config"),
    ],
)
def test_arguments_are_checked(folder: Path, options: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        LLM(str(folder), **ARGUMENTS, **options)
    assert told in str(caught.value)


@pytest.mark.anyio
async def test_the_server_takes_images(llm: LLM, folder: Path) -> None:
    """Of OpenAI's chat; what is wrong with one is answered with 400, and the next request is served."""
    engine = AsyncLLM(str(folder), **ARGUMENTS)
    try:
        transport = httpx.ASGITransport(create_app(engine))
        async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=60) as client:

            async def ask(url: str) -> httpx.Response:
                content = [{"type": "text", "text": "See "}, {"type": "image_url", "image_url": {"url": url}}]
                body = {"messages": [{"role": "user", "content": content}], "max_tokens": 8, "temperature": 0}
                return await client.post("/v1/chat/completions", json=body | {"ignore_eos": True})

            for make, told in [*BAD[:5], *BAD[7:9]]:  # those that travel
                answer = await ask(make())
                assert answer.status_code == 400
                assert told in answer.json()["error"]["message"]
            answer = await ask(address(picture(51)))
            assert answer.status_code == 200, answer.text
            assert engine._engine.statistics()["encoder"]["num_cached"] == 1
            for path in ("/reset_mm_cache", "/reset_encoder_cache"):
                assert (await client.post(path)).status_code == 200
            assert engine._engine.statistics()["encoder"]["num_cached"] == 0
            part = {"type": "image", "image": picture(51)}
            params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
            message = {"role": "user", "content": [{"type": "text", "text": "See "}, part]}
            expected = llm.chat([message], params, use_tqdm=False)[0]
            assert answer.json()["choices"][0]["message"]["content"] == expected.outputs[0].text
            assert answer.json()["usage"]["prompt_tokens"] == len(expected.prompt_token_ids or ())
            # Anthropic's blocks and OpenAI's other API.
            data = address(picture(51)).partition(",")[2]
            see = {"type": "text", "text": "See "}
            for source in (
                {"type": "base64", "media_type": "image/png", "data": data},
                {"type": "url", "url": address(picture(51))},
            ):
                body = {"messages": [{"role": "user", "content": [see, {"type": "image", "source": source}]}]}
                body |= {"model": answer.json()["model"], "max_tokens": 8, "temperature": 0, "ignore_eos": True}
                told = (await client.post("/v1/messages", json=body)).json()
                assert told["content"] == [{"type": "text", "text": expected.outputs[0].text}], told
            shown = {"type": "input_image", "image_url": address(picture(51))}
            asked = [{"role": "user", "content": [see | {"type": "input_text"}, shown]}]
            body = {"input": asked, "max_output_tokens": 8, "temperature": 0, "ignore_eos": True}
            told = (await client.post("/v1/responses", json=body)).json()
            assert told["output"][0]["content"][0]["text"] == expected.outputs[0].text, told
            # Of the result of a tool, and of Ollama's chat and prompt: as OpenAI's chat has the same.
            data = address(picture(51)).partition(",")[2]
            image: dict[str, Any] = {"type": "image_url", "image_url": {"url": address(picture(51))}}
            call = {"id": "a", "type": "function", "function": {"name": "look", "arguments": "{}"}}
            begin = {"role": "user", "content": "Look."}
            sampling = {"model": answer.json()["model"], "max_tokens": 8, "temperature": 0, "ignore_eos": True}

            async def of_chat(*messages: dict[str, Any]) -> Any:
                chat = await client.post("/v1/chat/completions", json=sampling | {"messages": messages})
                assert chat.status_code == 200, chat.text
                return chat.json()["choices"][0]["message"]["content"]

            shown = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}
            result = {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": "Here."}, shown]}
            use = {"type": "tool_use", "id": "a", "name": "look", "input": {}}
            messages = [begin, {"role": "assistant", "content": [use]}, {"role": "user", "content": [result, see]}]
            told = (await client.post("/v1/messages", json=sampling | {"messages": messages})).json()
            answered = {"role": "assistant", "content": None, "tool_calls": [call]}
            of_tool = {"role": "tool", "tool_call_id": "a", "content": "Here."}
            wanted = await of_chat(begin, answered, of_tool, {"role": "user", "content": [image, see]})
            assert told["content"] == [{"type": "text", "text": wanted}], told
            wanted = await of_chat({"role": "user", "content": [image, see]})
            options = {"num_predict": 8, "temperature": 0}
            body = {"model": answer.json()["model"], "stream": False, "options": options, "ignore_eos": True}
            message = {"role": "user", "content": "See ", "images": [data]}
            told = (await client.post("/api/chat", json=body | {"messages": [message]})).json()
            assert told["message"]["content"] == wanted, told
            told = (await client.post("/api/generate", json=body | {"prompt": "See ", "images": [data]})).json()
            assert told["response"] == wanted, told
    finally:
        engine.shutdown()


@pytest.mark.slow(reason="an engine of processes whose processes are killed")
@pytest.mark.timeout(400)
@pytest.mark.anyio
async def test_kills_and_aborts_change_no_token(llm: LLM, folder: Path) -> None:
    """The encoder is killed in the middle of an image, worker and scheduler in that of a stream; an abort leaves no work behind."""
    texts = [prompt(TEXT, picture(61)), prompt(TEXT, picture(62))]
    expected = tokens(llm, *texts)
    engine = AsyncLLM(str(folder), **(ARGUMENTS | {"topology": "process"}))
    try:

        async def whole(given: Any) -> list[int]:
            last: Any = None
            async for output in engine.generate(given, GREEDY):
                last = output
            return list(last.outputs[0].token_ids)

        import anyio

        await whole(prompt(TEXT, picture(60)))
        pid = encoder(engine)["process_pid"]
        os.kill(pid, signal.SIGSTOP)
        got: list[list[int]] = []
        async with anyio.create_task_group() as group:

            async def ask() -> None:
                got.append(await whole(texts[0]))

            group.start_soon(ask)
            with anyio.fail_after(60):
                while not encoder(engine)["num_waiting"]:
                    await anyio.sleep(0.01)
            os.kill(pid, signal.SIGKILL)
        assert got == [expected[0]]
        assert encoder(engine)["num_restarts"] == 1
        assert encoder(engine)["process_pid"] != pid

        # The second of two waits behind the first, and is not wanted any more.
        before = encoder(engine)["num_encoded"]
        pid = encoder(engine)["process_pid"]
        os.kill(pid, signal.SIGSTOP)
        first, second = (engine.generate(prompt(TEXT, picture(seed)), GREEDY) for seed in (63, 64))
        with anyio.fail_after(60):
            while encoder(engine)["num_waiting"] < 2:
                await anyio.sleep(0.01)
            second.abort()
            assert [output async for output in second][-1].outputs[0].finish_reason == "abort"
            while engine._engine.statistics()["intake"]["num_busy"] > 1:
                await anyio.sleep(0.01)
        os.kill(pid, signal.SIGCONT)
        async for _ in first:
            pass
        await whole(prompt(TEXT, picture(65)))
        assert encoder(engine)["num_encoded"] - before == 2
        assert encoder(engine)["num_dropped"] == 1

        for victim in ("worker", "scheduler"):
            pid = next(pid for name, pid in engine._engine.pids.items() if victim in name)
            seen: list[int] = []
            async for output in engine.generate(texts[1], GREEDY):
                if not seen:
                    os.kill(pid, signal.SIGKILL)
                seen = list(output.outputs[0].token_ids)
            assert seen == expected[1]
            assert await whole(texts[0]) == expected[0]
    finally:
        engine.shutdown()


def test_the_engine_outlives_a_tower_that_cannot_be_loaded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Text goes on where images fail."""
    from actorllm.model.hf import tower

    def fail(*_: Any) -> None:
        raise MemoryError("no room")

    with LLM(str(folder), **ARGUMENTS) as engine:
        monkeypatch.setattr(tower.MediaTower, "__init__", fail)
        with pytest.raises(ActorLLMError, match="no room"):
            tokens(engine, prompt(TEXT, picture(1)))
        assert len(tokens(engine, "Once")[0]) == 20
