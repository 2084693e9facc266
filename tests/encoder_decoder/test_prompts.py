"""Prompts of models with an encoder and a decoder: every form of them, defaults of the model, and what is refused by name."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from actorllm import LLM, BeamSearchParams, SamplingParams
from actorllm.config import EngineConfig
from actorllm.errors import ConfigError, CorruptModelError, InvalidParameterError, InvalidPromptError
from actorllm.messages import Submit
from actorllm.messages.embeds import EMBEDDED
from actorllm.scheduling.limits import Limits
from actorllm.scheduling.validation import SubmitValidation
from tests.encoder_decoder.small_models import END, SAVE, START, ids, save_tokenizer, write_json

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
ARGUMENTS: dict[str, Any] = {"dtype": "float32", "num_threads": 1, "topology": "inline", "num_gpu_blocks_override": 64}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = SAVE["bart"](tmp_path_factory.mktemp("bart"))
    save_tokenizer(made)
    write_json(
        made, "generation_config.json", {"decoder_start_token_id": START, "forced_bos_token_id": 0, "eos_token_id": END}
    )
    return made


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), **ARGUMENTS) as engine:
        yield engine


def asked(llm: LLM, prompt: Any, params: SamplingParams = GREEDY) -> Any:
    return llm.generate([prompt], params, use_tqdm=False)[0]


def test_a_prompt_alone_is_the_encoders(llm: LLM) -> None:
    text = asked(llm, "A long story.")
    assert text.encoder_prompt == "A long story."
    assert text.encoder_prompt_token_ids == [
        0,
        *llm.get_tokenizer().encode("A long story.", add_special_tokens=False),
        END,
    ]
    assert (text.prompt, text.prompt_token_ids) == (None, [START, 0])
    forms = [
        {"prompt": "A long story."},
        {"prompt_token_ids": text.encoder_prompt_token_ids},
        {"encoder_prompt": "A long story."},
        {"encoder_prompt": {"prompt": "A long story."}, "decoder_prompt": None},
        {"encoder_prompt": {"prompt_token_ids": text.encoder_prompt_token_ids}, "decoder_prompt": [START, 0]},
        {"encoder_prompt": "A long story.", "decoder_prompt": {"prompt_token_ids": [START, 0]}},
    ]
    for form in forms:
        output = asked(llm, form)
        assert output.outputs[0].token_ids == text.outputs[0].token_ids, form
        assert output.encoder_prompt_token_ids == text.encoder_prompt_token_ids


def test_the_decoders_prompt_gets_its_first_tokens(llm: LLM) -> None:
    output = asked(llm, {"encoder_prompt": "A long story.", "decoder_prompt": "It"})
    assert output.prompt == "It"
    assert output.prompt_token_ids == [START, 0, *llm.get_tokenizer().encode("It", add_special_tokens=False)]
    assert output.outputs[0].token_ids != asked(llm, "A long story.").outputs[0].token_ids


BAD: list[tuple[Any, str]] = [
    ({"encoder_prompt": "a", "prompt": "b"}, "not beside them"),
    ({"decoder_prompt": "a"}, "needs 'encoder_prompt', too"),
    ({"encoder_prompts": "a"}, "did you mean 'encoder_prompt'"),
    ({"encoder_prompt": 7}, "must be text or token ids"),
    ({"encoder_prompt": {"text": "a"}}, "has 'prompt' or 'prompt_token_ids', not 'text'"),
    ({"encoder_prompt": {}}, "needs 'prompt' or 'prompt_token_ids'"),
    ({"encoder_prompt": []}, "takes 1 to 64"),
    ({"encoder_prompt": ids(1, 65)}, "has 65 tokens"),
    ({"encoder_prompt": [4, 300]}, "token id 300 is outside"),
    ({"encoder_prompt": "a", "decoder_prompt": ids(1, 63)}, "the decoder takes 64"),
    ({"encoder_prompt": "a", "cache_salt": ""}, "cache_salt"),
    ({"prompt": "a", "multi_modal_data": {"image": 1}}, "not 'multi_modal_data'"),
]


@pytest.mark.parametrize(("prompt", "told"), BAD, ids=[told for _, told in BAD])
def test_a_bad_prompt_fails_its_own_request(llm: LLM, prompt: Any, told: str) -> None:
    with pytest.raises(InvalidPromptError) as caught:
        asked(llm, prompt)
    assert told in str(caught.value)


def test_output_ends_where_the_decoder_has_no_position_left(llm: LLM) -> None:
    output = asked(
        llm,
        {"encoder_prompt": "a", "decoder_prompt": ids(1, 50)},
        SamplingParams(temperature=0, ignore_eos=True, max_tokens=None),
    )
    assert len(output.outputs[0].token_ids) == 64 - 52
    assert output.outputs[0].finish_reason == "length"


def test_what_rows_do_not_go_with_is_refused(llm: LLM) -> None:
    with pytest.raises(InvalidParameterError, match="prompt_logprobs=1: there are none of a model with an encoder"):
        asked(llm, "a", SamplingParams(prompt_logprobs=1))
    with pytest.raises(InvalidPromptError, match="are not cut"):
        asked(llm, "a", SamplingParams(truncate_prompt_tokens=3))
    with pytest.raises(InvalidPromptError, match="beam search is not supported for a model with an encoder"):
        llm.beam_search(["a"], BeamSearchParams(beam_width=2, max_tokens=4))
    with pytest.raises(InvalidPromptError, match="takes no conversation"):
        llm.chat([{"role": "user", "content": "a"}], GREEDY, chat_template="{{ messages }}", use_tqdm=False)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"device": "cuda"}, "use device='cpu'"),
        ({"enable_lora": True}, "enable_lora=True is not supported for BartForConditionalGeneration"),
        ({"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}}, "speculative_config="),
        ({"kv_cache_dtype": "int8"}, "kv_cache_dtype='int8' is not supported"),
        ({"quantization": "fp8"}, "quantization='fp8' is not supported"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size=2 is not supported"),
        ({"runner": "pooling"}, "runner='pooling' is not supported for BartForConditionalGeneration"),
        ({"max_model_len": 65}, "use 64 or less"),
        ({"max_model_len": 1}, "2 or more"),
    ],
)
def test_what_is_not_made_for_such_models_is_named(folder: Path, arguments: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig.from_arguments(str(folder), **arguments)
    assert told in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value"), [("encoder_layers", 10**9), ("num_decoder_layers", 0), ("decoder_attention_heads", -1)]
)
def test_a_size_that_would_never_be_built_is_told_by_its_key(folder: Path, key: str, value: int) -> None:
    with pytest.raises(CorruptModelError, match=rf"{key} is {value}, a number from 1 to \d+ is needed"):
        EngineConfig.from_arguments(str(folder), hf_overrides={key: value})


@pytest.mark.parametrize("listed", [7, [7], [[]], [["a"]], [[True]], [[300]], [[-1]]])
def test_bad_words_that_are_no_lists_of_tokens_are_told(listed: Any, tmp_path: Path) -> None:
    folder = SAVE["bart"](tmp_path)
    write_json(folder, "generation_config.json", {"bad_words_ids": listed})
    with pytest.raises(CorruptModelError, match="bad_words_ids is "):
        EngineConfig.from_arguments(str(folder), skip_tokenizer_init=True)
    write_json(folder, "generation_config.json", {"bad_words_ids": [[7], [8, 9]]})
    config = EngineConfig.from_arguments(str(folder), skip_tokenizer_init=True)
    assert config.model.encoder_decoder is not None
    assert config.model.encoder_decoder.never == (7,)
    assert EngineConfig.from_json(config.to_json()) == config


def test_the_length_bounds_each_part(folder: Path) -> None:
    config = EngineConfig.from_arguments(str(folder), max_model_len=20)
    assert config.model.encoder_decoder is not None
    assert (config.model.encoder_decoder.max_source, config.model.encoder_decoder.max_target) == (20, 20)
    assert config.model.max_model_len == 40
    assert config.model.is_encoder_decoder
    assert EngineConfig.from_json(config.to_json()) == config


def test_the_scheduler_checks_rows_of_others_itself() -> None:
    """What an attached program sends did not go through this intake."""
    checks = SubmitValidation(
        Limits(max_tokens=64, max_seqs=4, max_model_len=20),
        block_size=4,
        vocab_size=300,
        eos_ids=frozenset(),
        silent_ids=frozenset(),
        embedding_bytes=4,
        max_source=8,
        max_target=12,
    )

    def refusal(prompt: list[int], max_tokens: int = 2) -> str | None:
        given = np.array(prompt, np.int32)
        rows = np.zeros(4 * int((given < 0).sum()), np.uint8)
        submit = Submit(rid=1, arrival=0.0, prompt=given, prompt_embeds=rows, max_tokens=max_tokens)
        return checks.refusal(checks.take(0, submit, 0.0))

    row = EMBEDDED
    assert refusal([row, row, 5, 6]) is None
    for wrong in ([5, 6], [row, row], [5, row, 6], [row] * 9 + [5], [row, -2, 5]):
        assert refusal(wrong) is not None, wrong
    assert refusal([row, 5], max_tokens=12) is not None
    assert refusal([row, 5], max_tokens=11) is None
