"""What products are computed as is measured once, told, kept, and chosen by kind of row."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from actorllm import LLM, AsyncLLM, SamplingParams
from actorllm.actors.record_file import recorded_configuration
from actorllm.config import ARGUMENTS, EngineConfig
from actorllm.errors import ConfigError, UnsupportedModelError
from actorllm.model.cpu import runner as cpu_runner
from actorllm.model.cpu import scheme
from actorllm.model.cpu.layers import PackedLinear, WidenedLinear
from actorllm.model.cpu.scheme import Scheme, _fastest, measured, product_times, products
from actorllm.model.linear import Linear
from actorllm.model.linear.by_kind import ByKindLinear, RowKinds
from actorllm.model.linear.dense import Dense
from actorllm.model.parallel import Ranks
from actorllm.model.quantization import onednn
from actorllm.model.quantization.int4 import Int4, Int4Weights
from actorllm.model.quantization.int4pack import Int4Linear
from actorllm.model.quantization.int8 import Int8
from actorllm.model.quantization.onednn import Int8Linear
from actorllm.types.device import rules_of
from tests.api.deaths_and_forks import tokens_over_deaths
from tests.model.hf.decoders import WINDOW, prompt, save
from tests.model.hf.releases import needs_modules
from tests.model.ranks import arguments as arguments_of_ranks
from tests.model.ranks import model_folder, streams

OPTIONS: dict[str, Any] = {
    "dtype": "bfloat16", "topology": "inline", "num_threads": 1, "max_model_len": 128, "block_size": 16,
}  # fmt: skip


class Clock:
    """Moves when a product is computed."""

    def __init__(self) -> None:
        self.now = 0.0

    def thread_time(self) -> float:
        return self.now


class Timed(Linear):
    """Takes so long for a row."""

    def __init__(self, clock: Clock, num_seconds: float) -> None:
        super().__init__(1, 1, 1)
        self.clock, self.num_seconds = clock, num_seconds

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.clock.now += self.num_seconds * len(x)
        return x


def test_sides_are_timed_by_one_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(scheme, "time", clock)
    one, two = product_times([Timed(clock, 1.0), Timed(clock, 2.0)], torch.float32)
    assert one == pytest.approx((1.0, 64.0))
    assert two == pytest.approx((2.0, 128.0))


@pytest.mark.parametrize(("times", "expected"), [
    ({"bfloat16": (2, 2), "int8": (1, 3)}, "int8"),
    ({"bfloat16": (2, 2), "int8": (3, 1)}, "int8"),
    ({"bfloat16": (2, 2), "int8": (3, 3)}, "bfloat16"),
    ({"bfloat16": (2, 2), "int4": (1, 3), "int8": (1, 1)}, "int4+int8"),
    ({"bfloat16": (2, 2), "int4": (1, 1.2), "int8": (1, 1)}, "int4"),
    ({"bfloat16": (2, 2), "int4": (1, 9)}, "int4"),
    ({"bfloat16": (2, 2), "int4": (3, 9), "int8": (1, 1)}, "int4+int8"),
    ({"bfloat16": (2, 2), "int4": (3, 9), "int8": (1, 3)}, "bfloat16"),
    ({"bfloat16": (2, 2), "int8": (2.1, 2.1)}, "int8"),
    ({"bfloat16": (2, 2), "float32": (1.9, 1.9)}, "bfloat16"),
    ({"bfloat16": (2, 2), "float32": (1, 1)}, "float32"),
    ({"bfloat16": (2, 2), "float32": (3, 1)}, "bfloat16+float32"),
    ({"bfloat16": (2, 2), "float32": (1, 3)}, "bfloat16"),
])  # fmt: skip
def test_the_fastest_is_chosen(times: dict[str, tuple[float, float]], expected: str) -> None:
    found = _fastest(times, "bfloat16", may_twin=True)
    assert str(found) == expected
    assert Scheme.parse(expected) == found
    assert "+" not in str(_fastest({k: v for k, v in times.items() if k != "int8" or "int4" not in times}, "bfloat16",
                                   may_twin=False))  # fmt: skip


@pytest.mark.parametrize(("one", "many", "expected"), [
    (4, 1, "float32"),
    (6, 1, "bfloat16+float32"),
    (1, 2, "bfloat16"),
    (3, 1.9, "bfloat16"),
])  # fmt: skip
def test_a_small_model_is_computed_as_is_fastest_for_many_rows(one: float, many: float, expected: str) -> None:
    times = {"bfloat16": (2.0, 2.0), "float32": (one, many)}
    assert str(_fastest(times, "bfloat16", may_twin=True, is_small=True)) == expected


def test_models_are_small_by_their_weights() -> None:
    config = EngineConfig.from_arguments("storyteller", num_threads=1)
    small = cpu_runner.CpuRunner(config, show_progress=False).model_config
    assert scheme._is_small(small)
    assert not scheme._is_small(replace(small, num_layers=64))


def chosen(dtype: str = "bfloat16", **arguments: Any) -> Scheme | None:
    """For the bundled model."""
    config = EngineConfig.from_arguments("storyteller", dtype=dtype, num_threads=1, **arguments)
    runner = cpu_runner.CpuRunner(config, show_progress=False)
    return scheme.choose(config, runner.model_config, runner.dtype)


def test_where_there_is_no_choice_nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(scheme, "measured")
    assert chosen("float32") is None
    assert chosen(batch_invariant=True) is None
    assert chosen(kv_cache_dtype="int8") is None
    elsewhere = {"nodes": ["10.0.0.2:7040"], "node_key_file": "key"}
    assert chosen(quantization="int8", data_parallel_size=2, **elsewhere) is None
    assert chosen(quantization="int8", pipeline_parallel_size=2) is None


def test_replicas_take_what_the_first_one_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Also with other memory to spare, in which they would differ."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = iter(["bfloat16+float32", "float32", "bfloat16"])
    monkeypatch.setattr(scheme, "measured", lambda *_, **__: (Scheme.parse(next(found)), ""))
    first = chosen(data_parallel_size=2)
    monkeypatch.setattr(scheme.memory, "available_bytes", lambda: 0)
    assert chosen(data_parallel_size=2) == chosen(data_parallel_size=2, max_replicas=4) == first
    assert str(first) == "bfloat16+float32"
    assert str(chosen(data_parallel_size=2, quantization="int4")) == "float32", "another key"


def test_replicas_that_cannot_tell_each_other_measure_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "actorllm").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delattr(scheme, "measured")
    asked = "int8" if onednn.is_exact() else "bfloat16"
    assert str(chosen(quantization="int8", data_parallel_size=2)) == asked
    assert str(chosen(data_parallel_size=2)) == "bfloat16"
    assert "nothing is measured for replicas, which could differ" in caplog.text


def test_both_shapes_are_told() -> None:
    _, told = measured(torch.bfloat16, Int4Weights(), may_twin=True)
    assert "int4 " in told
    assert "int8 " in told


def test_rows_of_each_kind_are_computed_in_their_way() -> None:
    kinds = RowKinds()
    twin = ByKindLinear(Timed(Clock(), 0), Timed(Clock(), 0), kinds)
    twin.decode = lambda x: x + 1  # type: ignore[assignment]
    twin.prompt = lambda x: x + 100  # type: ignore[assignment]

    def computed(num_rows: int, **more: Any) -> list[int]:
        columns: dict[str, Any] = {name: [] for name in ("starts", "counts", "first")}
        columns = {f"prefill_{name}": value for name, value in columns.items()} | {"num_prompts": [], "num_decodes": 2}
        inputs: Any = SimpleNamespace(token_ids=np.zeros(num_rows, np.int64), **columns | more)
        kinds.begin(inputs)
        return [int(value) for value in twin(torch.zeros(num_rows, 1)).flatten()]

    assert computed(2) == [1, 1]
    assert computed(3, num_decodes=0) == [100] * 3
    assert computed(4) == [1, 1, 100, 100]
    # A request that comes back: positions 3 to 6 of it, of which the prompt has 5; then one that is all prompt, then padding.
    columns = {"prefill_starts": [2, 6], "prefill_counts": [4, 2], "prefill_first": [3, 0], "num_prompts": [5, 2]}
    assert computed(9, **columns) == [1, 1, 100, 100, 1, 1, 100, 100, 100]
    columns = {"prefill_starts": [2], "prefill_counts": [2], "prefill_first": [7], "num_prompts": [5]}
    assert computed(4, **columns) == [1, 1, 1, 1]


def test_a_scheme_makes_its_products() -> None:
    weight = torch.randn(64, 64, dtype=torch.bfloat16)
    kinds = RowKinds()

    def made(text: str, form: Any) -> Linear:
        found = Scheme.parse(text)
        return products(found, torch.bfloat16, kinds if found.is_twin else None, scheme.linear)(form)

    assert type(made("bfloat16", Dense(weight))) is PackedLinear
    assert type(made("float32", Dense(weight))) is WidenedLinear
    assert type(made("int8", Int8.of(weight))) is Int8Linear
    twin = made("int4+int8", Int4.of(weight))
    assert isinstance(twin, ByKindLinear)
    assert (type(twin.decode), type(twin.prompt)) == (Int4Linear, Int8Linear)
    wild = torch.randn(64, 64) * (10.0 ** (8 * torch.rand(64, 64)))
    assert type(made("int4+int8", Int4.of(wild))) is Int4Linear, "8 bits for a row would be too few"
    both = made("bfloat16+float32", Dense(weight))
    x = torch.randn(5, 64).bfloat16()
    kinds.split = 2
    exact = x.double() @ weight.double().T
    torch.testing.assert_close(both(x).double(), exact, rtol=1e-2, atol=5e-2)
    kinds.split = 5
    assert torch.equal(both(x)[:2], made("bfloat16", Dense(weight))(x)[:2])


def test_what_was_found_is_in_the_configuration_and_in_recordings(tmp_path: Path) -> None:
    record = tmp_path / "record"
    with LLM("storyteller", quantization="int4", record=str(record), **OPTIONS) as llm:
        llm.generate("Once", SamplingParams(max_tokens=2), use_tqdm=False)
        config = llm._engine.config
    assert config.model.scheme in ("int4", "int4+int8")
    assert recorded_configuration(record).model.scheme == config.model.scheme
    assert EngineConfig.from_json(config.to_json()).model.scheme == config.model.scheme


def test_a_worker_that_takes_another_place_measures_nothing(
    make_driver: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = EngineConfig.from_arguments("storyteller", dtype="bfloat16", num_threads=1, quantization="int4")
    monkeypatch.delattr(scheme, "measured")
    for text, kind in (("int4", Int4Linear), ("int4+int8", ByKindLinear), ("bfloat16", PackedLinear)):
        runner = cpu_runner.CpuRunner(replace(config, model=replace(config.model, scheme=text)), show_progress=False)
        runner.load()
        assert runner.scheme == text
        assert type(runner.decoder.layers[0].qkv) is kind
        runner.close()


@pytest.mark.parametrize("found", ["bfloat16", "int8"])
def test_what_is_slower_is_not_used_and_said(
    found: str, make_driver: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(scheme, "measured", lambda *_, **__: (Scheme(found, found), "0.5 times as fast"))
    with caplog.at_level(logging.INFO):
        decoder = make_driver("storyteller", dtype="bfloat16", quantization="int8").runner.decoder
    (told,) = [record for record in caplog.records if "products are computed" in record.message]
    assert (told.levelno == logging.WARNING) == (found == "bfloat16")
    assert ("quantization='int8' would be slower" in told.message) == (found == "bfloat16")
    assert type(decoder.lm_head) is (Int8Linear if found == "int8" else PackedLinear)


def test_a_twin_that_has_no_room_or_is_refused_is_not_made(
    make_driver: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheme, "measured", lambda *_, may_twin, **__: (
        Scheme("int4", "int8" if may_twin else "int4"), "measured"))  # fmt: skip

    def scheme_of(**arguments: Any) -> str:
        found: str = make_driver("storyteller", dtype="bfloat16", quantization="int4", **arguments).runner.scheme
        return found

    assert scheme_of() == "int4+int8"
    assert scheme_of(quantization_twin=False) == "int4"
    assert scheme_of(batch_invariant=True) == "int4"
    monkeypatch.setattr(scheme, "TWIN_SHARE", 1e-9)
    assert scheme_of() == "int4"
    assert scheme_of(quantization_twin=True) == "int4+int8"


@pytest.mark.parametrize("more", [
    {"nodes": ["10.0.0.2:7040"], "node_key_file": "key", "data_parallel_size": 2},
    {"nodes": ["10.0.0.2:7040"], "node_key_file": "key", "max_replicas": 2},
    {"tensor_parallel_size": 2, "nnodes": 2},
])  # fmt: skip
def test_a_twin_is_refused_where_workers_would_each_measure(more: dict[str, Any]) -> None:
    given: dict[str, Any] = {"quantization": "int4", "quantization_twin": True}
    name = list(more)[-1]
    with pytest.raises(
        ConfigError, match=rf"quantization_twin=True is not supported with {name}=2 yet: each worker measures"
    ):
        EngineConfig.from_arguments("storyteller", **given, **more)
    for of_one_machine in ("tensor_parallel_size", "data_parallel_size"):
        assert EngineConfig.from_arguments("storyteller", **given, **{of_one_machine: 2}).model.quantization_twin


def test_ranks_compute_what_the_first_one_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []

    class Both(Ranks):
        def agree(self, numbers: Any) -> Any:
            told.append(numbers)
            return told[0]

    arguments: dict[str, Any] = {"dtype": "bfloat16", "num_threads": 1, "tensor_parallel_size": 2}
    config = EngineConfig.from_arguments("storyteller", quantization="int4", **arguments)
    plan = cpu_runner.CpuRunner(config, show_progress=False).model_config
    monkeypatch.setattr(scheme, "measured", lambda *_, **__: (Scheme("int4", "int8"), "measured"))
    assert scheme.choose(config, plan, torch.bfloat16, Both(0, 2)) == Scheme("int4", "int8")
    monkeypatch.delattr(scheme, "measured")
    assert scheme.choose(config, plan, torch.bfloat16, Both(1, 2)) == Scheme("int4", "int8")
    told[0][:] = ord(" ")
    assert scheme.choose(config, plan, torch.bfloat16, Both(1, 2)) is None
    apart = replace(config, num_machines=2)
    assert scheme.choose(apart, plan, torch.bfloat16, Both(0, 2)) is None, "each would find out for itself"


@pytest.mark.slow(reason="ranks as processes; what they agree on is shown without")
def test_products_of_ranks_depend_on_the_kind_of_row_and_not_on_the_batch(tmp_path: Path) -> None:
    shape: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "tie_word_embeddings": False}
    folder = model_folder(tmp_path, **shape, dtype="bfloat16")
    given: dict[str, Any] = {"tensor_parallel_size": 2, "quantization": "int4"}
    found = streams(folder, **given, compute_scheme="int4+int8")
    assert streams(folder, **given, compute_scheme="int4+int8", max_num_seqs=3) == found
    other = streams(folder, **given, compute_scheme="int4")
    assert other != found, "rows of prompts have 8 bits"
    alone = streams(folder, topology="inline", quantization="int4", compute_scheme="int4+int8")
    same = sum(ours[0] == theirs[0] for ours, theirs in zip(found, alone, strict=True))
    assert same >= 6, "first tokens of ten requests, of 331 ids"
    with LLM(folder, **arguments_of_ranks(**given, quantization_twin=True)) as llm:  # measured
        schemes = {worker["scheme"] for worker in llm.stats()["workers"]}
    assert len(schemes) == 1
    assert schemes <= {"int4", "int4+int8", "bfloat16"}


@pytest.mark.parametrize(
    ("kind", "more", "told"),
    [
        pytest.param("llama", {"model_impl": "transformers"}, "run through transformers yet", marks=needs_modules),
        ("mixtral", {}, "have experts yet"),
    ],
)
def test_a_twin_is_refused_where_layers_have_one_form(
    kind: str, more: dict[str, Any], told: str, tmp_path: Path, make_runner: Callable[..., Any]
) -> None:
    save(kind, tmp_path)
    given = {"quantization": "int4", "dtype": "bfloat16"} | more
    with pytest.raises(UnsupportedModelError, match=rf"quantization_twin=True is not supported for models that {told}"):
        make_runner(tmp_path, quantization_twin=True, **given)


@pytest.mark.parametrize(("quantization", "text"), [
    ("int8", "int8"), ("int8", "bfloat16"), ("int4", "int4"), ("int4", "int4+int8"), ("int4", "bfloat16"),
    (None, "bfloat16"), (None, "float32"), (None, "bfloat16+float32"),
])  # fmt: skip
def test_a_scheme_that_is_asked_for_is_computed_and_nothing_is_measured(
    quantization: str | None, text: str, make_driver: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    if not onednn.is_exact() and "int" in text:
        pytest.skip("sums of 8 bits are not exact here: no VNNI")
    monkeypatch.delattr(scheme, "measured")
    arguments: dict[str, Any] = {"dtype": "bfloat16", "quantization": quantization, "compute_scheme": text}
    driver = make_driver("storyteller", **arguments)
    assert driver.runner.scheme == text
    kinds = {type(layer.qkv) for layer in driver.runner.decoder.layers}
    assert kinds == {{
        "int8": Int8Linear, "int4": Int4Linear, "float32": WidenedLinear, "bfloat16": PackedLinear,
    }.get(text, ByKindLinear)}  # fmt: skip


@pytest.mark.parametrize(("given", "told"), [
    ({"compute_scheme": "int8"}, "is not known for quantization=None and dtype='bfloat16': there is one of 'bfloat16',"),
    ({"compute_scheme": "int4", "quantization": "int8"}, "there is one of 'int8', 'bfloat16'; use that"),
    ({"compute_scheme": "fast"}, "compute_scheme='fast' is not known"),
    ({"compute_scheme": 8}, "compute_scheme=8 must be a string"),
    ({"compute_scheme": "bfloat16", "dtype": "float32"}, "there is one of 'float32'"),
    ({"compute_scheme": "int4+int8", "quantization": "int4", "quantization_twin": True}, "says already what"),
    ({"compute_scheme": "bfloat16+float32", "pipeline_parallel_size": 2}, "not supported with pipeline_parallel_size=2"),
    ({"compute_scheme": "bfloat16+float32", "batch_invariant": True}, "needs one scheme for all rows"),
])  # fmt: skip
def test_a_scheme_that_cannot_be_is_refused_by_name(given: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(told)):
        EngineConfig.from_arguments("storyteller", **{"dtype": "bfloat16"} | given)


def test_a_scheme_is_refused_on_cuda() -> None:
    reason = rules_of("cuda").why_not({**ARGUMENTS, "compute_scheme": "bfloat16"}, pools=False)
    assert reason is not None
    assert "compute_scheme='bfloat16' is about products on a CPU" in reason


def test_a_scheme_is_refused_where_the_processor_would_compute_something_else(
    make_driver: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheme, "is_exact", lambda: False)
    with pytest.raises(UnsupportedModelError, match="compute_scheme='int8': this processor has no VNNI"):
        make_driver("storyteller", dtype="bfloat16", quantization="int8", compute_scheme="int8")


def test_a_scheme_of_two_forms_is_refused_of_a_model_with_experts(
    tmp_path: Path, make_runner: Callable[..., Any]
) -> None:
    save("mixtral", tmp_path)
    with pytest.raises(UnsupportedModelError, match="not supported for models with experts"):
        make_runner(tmp_path, dtype="bfloat16", compute_scheme="bfloat16+float32")


@needs_modules
@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("bfloat16+float32", "not supported for models that run through transformers"),
        ("float32", "are computed in their own type"),
    ],
)
def test_a_scheme_is_refused_of_a_model_that_runs_through_transformers(
    text: str, told: str, tmp_path: Path, make_runner: Callable[..., Any]
) -> None:
    save("llama", tmp_path)
    with pytest.raises(UnsupportedModelError, match=told):
        make_runner(tmp_path, dtype="bfloat16", compute_scheme=text, model_impl="transformers")


@pytest.mark.parametrize("text", ["int4+int8", "bfloat16+float32"])
def test_streams_of_two_schemes_do_not_depend_on_the_batch_or_a_preemption(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = Scheme.parse(text)
    monkeypatch.setattr(scheme, "measured", lambda *_, **__: (found, "measured"))
    prompts = [
        "Once upon a time there was a king who had three sons, and the youngest of them was so clever that all the people of "
        "the land spoke of him, and one day the king said to him that he should go out into the world and",
        "The",
        "A little girl",
        "He said",
    ]
    params = SamplingParams(temperature=0.8, max_tokens=20, seed=3, ignore_eos=True)

    def streams(batch: list[str], **more: Any) -> list[list[int]]:
        with LLM("storyteller", quantization="int4" if found.decode == "int4" else None, **OPTIONS | more) as llm:
            outputs = llm.generate(batch, params, use_tqdm=False)
            assert "num_gpu_blocks_override" not in more or (
                llm.stats()["scheduler"]["scheduler"]["num_preemptions"] > 0
            )
        return [list(output.outputs[0].token_ids) for output in outputs]

    alone = [streams([prompt])[0] for prompt in prompts[:2]]
    assert streams(prompts[::-1], num_gpu_blocks_override=9, max_num_seqs=4)[:1:-1] == alone
    assert streams(prompts, max_num_batched_tokens=8, max_num_seqs=4)[:2] == alone


@pytest.mark.parametrize("text", ["int4+int8", "bfloat16+float32"])
def test_two_schemes_that_were_measured_leave_one_kv_group(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those that an argument names: a group of layers with a window attends to output that is computed again as to a prompt."""
    save("mistral", tmp_path)
    tokens = [{"prompt_token_ids": prompt(seed, 40)} for seed in range(4)]
    params = [SamplingParams(temperature=0.9, seed=seed, max_tokens=40, ignore_eos=True) for seed in range(4)]
    arguments = OPTIONS | {"quantization": "int4" if "int4" in text else None, "skip_tokenizer_init": True}

    def run(found: str, **more: Any) -> tuple[list[list[int]], int | None, int]:
        monkeypatch.setattr(scheme, "measured", lambda *_, **__: (Scheme.parse(found), "measured"))
        with LLM(str(tmp_path), **arguments | more) as llm:
            assert llm.config.model.scheme == found
            outputs = llm.generate(tokens, params, use_tqdm=False)
            counts = llm.stats()["scheduler"]["scheduler"]
            streams = [list(output.outputs[0].token_ids) for output in outputs]
            return streams, llm.config.cache.window, counts["num_preemptions"]

    alone, window, _ = run(text, max_num_seqs=1)
    assert window is None
    assert run(text, compute_scheme=text, max_num_seqs=1) == (alone, None, 0)
    streams, window, num_preemptions = run(text, max_num_seqs=4, num_gpu_blocks_override=12, max_num_batched_tokens=48)
    assert (streams, window) == (alone, None)
    assert num_preemptions > 0
    assert run(text.partition("+")[0], max_num_seqs=1)[1] == WINDOW


def test_streams_of_two_schemes_survive_the_death_of_worker_and_scheduler() -> None:
    """Output that was written before is computed once more as decode rows are."""
    if not onednn.is_exact():
        pytest.skip("sums of 8 bits are not exact here: no VNNI")
    params = SamplingParams(temperature=0.8, max_tokens=40, seed=3, ignore_eos=True)
    given = OPTIONS | {"quantization": "int4", "compute_scheme": "int4+int8"}

    async def survived() -> list[int]:
        async with AsyncLLM("storyteller", **given | {"topology": "process"}) as engine:
            return await tokens_over_deaths(engine, "Once upon a time there was a king", params)

    with LLM("storyteller", **given) as llm:
        (output,) = llm.generate("Once upon a time there was a king", params, use_tqdm=False)
    assert asyncio.run(survived()) == list(output.outputs[0].token_ids)


CHILD = """
import json, logging
logging.basicConfig(level=logging.INFO)
from actorllm import LLM, SamplingParams
with LLM("storyteller", dtype="bfloat16", quantization="int8", topology="inline", num_threads=1, max_model_len=64) as llm:
    output = llm.generate("Once upon a time", SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)[0]
    print(json.dumps([llm._engine.config.model.scheme, output.outputs[0].text]))
"""


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="instructions of another architecture")
def test_a_processor_with_avx2_only_computes_in_float32() -> None:
    environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX2"}
    child = subprocess.run([sys.executable, "-c", CHILD], env=environment, capture_output=True, text=True, check=True)
    found, text = json.loads(child.stdout.splitlines()[-1])
    assert found == "float32"
    assert "no VNNI" in child.stderr
    assert text.strip()
