"""Whisper: recordings of every form give the tokens of transformers, alone and beside others; a bad one fails its own request."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from actorllm import LLM, SamplingParams
from actorllm.errors import InvalidParameterError, InvalidPromptError
from tests.encoder_decoder.small_models import RATE, save_whisper, sound

ARGUMENTS: dict[str, Any] = {"dtype": "float32", "num_threads": 1, "topology": "inline", "block_size": 16}
GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
TEXT = "<|startoftranscript|><|en|><|transcribe|><|notimestamps|>"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_whisper(tmp_path_factory.mktemp("whisper"))


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), **ARGUMENTS) as engine:
        yield engine


def prompt(recording: Any, text: str = TEXT) -> dict[str, Any]:
    return {"prompt": text, "multi_modal_data": {"audio": recording}}


def tokens(llm: LLM, *prompts: Any) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in llm.generate(list(prompts), GREEDY, use_tqdm=False)]


def choices(folder: Path, recording: Any, target: list[int], output: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """What transformers would choose behind each token, and how much less likely that makes ours."""
    import transformers as t

    model: Any = t.WhisperForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
    features = t.WhisperFeatureExtractor.from_pretrained(folder)(recording, sampling_rate=RATE, return_tensors="pt")
    with torch.no_grad():
        made = model(
            features.input_features, decoder_input_ids=torch.tensor([target + output]), use_cache=False
        ).logits[0]
    behind = made[len(target) - 1 : -1]
    return behind.argmax(1), behind.amax(1) - behind.gather(1, torch.tensor([output]).T)[:, 0]


def test_tokens_are_transformers_choices(llm: LLM, folder: Path) -> None:
    first, second = sound(1, 1.5), sound(2, 0.4)
    outputs = llm.generate([prompt(first), prompt(second)], GREEDY, use_tqdm=False)
    for recording, output in zip((first, second), outputs, strict=True):
        assert output.prompt == TEXT
        _, distance = choices(folder, recording, output.prompt_token_ids, list(output.outputs[0].token_ids))
        assert distance.max() < 1e-4
    assert outputs[0].outputs[0].token_ids != outputs[1].outputs[0].token_ids


def test_a_recording_is_one_in_every_form(llm: LLM) -> None:
    recording = sound(1)
    expected = tokens(llm, prompt(recording))[0]
    forms = [
        prompt((recording, RATE)),
        prompt([recording]),
        {"encoder_prompt": {"multi_modal_data": {"audio": recording}}, "decoder_prompt": TEXT},
        {
            "encoder_prompt": {"prompt": "", "multi_modal_data": {"audio": recording}},
            "decoder_prompt": {"prompt": TEXT},
        },
    ]
    assert tokens(llm, *forms) == [expected] * len(forms)
    plain = llm.generate([{"prompt": None, "multi_modal_data": {"audio": recording}}], GREEDY, use_tqdm=False)[0]
    assert plain.prompt_token_ids == llm.get_tokenizer().encode("<|startoftranscript|>", add_special_tokens=False)


def test_streams_do_not_depend_on_the_batch(llm: LLM, folder: Path) -> None:
    asked = [prompt(sound(seed, 0.3 * (seed + 1))) for seed in range(5)]
    expected = [tokens(llm, one)[0] for one in asked]
    with LLM(str(folder), max_num_batched_tokens=24, max_num_seqs=5, num_gpu_blocks_override=16, **ARGUMENTS) as small:
        assert tokens(small, *asked) == expected


BAD: list[tuple[Any, str]] = [
    ("no recording", "has one recording"),
    ({"prompt": TEXT}, "has one recording"),
    ({"prompt": TEXT, "multi_modal_data": {"image": 1}}, "has one recording"),
    (prompt([sound(1), sound(2)]), "has one recording"),
    (prompt(sound(1, 2.5)), "at most 2 s"),
    (prompt(np.zeros(0, np.float32)), "more than 0"),
    (prompt(7), "int is no recording"),
    (prompt("https://a.example/x.wav"), "allowed_media_domains"),
    ({"encoder_prompt": {"prompt": "a", "multi_modal_data": {"audio": sound(1)}}}, "belongs to 'decoder_prompt'"),
    (
        {"encoder_prompt": {"multi_modal_data": {"audio": sound(1)}, "mm_processor_kwargs": {"do_normalize": True}}},
        "encoder_prompt of this model has 'multi_modal_data', not 'mm_processor_kwargs'; leave it out",
    ),
]


@pytest.mark.parametrize(("given", "told"), BAD, ids=[told for _, told in BAD])
def test_a_bad_recording_fails_its_own_request(llm: LLM, given: Any, told: str) -> None:
    with pytest.raises(InvalidPromptError) as caught:
        tokens(llm, given)
    assert told in str(caught.value)


@pytest.mark.parametrize(
    "given",
    [prompt(sound(1)), {"encoder_prompt": {"multi_modal_data": {"audio": sound(1)}}, "decoder_prompt": TEXT}, TEXT],
    ids=["beside a text", "of the encoder", "no recording"],
)
def test_a_call_with_arguments_of_the_processor_is_refused(llm: LLM, given: Any) -> None:
    told = r"mm_processor_kwargs={'do_normalize': True}: a model with an encoder and a decoder takes none; leave it out"
    with pytest.raises(InvalidParameterError, match=told):
        llm.generate([given], GREEDY, use_tqdm=False, mm_processor_kwargs={"do_normalize": True})


def test_a_call_with_no_arguments_of_the_processor_is_taken(llm: LLM) -> None:
    given = prompt(sound(1))
    (output,) = llm.generate([given], GREEDY, use_tqdm=False, mm_processor_kwargs={})
    assert [list(output.outputs[0].token_ids)] == tokens(llm, given)
