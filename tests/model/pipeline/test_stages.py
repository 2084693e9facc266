"""Stages compute one model together: the same streams as one process, through deaths too, and errors that say what does not fit."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from itertools import combinations, islice, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import actorllm.client.engine_supervisor
from actorllm import LLM, AsyncLLM, SamplingParams
from actorllm.actors.heartbeat import Heartbeat
from actorllm.actors.step_budget import NEW_BUDGET_S
from actorllm.actors.topology import Topology, engine_topology
from actorllm.actors.worker import WorkerActor
from actorllm.config import EngineConfig, read_model_folder
from actorllm.errors import ConfigError, EngineDeadError, UnsupportedModelError
from actorllm.messages import StepPlan
from actorllm.model.cpu.runner import CpuRunner
from actorllm.model.registry import check_shares, model_plan
from actorllm.types.pipeline_stages import balanced, head_in_layers
from tests.api.equality_grid import ENOUGH_TOKENS, GRID, MAX_TOKENS, NUM_PROMPTS, TOKEN_BYTES, TOO_FEW_TOKENS
from tests.api.equality_grid import requests as requests_of_the_grid
from tests.api.equality_grid import run as run_of_the_grid
from tests.model.ranks import arguments, model_folder, streams
from tests.oracle import Account, Stream

SLOW = pytest.mark.slow(reason="several processes for half a minute; one configuration with 2 stages is quick")
QUICK = {(2, True, 16): 18}
"""Configurations of `make test`, with so many prompts."""


def cells() -> list[Any]:
    found = []
    for num_stages in (2, 4):
        for preempt, chunk in sorted({cell[2:] for cell in GRID if cell[0] == "process"}):
            quick = QUICK.get((num_stages, preempt, chunk))
            found.append(pytest.param(num_stages, preempt, chunk, quick or NUM_PROMPTS, marks=[] if quick else [SLOW]))
    return found


@pytest.fixture(scope="module")
def reference() -> dict[int, list[Stream]]:
    return {}


@pytest.mark.timeout(180)
@pytest.mark.parametrize(("num_stages", "preempt", "chunk", "num_prompts"), cells())
def test_streams_of_stages_are_those_of_one_process(
    reference: dict[int, list[Stream]], num_stages: int, preempt: bool, chunk: int, num_prompts: int
) -> None:
    """The configurations of tests/api/test_equality.py, in float32: prompts in chunks, preemptions, every kind of sampling."""
    if num_prompts not in reference:
        reference[num_prompts], _ = run_of_the_grid(num_prompts, topology="inline", async_scheduling=False)
    num_tokens = TOO_FEW_TOKENS * num_prompts // NUM_PROMPTS if preempt else ENOUGH_TOKENS
    found, statistics = run_of_the_grid(
        num_prompts,
        pipeline_parallel_size=num_stages,
        pipeline_layer_partition=[4 // num_stages] * num_stages,  # each has as much of the cache
        long_prefill_token_threshold=chunk,
        kv_cache_memory_bytes=TOKEN_BYTES // num_stages * num_tokens,
    )
    assert (statistics["num_preemptions"] > 0) == preempt
    assert len(statistics["lanes"]["num_rows"]) == num_stages
    prompts, params = requests_of_the_grid()
    account = Account()
    for prompt, one, stream, expected in zip(prompts, params, found, reference[num_prompts], strict=False):
        account.check(prompt, one, stream)
        account.compare(prompt, one, stream, expected)
    assert account.tokens == num_prompts * MAX_TOKENS
    assert account.real == 0, account


@pytest.mark.parametrize(
    ("size", "changes"),
    [
        pytest.param({"pipeline_parallel_size": 3, "pipeline_layer_partition": [1, 3, 1]}, {}, id="uneven"),
        pytest.param({"pipeline_parallel_size": 2, "tensor_parallel_size": 2}, {}, id="two-ranks-each", marks=SLOW),
        pytest.param(
            {"pipeline_parallel_size": 2, "pipeline_layer_partition": "4,1"},
            {"architectures": ["Gemma3ForCausalLM"], "sliding_window": 20, "sliding_window_pattern": 2},
            id="windows",
            marks=SLOW,
        ),
        pytest.param(
            {"pipeline_parallel_size": 2, "tensor_parallel_size": 2, "enable_expert_parallel": True},
            {
                "architectures": ["Qwen3MoeForCausalLM"],
                "num_experts": 5,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 33,
                "mlp_only_layers": [3],
                "tie_word_embeddings": False,
            },
            id="experts",
            marks=SLOW,
        ),
    ],
)
def test_stages_of_other_models_and_sizes(tmp_path: Path, size: dict[str, Any], changes: dict[str, Any]) -> None:
    """Layers of several kinds, stages of unequal length, and stages that several ranks share."""
    folder = model_folder(tmp_path, num_hidden_layers=5, **changes)
    expected = streams(folder, topology="inline")
    assert len({*expected}) > 7
    assert streams(folder, **size) == expected


def everything(**sizes: Any) -> list[Any]:
    """Masks that come late, log-probabilities of output and prompt, penalties, stop strings, siblings, cached prefixes."""
    prompt = "Once upon a time there was a girl who lived in a house. " * 4
    params = [
        SamplingParams(seed=1, max_tokens=20, structured_outputs={"regex": "[a-z ]{8,20}"}),
        SamplingParams(seed=2, max_tokens=12, structured_outputs={"choice": ["perhaps later", "no"]}),
        SamplingParams(seed=3, max_tokens=20, logprobs=3, prompt_logprobs=2, presence_penalty=0.5),
        SamplingParams(seed=4, max_tokens=20, n=3, repetition_penalty=1.2, min_tokens=6),
        SamplingParams(seed=5, max_tokens=24, stop=["e "], bad_words=["the"]),
    ]
    with LLM("storyteller", dtype="float32", num_threads=1, max_num_batched_tokens=64, max_num_seqs=8, **sizes) as llm:
        first = llm.generate([prompt] * 5, params, use_tqdm=False)
        again = llm.generate([prompt] * 5, params, use_tqdm=False)
    assert sum(output.num_cached_tokens or 0 for output in again) > 0
    told = []
    for outputs in (first, again):
        for output in outputs:
            told += [(one.token_ids, one.text, one.finish_reason) for one in output.outputs]
    ranks = [
        {token: entry.rank for token, entry in at.items()} if at else None for at in first[2].prompt_logprobs or []
    ]
    return [told, ranks, [sorted(at) for at in first[2].outputs[0].logprobs or []]]


def test_what_only_the_last_stage_does() -> None:
    assert everything(pipeline_parallel_size=2) == everything(topology="inline")


def test_vectors_and_embeddings(tmp_path: Path) -> None:
    """The last stage pools, and the first one takes embeddings in the place of ids."""
    folder = model_folder(tmp_path)
    random = np.random.default_rng(1)
    prompts = [random.integers(0, 331, n).tolist() for n in (3, 40, 17)]
    rows = torch.tensor(random.standard_normal((9, 48)), dtype=torch.float32)
    found = []
    for sizes in ({"topology": "inline"}, {"pipeline_parallel_size": 2}):
        with LLM(folder, **arguments(runner="pooling", max_num_batched_tokens=32, **sizes)) as llm:
            vectors = llm.embed([{"prompt_token_ids": prompt} for prompt in prompts], use_tqdm=False)
        with LLM(folder, **arguments(enable_prompt_embeds=True, **sizes)) as llm:
            params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
            (output,) = llm.generate({"prompt_embeds": rows}, params, use_tqdm=False)
        found.append((np.array([v.outputs.embedding for v in vectors]), output.outputs[0].token_ids))
    np.testing.assert_allclose(found[1][0], found[0][0], rtol=1e-5, atol=1e-6)
    assert found[0][1] == found[1][1]


def test_what_was_sent_is_not_kept(tmp_path: Path) -> None:
    """A stage sends something in each step, and an engine runs for weeks."""
    with LLM(model_folder(tmp_path), **arguments(pipeline_parallel_size=2)) as llm:
        params = SamplingParams(max_tokens=30, ignore_eos=True)
        llm.generate([{"prompt_token_ids": [1, 2, 3]}] * 4, params, use_tqdm=False)
        kept = llm.collective_rpc("tests.model.pipeline.planted_worker:num_sent")
    assert max(kept) <= 2


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.parametrize(
    "victims",
    [
        ["worker0"],
        pytest.param(
            ["worker1", "scheduler"], marks=pytest.mark.slow(reason="two restarts; one death of each is enough")
        ),
    ],
)
async def test_the_death_of_a_stage_changes_no_token(victims: list[str]) -> None:
    """All stages are started again as a group, and every stream goes on."""
    params = [SamplingParams(seed=i, max_tokens=60, temperature=0.9, ignore_eos=True) for i in range(6)]
    prompts = [[10 + i, 20, 30 + i] for i in range(6)]
    engine = {"dtype": "float32", "num_threads": 1, "max_num_seqs": 8, "max_model_len": 128}
    with LLM("storyteller", topology="inline", **engine) as llm:
        expected = [o.outputs[0].token_ids for o in llm.generate(prompts, params, use_tqdm=False)]
    llm = AsyncLLM("storyteller", pipeline_parallel_size=2, **engine)
    found: dict[int, list[int]] = {}
    begun = anyio.Event()
    waiting = list(victims)

    async def follow(number: int) -> None:
        tokens: list[int] = []
        async for output in llm.generate(prompts[number], params[number]):
            tokens = list(output.outputs[0].token_ids)
            if len(tokens) > 5:
                begun.set()
            if waiting and number == 0 and len(tokens) > 10:
                os.kill(llm._engine.pids[waiting.pop()], signal.SIGKILL)
        found[number] = tokens

    with anyio.fail_after(90):
        async with anyio.create_task_group() as group:
            for number in range(6):
                group.start_soon(follow, number)
    assert [found[i] for i in range(6)] == [list(tokens) for tokens in expected]
    restarts = [llm.health().actors[name].num_restarts for name in ("worker0", "worker1", "scheduler")]
    assert restarts == ([1, 1, 0] if victims == ["worker0"] else [1, 1, 1])
    llm.shutdown()


async def test_with_on_failure_raise_a_stage_that_dies_is_named(tmp_path: Path) -> None:
    folder = model_folder(tmp_path)
    llm = AsyncLLM(folder, **arguments(pipeline_parallel_size=2, on_failure="raise"))
    stream = llm.generate([1, 2, 3], SamplingParams(max_tokens=200, ignore_eos=True))
    await stream.__anext__()
    os.kill(llm._engine.pids["worker1"], signal.SIGKILL)
    # The other stage fails of the broken connection: whichever is seen first.
    with pytest.raises(EngineDeadError, match=r"worker1|worker0 failed.*Connection"):
        async for _ in stream:
            pass
    llm.shutdown()
    assert llm._engine.pids == {}


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"pipeline_parallel_size": 0}, "pipeline_parallel_size=0 must be a positive integer"),
        ({"pipeline_parallel_size": True}, "pipeline_parallel_size=True must be a positive integer"),
        ({"pipeline_parallel_size": 5}, "the model has 4 layers.*use 4 or less"),
        ({"pipeline_parallel_size": 65}, "65 is more than the 64 stages that an engine may have"),
        ({"pipeline_layer_partition": [1, 1, 2]}, "has 3 stages, and pipeline_parallel_size=2"),
        ({"pipeline_layer_partition": [1, 2]}, r"\[1, 2\] adds up to 3 layers, and the model has 4"),
        ({"pipeline_layer_partition": "0,4"}, "give each stage one layer at least"),
        ({"pipeline_layer_partition": "1;3"}, "must be a list of numbers of layers"),
        ({"topology": "inline"}, "needs a process per stage; use topology='process'"),
        ({"enable_lora": True}, "is not supported with enable_lora=True yet"),
        ({"batch_invariant": True}, "is not supported with batch_invariant=True yet"),
        (
            {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}},
            "is not supported with speculative_config=.* yet; leave one of them out",
        ),
        ({"model_impl": "transformers"}, "modules of transformers are not cut into stages"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(given: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        EngineConfig.from_arguments("storyteller", **({"pipeline_parallel_size": 2} | given))


def test_what_runs_through_transformers_is_not_cut() -> None:
    config = EngineConfig.from_arguments("storyteller", model_impl="transformers")
    _, hf = read_model_folder(config.model.path)
    with pytest.raises(UnsupportedModelError, match="pipeline_parallel_size=2: only models with a fused forward"):
        check_shares(model_plan(config.model, hf, CpuRunner), config.model, 1, 2)


@pytest.mark.parametrize(
    ("layers", "size", "head", "expected"),
    [
        (4, 2, 0.0, (2, 2)),
        (5, 2, 0.0, (3, 2)),
        (8, 3, 0.0, (2, 3, 3)),
        (30, 4, 0.0, (7, 8, 8, 7)),
        (3, 3, 9.0, (1, 1, 1)),
        (28, 2, 9.9, (19, 9)),
        (4, 2, 1.4, (3, 1)),
        (7, 1, 5.0, (7,)),
    ],
)
def test_stages_take_about_as_long_as_each_other(
    layers: int, size: int, head: float, expected: tuple[int, ...]
) -> None:
    assert balanced(layers, size, head) == expected


@given(st.integers(1, 40), st.integers(1, 8), st.floats(0, 50))
def test_no_other_split_has_a_faster_slowest_stage(num_layers: int, size: int, head: float) -> None:
    size = min(size, num_layers, 4)
    layers = balanced(num_layers, size, head)
    assert (sum(layers), len(layers)) == (num_layers, size)
    assert min(layers) > 0

    def slowest(split: tuple[int, ...]) -> float:
        return max(*split[:-1], split[-1] + head, 0)

    cuts = combinations(range(1, num_layers), size - 1)
    others = (tuple(b - a for a, b in pairwise((0, *cut, num_layers))) for cut in islice(cuts, 2000))
    assert all(slowest(layers) <= slowest(other) for other in others)


def test_the_head_is_counted_in_layers() -> None:
    qwen = {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
    }
    assert head_in_layers(qwen) == pytest.approx(151936 * 1024 / (1024 * (2 * 128 * 24 + 3 * 3072)))
    latent = {
        "vocab_size": 1000, "hidden_size": 64, "num_attention_heads": 4, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64, "v_head_dim": 128, "intermediate_size": 100,
    }  # fmt: skip
    assert head_in_layers(latent) == pytest.approx(1000 / (512 + 4 * (192 + 128) + 300))
    assert head_in_layers(qwen | {"vocab_size": "many"}) == head_in_layers({}) == 0.0


def test_a_configuration_with_stages_survives_json() -> None:
    config = EngineConfig.from_arguments("storyteller", pipeline_parallel_size=2, pipeline_layer_partition=[3, 1])
    again = EngineConfig.from_json(config.to_json())
    assert again.stages == (3, 1)
    assert (again.world_size, again.tensor_size, again.reporting_rank, again.num_lanes) == (2, 1, 1, 2)
    assert again.parallel_config.pipeline_parallel_size == 2


async def test_a_stage_may_take_as_long_as_those_before_it_besides() -> None:
    """It waits for them within its step. If one of them is stuck, that one is to be found first."""
    found = []
    for stage in range(3):
        worker = WorkerActor(f"worker{stage}", stage)
        worker.heartbeat, worker._stage = Heartbeat.of_thread(), stage

        async def compute(link: Any, plan: StepPlan, worker: WorkerActor = worker) -> None:
            assert worker.heartbeat is not None
            found.append(worker.heartbeat.read().budget_s)

        worker._compute = compute  # type: ignore[method-assign]
        await worker._step(SimpleNamespace(), StepPlan(step=1))  # type: ignore[arg-type]
    assert found == [NEW_BUDGET_S, 2 * NEW_BUDGET_S, 3 * NEW_BUDGET_S]


@pytest.mark.parametrize(
    "mistake",
    [
        "WrongTokens",
        pytest.param("WrongRows", marks=pytest.mark.slow(reason="the same with states; one mistake is quick")),
    ],
)
def test_a_planted_mistake_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mistake: str) -> None:
    """The negative control."""

    def planted(config: EngineConfig) -> Topology:
        topology = engine_topology(config)
        path = f"tests.model.pipeline.planted_worker:{mistake}"
        actors = [replace(a, path=path) if a.name.startswith("worker") else a for a in topology.actors]
        return replace(topology, actors=tuple(actors))

    folder = model_folder(tmp_path)
    expected = streams(folder, topology="inline")
    monkeypatch.setattr(actorllm.client.engine_supervisor, "engine_topology", planted)
    found = streams(folder, pipeline_parallel_size=2)
    assert sum(one != other for one, other in zip(found, expected, strict=True)) > 5
