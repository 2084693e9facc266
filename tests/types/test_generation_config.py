"""generation_config.json: where it is looked for, what is taken of it, and who wins."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import orjson
import pytest

from actorllm import LLM
from actorllm.config import BUNDLED_MODELS, EngineConfig
from actorllm.errors import ConfigError, CorruptModelError, InvalidParameterError
from actorllm.types.generation_config import sampling_params_of
from actorllm.types.params import SamplingParams


def model_folder(folder: Path, generation: Any = None) -> Path:
    folder.mkdir(exist_ok=True)
    shutil.copy(BUNDLED_MODELS["storyteller"] / "config.json", folder)
    if generation is not None:
        (folder / "generation_config.json").write_bytes(orjson.dumps(generation))
    return folder


def params_of(model: Path | str, **arguments: Any) -> SamplingParams:
    config = EngineConfig.from_arguments(model, skip_tokenizer_init=True, **arguments)
    again = EngineConfig.from_json(config.to_json())
    assert again == config
    return sampling_params_of(again.model.sampling_defaults)


def test_the_bundled_model() -> None:
    assert params_of("storyteller") == SamplingParams(temperature=0.8, top_p=0.95)
    assert params_of("storyteller", generation_config="vllm") == SamplingParams()


def test_what_is_taken_of_the_file(tmp_path: Path) -> None:
    recommended = {"temperature": 0.5, "top_k": 20, "top_p": 0.9, "min_p": 0.1, "max_new_tokens": 77, "do_sample": True}
    model = model_folder(tmp_path / "a", recommended | {"num_beams": 4, "typical_p": 0.3, "repetition_penalty": None})
    assert params_of(model) == SamplingParams(temperature=0.5, top_k=20, top_p=0.9, min_p=0.1, max_tokens=77)
    override = {"temperature": 0.2, "top_k": None, "max_new_tokens": 5}
    assert params_of(model, override_generation_config=override) == SamplingParams(
        temperature=0.2, top_p=0.9, min_p=0.1, max_tokens=5
    )
    only = params_of(model, generation_config="vllm", override_generation_config=override)
    assert only == SamplingParams(temperature=0.2, max_tokens=5)
    assert params_of(model_folder(tmp_path / "b")) == SamplingParams()


def test_another_folder(tmp_path: Path) -> None:
    model = model_folder(tmp_path / "a", {"temperature": 0.5, "eos_token_id": 5})
    other = model_folder(tmp_path / "b", {"temperature": 0.3, "eos_token_id": [7, 8]})
    assert params_of(model, generation_config=str(other)).temperature == 0.3
    ends = {
        source: EngineConfig.from_arguments(model, generation_config=source).model.eos_token_ids
        for source in ("auto", "vllm", other)
    }
    assert ends == {"auto": (5,), "vllm": (5,), other: (7, 8)}


def test_an_end_of_text_that_only_config_json_names_ends_nothing(tmp_path: Path) -> None:
    """As in vLLM, where there is a generation_config.json."""
    for file in BUNDLED_MODELS["storyteller"].iterdir():
        if file.is_file():
            (tmp_path / file.name).symlink_to(file)
    config = orjson.loads((tmp_path / "config.json").read_bytes())
    for name, ids in (("config.json", 5), ("generation_config.json", [7])):
        (tmp_path / name).unlink()
        (tmp_path / name).write_bytes(orjson.dumps((config if ids == 5 else {}) | {"eos_token_id": ids}))
    params = [SamplingParams(max_tokens=4, logit_bias={token: 100.0}) for token in (5, 7)]
    with LLM(tmp_path, topology="inline", num_threads=1, dtype="float32") as llm:
        ends = [output.outputs[0] for output in llm.generate([[1, 2]] * 2, params, use_tqdm=False)]
    assert [(end.token_ids, end.finish_reason, end.stop_reason) for end in ends] == [
        ([5] * 4, "length", None),
        ([7], "stop", 7),
    ]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"generation_config": "/nowhere"}, ["generation_config='/nowhere'", "'auto'", "'vllm'"]),
        ({"generation_config": None}, ["generation_config=None", "'auto'"]),
        ({"override_generation_config": [1]}, ["override_generation_config=[1]", "mapping"]),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig.from_arguments("storyteller", **arguments)
    for word in words:
        assert word in str(caught.value)


def test_bad_files(tmp_path: Path) -> None:
    with pytest.raises(CorruptModelError, match="object"):
        params_of(model_folder(tmp_path, [1]))
    with pytest.raises(InvalidParameterError, match=r"generation_config.json: temperature='hot'.*override_generation"):
        params_of(model_folder(tmp_path, {"temperature": "hot"}))
