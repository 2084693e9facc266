"""What models that take items do not take with them, and the bounds of what a prompt becomes: each is named, and others run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from actorllm import LLM, BeamSearchParams, SamplingParams
from actorllm.config import EngineConfig
from actorllm.errors import ActorLLMError, ConfigError, InvalidPromptError, UnsupportedModelError
from actorllm.intake.media import media_reader
from actorllm.model.cpu.runner import CpuRunner
from tests.media.small_models import TEXT, picture, save_gemma3, save_llava, save_qwen2_5_vl, save_qwen3_vl

GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
ARGUMENTS: dict[str, Any] = {
    "dtype": "float32",
    "num_threads": 1,
    "topology": "inline",
    "max_model_len": 256,
    "num_gpu_blocks_override": 100,
}
GRID = "<|vision_start|><|image_pad|><|vision_end|>"


def prompt(text: str, *images: Any) -> dict[str, Any]:
    return {"prompt": text, "multi_modal_data": {"image": list(images)}}


def count(llm: LLM, given: Any) -> int:
    """Tokens that are made of it."""
    return len(llm.generate([given], GREEDY, use_tqdm=False)[0].outputs[0].token_ids)


def refused(llm: LLM, given: Any, told: str) -> None:
    with pytest.raises(InvalidPromptError) as caught:
        count(llm, given)
    assert told in str(caught.value)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    with LLM(str(save_llava(tmp_path_factory.mktemp("llava"))), **ARGUMENTS) as engine:
        yield engine


def test_what_the_items_of_a_prompt_become_is_bounded(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pixels are counted over all images of a prompt; then the tensors that the processor makes, and their rows."""
    one, two = prompt("A <image>.", picture(1)), prompt("A <image> and <image>.", picture(1), picture(2))
    size = picture(1).width * picture(1).height
    for name, most, told in (
        ("MAX_PIXELS", size, f"the images of the prompt have more than {size} pixels"),
        ("MAX_TENSOR_BYTES", 3 * 30 * 30 * 4, "the tensors of the items have more than 10800 bytes"),
        ("MAX_PROMPT_BYTES", 9 * 64 * 4, "the items of the prompt have 18 tokens, and 9 are the most"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(media_reader, name, most)
            refused(llm, two, told)
            assert count(llm, one) == 4
    assert count(llm, two) == 4


def test_items_are_kept_by_their_names_within_a_bound(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    size = 3 * picture(1).width * picture(1).height
    monkeypatch.setattr(media_reader, "MAX_NAMED_BYTES", 2 * size)

    def named(name: str, image: Any = None) -> dict[str, Any]:
        return prompt("A <image>.", image) | {"multi_modal_uuids": {"image": [name]}}

    for number, name in enumerate("ab"):
        assert count(llm, named(name, picture(number))) == 4
    assert count(llm, named("a")) == 4
    assert count(llm, named("c", picture(3))) == 4
    refused(llm, named("b"), "nothing is kept of uuid 'b'")
    for name in "ac":
        assert count(llm, named(name)) == 4
    assert count(llm, named("a", picture(5))) == 4, "it takes the place of the one of this name"
    assert count(llm, named("c")) == 4


def test_beam_search_takes_no_items(llm: LLM) -> None:
    with pytest.raises(InvalidPromptError, match="beam search goes on from token ids"):
        llm.beam_search(prompt("A <image>.", picture(1)), BeamSearchParams(2, 4))
    assert count(llm, prompt("A <image>.", picture(1))) == 4


def test_images_in_a_grid_have_text_between_them(tmp_path: Path) -> None:
    with LLM(str(save_qwen2_5_vl(tmp_path)), **ARGUMENTS) as engine:
        bare = "<|image_pad|>"
        refused(engine, prompt(f"A {bare}{bare}.", picture(1), picture(2)), "two images stand side by side")
        assert count(engine, prompt(f"A {GRID}{GRID}.", picture(1), picture(2))) == 4


def test_an_image_that_no_step_has_room_for_is_told_what_would(tmp_path: Path) -> None:
    """Its rows see each other, so that no chunk may end within it."""
    folder, given = str(save_gemma3(tmp_path)), prompt("A <start_of_image>.", picture(1))
    with LLM(folder, max_num_seqs=4, max_num_batched_tokens=18, **ARGUMENTS) as engine:
        refused(
            engine, given, "an image of 16 tokens goes through in one step, which has room for 15; build the engine"
        )
        assert count(engine, "Text.") == 4
    with LLM(folder, max_num_seqs=4, max_num_batched_tokens=19, **ARGUMENTS) as engine:
        assert count(engine, given) == 4


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"kv_cache_dtype": "int8"}, "is not supported for models that take images or audio yet"),
        ({"enable_prompt_embeds": True}, "hold more than an embedding; leave it out"),
    ],
)
def test_arguments_that_do_not_go_together_with_items(options: dict[str, Any], told: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        LLM(str(save_qwen3_vl(tmp_path)), **ARGUMENTS | options)
    assert told in str(caught.value)


def test_a_processor_that_cannot_be_loaded_fails_the_prompts_with_items(tmp_path: Path) -> None:
    folder = save_llava(tmp_path)
    for file in folder.glob("*processor_config.json"):
        file.write_text("{")
    with LLM(str(folder), **ARGUMENTS) as engine:
        with pytest.raises(ActorLLMError, match="the processor cannot be loaded"):
            count(engine, prompt("A <image>.", picture(1)))
        assert count(engine, "Text.") == 4


@pytest.mark.parametrize(
    ("architecture", "kind", "part"),
    [
        ("Mistral3ForConditionalGeneration", "mistral3", "vision_config"),
        ("InternVLForConditionalGeneration", "internvl", "vision_config"),
        ("VoxtralForConditionalGeneration", "voxtral", "audio_config"),
    ],
)
def test_other_models_that_take_items_are_refused_by_name(
    architecture: str, kind: str, part: str, tmp_path: Path
) -> None:
    tree = {"architectures": [architecture], "model_type": kind, "text_config": {"model_type": "llama", **TEXT}}
    (tmp_path / "config.json").write_text(json.dumps(tree))
    with pytest.raises(UnsupportedModelError) as caught:
        CpuRunner(EngineConfig.from_arguments(tmp_path, skip_tokenizer_init=True, max_model_len=64))
    assert f"architecture {architecture!r} is not supported: it takes more than text" in str(caught.value)
    assert f"config.json has {part}" in str(caught.value)
    assert "LlavaForConditionalGeneration" in str(caught.value)
