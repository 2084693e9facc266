"""Decoders of transformers over our cache, by logits against transformers itself, and the guard that refuses others."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from actorllm import LLM, SamplingParams
from actorllm.cli import main
from actorllm.config import EngineConfig
from actorllm.errors import CorruptModelError, ModelNotFoundError, UnsupportedModelError
from actorllm.model.cpu.attention import Scoring
from actorllm.model.cpu.runner import CpuRunner
from actorllm.model.families.decoder_config import DecoderConfig
from actorllm.model.hf import loading, probe, transformers_backend
from actorllm.model.hf.transformers_backend import TransformersDecoder
from actorllm.model.registry import way_of
from tests.model.architectures import table
from tests.model.hf.decoders import (
    ALSO,
    MODELS,
    RECURRENT,
    SHAPE,
    TOLERANCE,
    VOCAB,
    WINDOW,
    difference,
    prompt,
    reference,
    save,
)


@pytest.fixture
def make(make_driver: Callable[..., Any]) -> Callable[..., Any]:
    """A driver over a folder, through transformers also where there is a fused forward."""

    def make(folder: Path, **arguments: Any) -> Any:
        return make_driver(folder, model_impl="transformers", **arguments)

    return make


FUSED_ALONE = (*RECURRENT, "llama4")
"""Recurrent states, and attention in chunks."""

SLOW = pytest.mark.slow(reason="a dozen models more, of which each is quick")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[SLOW] if name in ALSO else []) for name in MODELS if name not in FUSED_ALONE],
)
def test_chunks_and_mixed_steps_equal_transformers(name: str, tmp_path: Path, make: Callable[..., Any]) -> None:
    """Rows join in chunks while others decode, and leave again; every row of every step is compared."""
    model = save(name, tmp_path)
    driver = make(tmp_path)
    assert driver.runner.decoder.config.architecture == type(model).__name__
    driver.add(2, prompt(1, 5))
    driver.add(0, prompt(2, 17))
    assert float(reference(model, prompt(2, 17)).std()) > 1.0, "the logits do not matter"
    driver.step({2: 5, 0: 9})
    assert difference(driver, model) < TOLERANCE
    driver.add(5, prompt(3, 2))
    driver.step({0: 8, 5: 2}, decode=[2])
    assert driver.rows == [2, 0, 5]
    assert difference(driver, model) < TOLERANCE
    for _ in range(6):
        driver.step(decode=[5, 0, 2])
        assert difference(driver, model) < TOLERANCE
    driver.remove(0)
    driver.add(0, prompt(4, 11))
    driver.step({0: 11}, decode=[2, 5])
    assert difference(driver, model) < TOLERANCE
    assert len({token for request in driver.requests.values() for token in request.tokens[-6:]}) > 4


# Controls: what is dropped must be seen ---------------------------------------------------------------------------------


def run_one(driver: Any) -> None:
    """A prompt in two chunks, and one token; whatever ran before is over."""
    if driver.requests:
        driver.remove(0)
    driver.add(0, prompt(5, 20))
    driver.step({0: 9}, decode=[])
    driver.step({0: 11})
    driver.step(decode=[0])


def change_windows(decoder: Any, change: Callable[[int | None], int | None]) -> None:
    layers = enumerate(decoder.config.layers)
    decoder.layers = {id(decoder.model.get_submodule(y.module)): (i, change(y.window)) for i, y in layers}


@pytest.mark.parametrize(
    "name",
    ["mistral", "qwen2", "gemma2", "gemma3", "phi3", "starcoder2", "mixtral", "gpt-oss", "olmo3", "cohere2", "gpt-neo"],
)
def test_control_a_dropped_or_changed_window_is_seen(name: str, tmp_path: Path, make: Callable[..., Any]) -> None:
    model = save(name, tmp_path)
    driver = make(tmp_path)
    windows = [layer.window for layer in driver.runner.decoder.config.layers]
    assert windows == ([None, WINDOW] if name == "qwen2" else [WINDOW, windows[1]])
    changes: list[Callable[[int | None], int | None]] = [lambda w: None, lambda w: w and w + 1, lambda w: w and w - 1]
    for change in changes:
        change_windows(driver.runner.decoder, change)
        run_one(driver)
        assert difference(driver, model) > 20 * TOLERANCE


CONTROLS: dict[str, tuple[str, Callable[..., Scoring]]] = {
    "softcap": ("gemma2", lambda scale, softcap, sinks, places: Scoring(scale, None, sinks)),
    "another softcap": ("gemma2", lambda scale, softcap, sinks, places: Scoring(scale, softcap * 1.2, sinks)),
    "sinks": ("gpt-oss", lambda scale, softcap, sinks, places: Scoring(scale, softcap, None)),
    "sinks of other heads": ("gpt-oss", lambda scale, softcap, sinks, places: Scoring(scale, softcap, sinks.flip(0))),
    "scale": ("granite", lambda scale, softcap, sinks, places: Scoring(12**-0.5, softcap, sinks)),
    "scale of gemma": ("gemma2", lambda scale, softcap, sinks, places: Scoring(16**-0.5, softcap, sinks)),
    "scale by layer": ("gpt2", lambda scale, softcap, sinks, places: Scoring(12**-0.5, softcap, sinks)),
    "slopes": ("bloom", lambda scale, softcap, sinks, places: Scoring(scale, softcap, sinks)),
    "slopes of other heads": (
        "mpt",
        lambda scale, softcap, sinks, places: Scoring(scale, softcap, sinks, places.flip(0)),
    ),
    "slopes that are not scaled": (
        "falcon, alibi",
        lambda scale, softcap, sinks, places: Scoring(scale, softcap, sinks, places / scale),
    ),
}


@pytest.mark.parametrize("control", CONTROLS)
def test_control_scoring(
    control: str, tmp_path: Path, make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    name, scoring = CONTROLS[control]
    model = save(name, tmp_path)
    driver = make(tmp_path)
    monkeypatch.setattr(transformers_backend, "Scoring", scoring)
    run_one(driver)
    assert difference(driver, model) > 20 * TOLERANCE
    monkeypatch.undo()
    run_one(driver)
    assert difference(driver, model) < TOLERANCE


@pytest.mark.parametrize(("name", "field"), [("gemma2", "final_logit_softcapping"), ("granite", "logits_scaling")])
def test_control_the_head_is_the_models_own(name: str, field: str, tmp_path: Path, make: Callable[..., Any]) -> None:
    model = save(name, tmp_path)
    driver = make(tmp_path)
    head = driver.runner.decoder._head
    if name == "granite":
        head.config.logits_scaling = 1.0
    else:
        head.config.final_logit_softcapping = None
    run_one(driver)
    assert difference(driver, model) > 20 * TOLERANCE


@pytest.mark.parametrize("name", ["opt", "gpt2", "llama", "gpt-neox"])
def test_control_positions_off_by_one(name: str, tmp_path: Path, make: Callable[..., Any]) -> None:
    """Of the decode row alone: rotary embeddings would not notice a shift of all."""
    model = save(name, tmp_path)
    driver = make(tmp_path)
    driver.add(0, prompt(5, 20))
    driver.step({0: 20})
    decoder = driver.runner.decoder
    body = decoder._body
    decoder._body = lambda position_ids, **arguments: body(position_ids=position_ids + 1, **arguments)
    driver.step(decode=[0])
    assert difference(driver, model) > 20 * TOLERANCE


# Types, sizes, rope -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["opt", "gemma2", "gpt-oss", "bloom"])
def test_bfloat16_is_as_near_to_float32_as_transformers_is(name: str, tmp_path: Path, make: Callable[..., Any]) -> None:
    half = save(name, tmp_path / "half", torch.bfloat16)
    exact = save(name, tmp_path / "exact", torch.bfloat16).float()
    driver = make(tmp_path / "half", dtype="bfloat16")
    assert driver.runner.decoder.dtype == torch.bfloat16
    ours, theirs = [], []
    for slot in range(4):
        driver.add(slot, prompt(slot, 20))
    for chunk in (8, 8, 4):
        driver.step(dict.fromkeys(range(4), chunk))
    for _ in range(4):
        driver.step(decode=[0, 1, 2, 3])
        for row in range(4):
            tokens = driver.requests[row].tokens[: driver.requests[row].num_computed]
            truth = reference(exact, tokens)[-1]
            ours.append(driver.logits[row] - truth)
            theirs.append(reference(half, tokens)[-1] - truth)
    our_error, their_error = (torch.stack(errors).square().mean().sqrt() for errors in (ours, theirs))
    assert our_error < 1.3 * their_error


def test_the_cache_is_sized_by_the_model(tmp_path: Path, make: Callable[..., Any]) -> None:
    """Of DeepSeek, keys are wider than values: the cache has room for the wider ones."""
    sizes = {"opt": 2 * 2 * 4 * 12, "gpt-bigcode": 2 * 2 * 1 * 12, "deepseek-v3": 2 * 2 * 4 * 20}
    for name, elements in sizes.items():
        save(name, tmp_path / name)
        runner = make(tmp_path / name).runner
        assert runner.block_bytes == elements * runner.config.cache.block_size * 4
        assert runner.cache.pool[:, 0].numel() * 4 == runner.block_bytes
    assert runner.profile_num_blocks() > 0


LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 6,
    "long_factor": [1.5, 2.0, 3.0, 4.0, 6.0, 8.0],
    "original_max_position_embeddings": 32,
}


def test_long_rope_does_not_depend_on_the_neighbours(tmp_path: Path, make: Callable[..., Any]) -> None:
    """transformers takes the long factors in a step whose longest row is long; here the longest possible one decides."""
    model = save("phi3", tmp_path, rope_parameters=LONGROPE, original_max_position_embeddings=32, sliding_window=None)
    driver = make(tmp_path, max_model_len=32)
    run_one(driver)
    assert difference(driver, model) < TOLERANCE, "the short factors"
    driver = make(tmp_path)
    driver.add(0, prompt(1, 60))
    driver.step({0: 60})
    assert difference(driver, model) < TOLERANCE, "the long factors"
    driver.add(1, prompt(5, 20))
    driver.step({1: 20}, decode=[])
    beside = driver.logits.clone()
    alone = make(tmp_path)
    alone.add(0, prompt(5, 20))
    alone.step({0: 20})
    assert float((alone.logits - beside).abs().max()) < TOLERANCE
    assert difference(alone, model) > 20 * TOLERANCE, "short rows are computed with the long factors, too"


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32},
        {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
    ],
    ids=["yarn", "dynamic"],
)
def test_what_a_fused_family_lacks_goes_through_transformers(
    rope: dict[str, Any], tmp_path: Path, make_driver: Callable[..., Any]
) -> None:
    model = save("llama", tmp_path, rope_parameters=rope)
    driver = make_driver(tmp_path)
    assert isinstance(driver.runner.decoder, TransformersDecoder)
    assert f"rope type '{rope['rope_type']}'" in way_of(
        driver.runner.model_config,
        driver.runner.config.model,
        {**json.loads((tmp_path / "config.json").read_text())},
        CpuRunner,
    )
    driver.add(0, prompt(1, 100))
    driver.step({0: 100})
    assert difference(driver, model) < TOLERANCE
    driver.step(decode=[0])
    assert difference(driver, model) < TOLERANCE


def test_model_impl_chooses_the_way(tmp_path: Path, make_runner: Callable[..., Any]) -> None:
    save("llama", tmp_path / "llama")
    save("opt", tmp_path / "opt")
    assert isinstance(make_runner(tmp_path / "llama").model_config, DecoderConfig)
    assert isinstance(make_runner(tmp_path / "llama", model_impl="transformers").decoder, TransformersDecoder)
    with pytest.raises(
        UnsupportedModelError, match=r"'OPTForCausalLM' has no fused forward; those .* LlamaForCausalLM"
    ):
        make_runner(tmp_path / "opt", model_impl="vllm")


# Weights ----------------------------------------------------------------------------------------------------------------


def load(folder: Path, **arguments: Any) -> CpuRunner:
    runner = CpuRunner(EngineConfig.from_arguments(folder, skip_tokenizer_init=True, num_threads=1, **arguments))
    runner.load()
    return runner


@pytest.mark.parametrize("name", ["gpt2", "gemma2"])
def test_dummy_weights_follow_their_seed(name: str, tmp_path: Path) -> None:
    save(name, tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ModelNotFoundError, match="load_format='dummy'"):
        load(tmp_path)
    state = torch.get_rng_state()
    ids = torch.tensor([prompt(0, 12)])
    logits = []
    for seed in (3, 3, 4):
        decoder: Any = load(tmp_path, load_format="dummy", seed=seed).decoder
        with torch.inference_mode(), decoder.stock() as model:
            logits.append(model(ids, use_cache=False).logits[0])
    assert torch.equal(logits[0], logits[1])
    assert not torch.allclose(logits[0], logits[2])
    assert float(logits[0].std()) > 0.5
    assert torch.equal(state, torch.get_rng_state()), "the generator of the host process was used"


def test_weights_that_do_not_fit_are_named(tmp_path: Path) -> None:
    save("opt", tmp_path)
    file = tmp_path / "model.safetensors"
    whole = load_file(file)
    name = "model.decoder.layers.1.fc1.weight"
    save_file({key: tensor for key, tensor in whole.items() if key != name}, file)
    with pytest.raises(CorruptModelError, match=f"no tensor '{name}'"):
        load(tmp_path)
    save_file(whole | {"model.decoder.layers.7.fc1.weight": torch.zeros(3)}, file)
    with pytest.raises(CorruptModelError, match=r"layers\.7\.fc1\.weight"):
        load(tmp_path)
    save_file(whole | {name: torch.zeros(5, 48)}, file)
    with pytest.raises(CorruptModelError, match=r"layers\.1\.fc1\.weight"):
        load(tmp_path)
    file.write_bytes(file.read_bytes()[:-40])
    with pytest.raises(CorruptModelError, match=r"model\.safetensors cannot be read"):
        load(tmp_path)


def test_loading_leaves_the_settings_of_transformers_alone(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    save("gpt2", tmp_path)
    logging = transformers.utils.logging
    before = logging.get_verbosity(), logging.is_progress_bar_enabled()
    capfd.readouterr()
    load(tmp_path)
    assert capfd.readouterr() == ("", "")
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == before


# The guard --------------------------------------------------------------------------------------------------------------


def refusal(folder: Path, **tree: Any) -> str:
    """Why a model with this config.json is refused."""
    (folder / "config.json").write_text(json.dumps(tree))
    with pytest.raises(UnsupportedModelError) as caught:
        CpuRunner(EngineConfig.from_arguments(folder, skip_tokenizer_init=True, max_model_len=64))
    return str(caught.value)


@pytest.mark.parametrize(
    ("installed", "is_old"), [("4.57.6", True), ("5.7.9", True), ("5.8.0.dev0", False), ("5.10.1", False)]
)
def test_an_old_transformers_runs_no_models_and_says_which_would(
    installed: str, is_old: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save("opt", tmp_path)
    monkeypatch.setattr(loading.transformers, "__version__", installed)
    if not is_old:
        load(tmp_path, load_format="dummy")
        return
    with pytest.raises(
        UnsupportedModelError, match=rf"'OPTForCausalLM' .*{installed} is installed.*transformers>=5\.8'"
    ):
        load(tmp_path, load_format="dummy")


REFUSED = {row["config"]: row["message"] for row in table("refused")}
"""By the name of the config, what the message of the refusal has."""
OLDER = {
    "DiffLlama": ("AttentionInterface",),
    "DeepseekV32": ("layers of type 'deepseek_sparse_attention'",),
}
"""The reasons with older releases of transformers, which have these models in another way."""


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_that_would_be_wrong_is_refused_by_name_and_reason(name: str, tmp_path: Path) -> None:
    config_class = getattr(transformers, f"{name}Config", None)
    if config_class is None:
        pytest.skip(f"this version of transformers has no {name}")
    config = config_class()
    names = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    architecture = names[config.model_type]
    tree = json.loads(config.to_json_string(use_diff=False)) | {"architectures": [architecture], "vocab_size": VOCAB}
    message = refusal(tmp_path, **tree)
    assert f"architecture '{architecture}' is not supported: " in message
    assert any(reason in message for reason in (REFUSED[name], *OLDER.get(name, ())))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["LlamaForQuestionAnswering"]}, "no decoder for text generation.*LlamaForCausalLM"),
        ({"architectures": ["FooForCausalLM"], "model_type": "foo"}, "no model_type 'foo'"),
        (
            {"architectures": ["FooForCausalLM"], "model_type": "foo", "auto_map": {"AutoConfig": "foo.FooConfig"}},
            "needs the code in its folder",
        ),
        ({"quantization_config": {"quant_method": "aqlm"}}, r"^quantized weights \(aqlm\) are not supported"),
        ({"architectures": ["BertLMHeadModel"], "model_type": "bert"}, "neither causal"),
    ],
)
def test_what_config_json_may_ask_for_in_vain(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    tree = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"} | SHAPE | change
    text = refusal(tmp_path, **tree)
    assert re.search(message, text), text


def sabotaged(
    name: str, folder: Path, sabotage: Callable[[Any], contextlib.AbstractContextManager[Any]], dtype: str
) -> str:
    """What the probe says of a model that was changed after its structure was read."""
    save(name, folder)
    runner = load(folder, model_impl="transformers", dtype=dtype)
    with sabotage(runner.decoder), pytest.raises(UnsupportedModelError) as caught:
        probe.probe(runner.decoder)  # type: ignore[arg-type]
    return str(caught.value)


@contextlib.contextmanager
def shifting_tokens(decoder: Any) -> Any:
    """State outside of attention: every token also sees a part of the one before it in the same forward."""

    def shift(module: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        return output + 0.2 * output.roll(1, 1) * (torch.arange(output.shape[1]) > 0).unsqueeze(1)

    hook = decoder.model.get_submodule("model.layers.0.mlp").register_forward_hook(shift)
    yield
    hook.remove()


@contextlib.contextmanager
def attending_twice(decoder: Any) -> Any:
    layer = decoder.model.get_submodule("model.layers.0.self_attn")
    forward = layer.forward

    def twice(*arguments: Any, **more: Any) -> Any:
        forward(*arguments, **more)
        return forward(*arguments, **more)

    layer.forward = twice
    yield


@contextlib.contextmanager
def forgetting_sinks(decoder: Any) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            transformers_backend, "Scoring", lambda scale, softcap, sinks, places: Scoring(scale, softcap, None)
        )
        yield


@contextlib.contextmanager
def scaling_wrongly(decoder: Any) -> Any:
    """Attention that is wrong in one chunk as in many, by less than rounding costs the models that it costs most."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transformers_backend, "Scoring", lambda scale, *more: Scoring(0.7 * scale, *more))
        yield


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_probe_sees_what_the_structure_does_not_show(dtype: str, tmp_path: Path) -> None:
    message = sabotaged("llama", tmp_path / "llama", shifting_tokens, dtype)
    assert "architecture 'LlamaForCausalLM' is not supported: in chunks its logits differ" in message
    assert "called 3 times in a step of 2 layers" in sabotaged("olmo2", tmp_path / "olmo2", attending_twice, dtype)
    assert "in chunks its logits differ" in sabotaged("gpt-oss", tmp_path / "gpt-oss", forgetting_sinks, dtype)
    assert "in chunks its logits differ" in sabotaged("mixtral", tmp_path / "mixtral", scaling_wrongly, dtype)


def test_the_probe_forgives_rounding_that_chooses_other_experts(tmp_path: Path, make: Callable[..., Any]) -> None:
    """A deep mixture of experts in bfloat16 is farther from the stock model than others, in one chunk as in many."""
    layers = 36
    types = ["sliding_attention", "full_attention"] * (layers // 2)
    save("gpt-oss", tmp_path, num_hidden_layers=layers, layer_types=types, num_local_experts=32, num_experts_per_tok=4)
    make(tmp_path, dtype="bfloat16", load_format="dummy", seed=1)


def test_info_says_which_way_a_model_takes(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    save("opt", tmp_path)
    assert main(["info", str(tmp_path)]) == 0
    output = capfd.readouterr().out
    assert "transformers, over the paged cache (architecture 'OPTForCausalLM' has no fused forward" in output
    assert "4 query, 4 key/value" in output
    refusal(tmp_path, architectures=["XGLMForCausalLM"], model_type="xglm", vocab_size=VOCAB)
    assert main(["info", str(tmp_path)]) == 2
    assert "AttentionInterface" in capfd.readouterr().err


# All the way through ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["opt", "gpt2", "gpt-oss", "bloom"])
def test_a_folder_streams_like_generate(name: str, tmp_path: Path) -> None:
    """Greedy streams of a batch of prompts are those of transformers' own generate, one by one."""
    model = save(name, tmp_path)
    prompts = [prompt(seed, length) for seed, length in enumerate((3, 30, 1, 12, 50, 7))]
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    arguments: dict[str, Any] = {"topology": "inline", "num_threads": 1, "kv_cache_memory_bytes": 1 << 20}
    limits = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "block_size": 8}
    with LLM(tmp_path, skip_tokenizer_init=True, **arguments, **limits) as llm:
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    for ids, output in zip(prompts, outputs, strict=True):
        with torch.inference_mode():
            expected = model.generate(
                torch.tensor([ids]),
                attention_mask=torch.ones(1, len(ids), dtype=torch.long),
                max_new_tokens=20,
                do_sample=False,
                pad_token_id=0,
            )[0, len(ids) :].tolist()
        assert output.outputs[0].token_ids == expected


def test_worker_processes_end_without_a_word(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model = save("opt", tmp_path)
    capfd.readouterr()
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    with LLM(tmp_path, skip_tokenizer_init=True, num_threads=1, kv_cache_memory_bytes=1 << 20) as llm:
        (output,) = llm.generate({"prompt_token_ids": prompt(0, 9)}, params, use_tqdm=False)
    assert capfd.readouterr() == ("", "")
    ids = prompt(0, 9) + output.outputs[0].token_ids
    assert reference(model, ids[:-1])[8:].argmax(1).tolist() == ids[9:]
