"""`batch_invariant=True`: the bits of a stream depend on its request only. Log-probabilities are compared, which show every bit."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from actorllm import LLM
from actorllm.errors import ConfigError, UnsupportedModelError
from actorllm.model.cpu import invariance, layers
from actorllm.model.cpu import runner as cpu_runner
from actorllm.model.cpu.attention import FIXED_TILE, AttentionBatch, KVCache
from actorllm.model.linear import Linear, LinearWeight
from actorllm.model.team import Team
from tests.api.prompted import DRAFTS, OTHERS, PROMPT, Stream, streams
from tests.effort import grid
from tests.model.driver import TINY_LLAMA

pytestmark = pytest.mark.usefixtures("computed_as_asked")

OPTIONS: dict[str, Any] = {
    "topology": "inline", "num_threads": 1, "max_model_len": 192, "batch_invariant": True, "block_size": 16,
}  # fmt: skip


@pytest.fixture(scope="module")
def reference() -> Callable[[str, str | None], Stream]:
    """The stream of a request that is computed alone and in one piece."""
    known: dict[tuple[str, str | None], Stream] = {}

    def of(dtype: str, quantization: str | None) -> Stream:
        if (dtype, quantization) not in known:
            with LLM("storyteller", dtype=dtype, quantization=quantization, **OPTIONS) as llm:
                (known[dtype, quantization],) = streams(llm, [PROMPT])
        return known[dtype, quantization]

    return of


@pytest.mark.timeout(300)  # two threads beside other programs wait for each other
@pytest.mark.parametrize(
    ("quantization", "depth", "num_tokens", "drafts", "num_threads"),
    grid([None, "int8"], [1, 2], [24, 2048], [None, DRAFTS], [1, 2]),
)
def test_no_bit_depends_on_batch_depth_chunks_drafts_or_threads(
    quantization: str | None,
    depth: int,
    num_tokens: int,
    drafts: dict[str, Any] | None,
    num_threads: int,
    reference: Callable[[str, str | None], Stream],
) -> None:
    expected = reference("bfloat16", quantization)
    with LLM(
        "storyteller",
        dtype="bfloat16",
        quantization=quantization,
        async_scheduling=depth == 2,
        max_num_batched_tokens=num_tokens,
        max_num_seqs=8,
        speculative_config=drafts,
        enable_prefix_caching=False,
        **OPTIONS | {"num_threads": num_threads},
    ) as llm:
        for batch in ([PROMPT], [OTHERS[0], PROMPT], [*OTHERS[:3], PROMPT, *OTHERS[3:]]):
            assert streams(llm, batch)[batch.index(PROMPT)] == expected, f"{len(batch)} in the batch"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_no_bit_depends_on_a_preemption_or_a_prefix_hit(
    dtype: str, reference: Callable[[str, str | None], Stream]
) -> None:
    expected = reference(dtype, None)
    arguments = OPTIONS | {"max_model_len": 128}
    with LLM("storyteller", dtype=dtype, num_gpu_blocks_override=9, max_num_seqs=4, **arguments) as llm:
        batch = [PROMPT, *OTHERS[1:4]]
        assert streams(llm, batch)[0] == expected
        assert streams(llm, batch[::-1])[-1] == expected, "with what the first round left behind"
        assert llm.stats()["scheduler"]["scheduler"]["num_preemptions"] > 0
        # What follows the answer in a conversation has the answer in its prompt, which another arithmetic has computed.
        answer = llm.llm_engine.get_tokenizer().decode([token for token, _ in expected])
        (following,) = streams(llm, [PROMPT + answer])
    with LLM("storyteller", dtype=dtype, **arguments) as llm:
        assert streams(llm, [PROMPT + answer]) == [following]
        (again,) = streams(llm, [PROMPT + answer])
        assert again == following
        assert llm.stats()["scheduler"]["scheduler"]["prefix_cache"]["hits"] > 0


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_with_threads_that_change_in_every_step(
    quantization: str | None, reference: Callable[[str, str | None], Stream], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, turn = reference("bfloat16", quantization), itertools.count()
    monkeypatch.setattr(Team, "begin", lambda *_, **__: 1 + next(turn) % 2)
    with LLM("storyteller", dtype="bfloat16", quantization=quantization, **OPTIONS | {"num_threads": 2}) as llm:
        assert streams(llm, [OTHERS[1], PROMPT])[1] == expected
    assert next(turn) > 20


def test_without_it_bits_depend_on_the_batch() -> None:
    """What the tests above see, they see because of it."""
    arguments = {name: value for name, value in OPTIONS.items() if name != "batch_invariant"}
    with LLM("storyteller", dtype="float32", enable_prefix_caching=False, **arguments) as llm:
        assert streams(llm, [PROMPT]) != streams(llm, [*OTHERS[:3], PROMPT])[3:]


class Uneven(Linear):
    """Adds something that depends on the number of rows."""

    def __init__(self, inner: Linear) -> None:
        super().__init__(inner.out_features, inner.in_features, inner.num_bytes)
        self.inner = inner

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) + (0.01 if len(x) > 3 else 0)


def test_a_machine_whose_products_depend_on_the_batch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    made = layers.linear

    def uneven(weight: LinearWeight) -> Linear:
        return Uneven(made(weight))

    monkeypatch.setattr(layers, "linear", uneven)
    with pytest.raises(UnsupportedModelError, match=r"bits of a row depend on its (chunks|batch)"):
        LLM("storyteller", dtype="bfloat16", **OPTIONS)


def test_an_activation_that_treats_ends_differently_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(invariance, "_is_even", lambda _: False)
    with pytest.raises(UnsupportedModelError, match="activation function"):
        LLM("storyteller", dtype="bfloat16", **OPTIONS)


def test_products_of_one_row_that_add_up_differently_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_runner, "paired", layers.linear)
    with pytest.raises(UnsupportedModelError, match="its batch"):
        LLM("storyteller", dtype="float32", **OPTIONS)


@pytest.mark.parametrize("window", [None, 40])
def test_tiles_depend_on_the_position_only(window: int | None) -> None:
    cache = KVCache(1, 2, 8, 40, 16, torch.float32, has_fixed_tiles=True)
    batch = AttentionBatch.__new__(AttentionBatch)
    batch._cache, batch._window, batch.queries_per_kv = cache, window, 2
    table = np.arange(40, dtype=np.int32)

    def tiles(start: int, count: int) -> dict[int, tuple[int | None, int, int]]:
        """By its first position: queries of a tile, and the absolute positions of the keys that it sees."""
        row = batch._fixed_row(table, 0, count, start)
        assert row.block_ids is not None
        known = row.block_ids[row.block_ids != cache.zero_block]
        offset = int(known[0]) * 16
        found = {}
        for tile in row.tiles:
            assert tile.end - tile.start + tile.num_before <= FIXED_TILE
            found[start + tile.start - tile.num_before] = (tile.num_queries, tile.first + offset, tile.last + offset)
            assert tile.last <= len(row.block_ids) * 16, "all keys of the tile are there, as zeros if need be"
        return found

    whole = tiles(0, 300)
    assert list(whole) == [0, 64, 128, 192, 256]
    for start, count in ((0, 10), (10, 54), (64, 1), (65, 200), (265, 35)):
        assert tiles(start, count).items() <= whole.items()


@pytest.mark.parametrize(("arguments", "told"), [
    ({"runner": "pooling", "convert": "embed"}, "vectors"),
    ({"enable_lora": True}, "enable_lora=True"),
    ({"tensor_parallel_size": 2, "topology": "process"}, "tensor_parallel_size=2"),
    ({"model_impl": "transformers"}, "transformers"),
    ({"quantization": "int4", "quantization_twin": True}, "quantization_twin=True"),
])  # fmt: skip
def test_what_it_does_not_hold_with_is_refused(arguments: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        LLM("storyteller", **OPTIONS | arguments)


def test_the_environment_may_ask_for_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from actorllm.config import EngineConfig

    (tmp_path / "config.json").write_text(json.dumps(TINY_LLAMA))
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "0")
    assert not EngineConfig.from_arguments(tmp_path, load_format="dummy", skip_tokenizer_init=True).batch_invariant
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    config = EngineConfig.from_arguments(tmp_path, load_format="dummy", skip_tokenizer_init=True)
    assert config.batch_invariant
    assert EngineConfig.from_json(config.to_json()).batch_invariant
