"""Several ranks compute one model together: the same streams as one rank, and errors that say what does not fit."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
from safetensors.torch import save_file

import actorllm.client.engine_supervisor
from actorllm import LLM, AsyncLLM, EngineDeadError, SamplingParams
from actorllm.actors.topology import Topology, engine_topology
from actorllm.config import ARGUMENTS, EngineConfig, read_model_folder
from actorllm.errors import ConfigError, CorruptModelError, RequestFailedError, UnsupportedModelError
from actorllm.model.cpu.decoder import Decoder
from actorllm.model.cpu.draft_heads.ends import ends_of
from actorllm.model.cpu.draft_model import DraftModel
from actorllm.model.cpu.experts import Experts
from actorllm.model.cpu.runner import CpuRunner
from actorllm.model.families.decoder_config import DecoderConfig
from actorllm.model.families.tensors import DecoderTensors
from actorllm.model.parallel import CONNECT_TIMEOUT_S, HeadShare, Ranks
from actorllm.model.registry import check_shares, decoder_config, model_plan
from actorllm.model.weights import CheckpointWeights, DummyWeights
from actorllm.types.weight_version import WeightSource
from tests.api.knowing_drafter import STREAMS
from tests.model.hf.decoders import save
from tests.model.ranks import SHAPE, arguments, model_folder, requests, streams
from tests.model.torn_worker import BLINDS, HANGS, RAISES, RAISES_BEFORE


@pytest.mark.parametrize(
    ("sizes", "changes"),
    [
        ((2, 4), {}),
        ((2,), {"architectures": ["LlamaForCausalLM"], "mlp_bias": True, "attention_bias": True}),
        pytest.param(
            (4,),
            {"architectures": ["Olmo2ForCausalLM"], "attention_bias": True},
            marks=pytest.mark.slow(reason="ranks as processes; two families stand for all"),
        ),
        pytest.param(
            (2,),
            {"architectures": ["Gemma3ForCausalLM"], "sliding_window": 20, "sliding_window_pattern": 2},
            marks=pytest.mark.slow(reason="ranks as processes; two families stand for all"),
        ),
        pytest.param(
            (2,),
            {"architectures": ["Phi3ForCausalLM"]},
            marks=pytest.mark.slow(reason="ranks as processes; two families stand for all"),
        ),
        pytest.param(
            (2,),
            {
                "architectures": ["Qwen3MoeForCausalLM"],
                "num_experts": 5,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 33,
            },
            marks=pytest.mark.slow(reason="ranks as processes; two families stand for all"),
        ),
    ],
    ids=["qwen3", "llama", "olmo2", "gemma3", "phi3", "qwen3-moe"],
)
def test_several_ranks_give_the_streams_of_one(tmp_path: Path, sizes: tuple[int, ...], changes: dict[str, Any]) -> None:
    """More ranks than key heads, a vocabulary and an MLP that do not divide evenly, biases that must be added once."""
    folder = model_folder(tmp_path, **changes)
    expected = streams(folder, topology="inline")
    assert len({*expected}) == len(expected)
    for size in sizes:
        assert streams(folder, tensor_parallel_size=size) == expected


def test_ranks_check_the_drafts_of_the_first_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some are right, some are not; penalties remember each token on every rank."""
    folder = model_folder(tmp_path)
    prompts, params = requests()
    params[2] = SamplingParams(
        temperature=0.9, seed=2, max_tokens=24, ignore_eos=True, presence_penalty=0.7, logprobs=2
    )
    with LLM(folder, **arguments(topology="inline")) as llm:
        expected = [list(o.outputs[0].token_ids) for o in llm.generate(prompts, params, use_tqdm=False)]
    file = tmp_path / "streams.json"
    file.write_text(json.dumps(list(zip(prompts, expected, strict=True))))
    monkeypatch.setenv(STREAMS, str(file))
    drafts = {
        "method": "tests.api.knowing_drafter:KnowingDrafter",
        "num_speculative_tokens": 3,
        "num_speculative_tokens_per_batch_size": [[1, 100, 3]],
    }
    with LLM(folder, **arguments(tensor_parallel_size=2, speculative_config=drafts)) as llm:
        found = [list(o.outputs[0].token_ids) for o in llm.generate(prompts, params, use_tqdm=False)]
        counted = llm.stats()["scheduler"]["scheduler"]["speculation"]
    assert found == expected
    assert 20 < counted["num_accepted_tokens"] < counted["num_draft_tokens"]


@pytest.mark.parametrize("method", ["draft_model", "eagle3"])
def test_a_model_of_the_first_rank_drafts_for_all(tmp_path: Path, method: str) -> None:
    """The target itself is always right, but where rounding decides; a head with random weights is wrong as with one rank."""
    folder = model_folder(tmp_path)
    drafting = folder
    if method == "eagle3":  # it shares embedding and logits with the target
        (tmp_path / "head").mkdir()
        drafting = model_folder(tmp_path / "head", num_hidden_layers=1, eagle_aux_hidden_state_layer_ids=[0, 1, 2])
    drafts = {
        "method": method,
        "model": str(drafting),
        "num_speculative_tokens": 3,
        "num_speculative_tokens_per_batch_size": [[1, 100, 3]],
    }
    prompts, params = requests()

    def run(**changes: Any) -> tuple[list[list[int]], dict[str, Any]]:
        with LLM(folder, **arguments(**changes)) as llm:
            found = [list(o.outputs[0].token_ids) for o in llm.generate(prompts, params, use_tqdm=False)]
            return found, llm.stats()["scheduler"]["scheduler"]["speculation"]

    expected, _ = run(topology="inline")
    alone, with_one = run(topology="inline", speculative_config=drafts)
    together, with_two = run(tensor_parallel_size=2, speculative_config=drafts)
    assert alone == together == expected
    for name in ("num_draft_tokens", "num_accepted_tokens"):
        assert with_two[name] == pytest.approx(with_one[name], rel=0.1, abs=5)
    if method == "draft_model":
        assert with_two["num_accepted_tokens"] > 0.8 * with_two["num_draft_tokens"] > 100
    else:
        assert with_two["num_draft_tokens"] > 50


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_word_embeddings": False},
        {"architectures": ["Gemma3ForCausalLM"], "sliding_window": 20, "sliding_window_pattern": 2},
    ],
    ids=["tied", "a head of its own", "scaled"],
)
def test_a_head_that_drafts_has_the_whole_vocabulary(tmp_path: Path, changes: dict[str, Any]) -> None:
    folder = model_folder(tmp_path, **changes)
    runner = CpuRunner(EngineConfig.from_arguments(folder, **arguments(topology="inline")))
    runner.load()
    whole = runner.decoder
    assert isinstance(whole, Decoder)
    model = runner.config.model
    assert ends_of(whole, model, False) is whole
    whole.ranks = Ranks(0, 2)
    ends = ends_of(whole, model, False)
    whole.ranks = Ranks()
    ids, states = torch.tensor([0, 5, 330]), torch.randn(3, 48)
    assert torch.equal(ends.embed(ids), whole.embed(ids))
    assert torch.equal(ends.logits(states), whole.logits(states))
    assert torch.equal(ends.embedding, whole.embedding)
    assert ends.norm is whole.norm


def test_what_an_update_has_for_a_head_that_drafts_is_no_view_of_its_file(tmp_path: Path) -> None:
    """The file is unmapped, and its memory given back, though the engine runs for weeks."""
    runner = CpuRunner(EngineConfig.from_arguments(model_folder(tmp_path), **arguments(topology="inline")))
    runner.load()
    whole = runner.decoder
    assert isinstance(whole, Decoder)
    tensor = torch.randn(331, 48)
    file = tmp_path / "update.safetensors"
    save_file({"model.embed_tokens.weight": tensor}, file)
    whole.ranks = Ranks(0, 2)
    source = WeightSource("1", "an update", overlays=(str(file),))
    ends = ends_of(whole, replace(runner.config.model, weights=source), False)
    assert torch.equal(ends.embedding, tensor)
    assert str(file) not in Path("/proc/self/maps").read_text()


@pytest.mark.parametrize("fails", [False, True])
def test_the_other_ranks_wait_long_for_a_model_that_the_first_one_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    """A collective would give up before a large draft model is read. An error is none of their waiting."""
    told: list[Any] = []

    class Sent:
        def wait(self, timeout: timedelta) -> None:
            told.append(timeout)

    def load(self: DraftModel, *_: Any) -> None:
        told.append("loaded")
        if fails:
            raise CorruptModelError("broken")

    monkeypatch.setattr(torch.distributed, "isend", lambda _, to, group: told.append(to))
    monkeypatch.setattr(torch.distributed, "irecv", lambda _, by, group: told.append(by) or Sent())
    monkeypatch.setattr(DraftModel, "load", load)
    monkeypatch.setattr(Ranks, "agree", lambda _, found: found)  # about how to compute, which is another wait
    drafts = {"method": "draft_model", "model": str(model_folder(tmp_path)), "num_speculative_tokens": 3}
    config = EngineConfig.from_arguments(tmp_path, **arguments(tensor_parallel_size=2, speculative_config=drafts))
    for rank in range(2):
        monkeypatch.setattr(Ranks, "connect", lambda _, rank: Ranks(rank, 2))
        runner = CpuRunner(config, rank, show_progress=False)
        with pytest.raises(CorruptModelError) if fails and not rank else contextlib.nullcontext():
            runner.load()
    assert told[:3] == ["loaded", 1, 0]
    assert told[3] > timedelta(seconds=10 * CONNECT_TIMEOUT_S)
    assert len(told) == 4


@pytest.mark.slow(reason="ranks as processes; two families stand for all")
@pytest.mark.parametrize(
    "changes",
    [
        {
            "architectures": ["Qwen3MoeForCausalLM"],
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 33,
        },
        {"architectures": ["GptOssForCausalLM"], "num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 20}
        | {"tie_word_embeddings": False},
    ],
    ids=["qwen3-moe", "gpt-oss"],
)
def test_experts_are_shared_out_by_tensor_or_whole(tmp_path: Path, changes: dict[str, Any]) -> None:
    folder = model_folder(tmp_path, **changes)
    expected = streams(folder, topology="inline")
    assert len({*expected}) == len(expected)
    for is_whole in (False, True):
        assert streams(folder, tensor_parallel_size=2, enable_expert_parallel=is_whole) == expected


@pytest.mark.parametrize("name", ["qwen3-moe", "mixtral", "gpt-oss"])
def test_ranks_hold_whole_experts_and_all_of_them(tmp_path: Path, name: str) -> None:
    """What two ranks compute adds up to the product of one; each reads a half of the experts."""
    save(name, tmp_path, max_position_embeddings=256)
    shape = json.loads((tmp_path / "config.json").read_text())
    config = decoder_config(shape["architectures"][0], shape)
    x = torch.randn(9, config.hidden_size, generator=torch.Generator().manual_seed(1))
    found = []
    for ranks in (Ranks(), *(Ranks(rank, 2, has_whole_experts=True) for rank in range(2))):
        with torch.inference_mode(), CheckpointWeights(tmp_path, torch.float32, show_progress=False) as weights:
            tensors = DecoderTensors(config, weights, ranks)
            experts = tensors.layer(0).experts
            assert experts is not None
            assert config.experts is not None
            found.append(Experts(config.experts, experts, torch.nn.functional.silu))
            tensors.embedding(), tensors.norm(), tensors.head(), tensors.layer(1)
            list(tensors.layer(1).experts or ())
            tensors.close()
    whole, *halves = found
    assert sum(len(half.experts) for half in halves) == len(whole.experts)
    torch.testing.assert_close(halves[0](x) + halves[1](x), whole(x), rtol=1e-5, atol=1e-5)


def test_an_owner_that_is_killed_while_ranks_meet_leaves_no_file(tmp_path: Path) -> None:
    """One rank is kept from coming, the other one waits, and the owner dies."""
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    program = f"import sys; from actorllm import LLM; LLM(sys.argv[1], **{arguments(tensor_parallel_size=2)!r})"
    command = [sys.executable, "-c", program, str(model_folder(tmp_path))]
    environment = os.environ | {"TMPDIR": str(temporary), "PYTHONPATH": os.pathsep.join(sys.path)}

    def named(name: str) -> int | None:
        for children in Path(f"/proc/{owner.pid}/task").glob("*/children"):
            with contextlib.suppress(FileNotFoundError):  # a thread, or a child, that is gone already
                for pid in children.read_text().split():
                    if Path(f"/proc/{pid}/comm").read_text() == f"actor:{name}\n":
                        return int(pid)
        return None

    def files() -> list[Path]:
        """Where ranks may have left word: in the folder for such files, or in a file that only the owner has."""
        found = list(temporary.glob("actorllm-*"))
        for fd in Path(f"/proc/{owner.pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):
                if "actorllm-rendezvous" in os.readlink(fd):
                    found.append(fd)
        return found

    with subprocess.Popen(command, env=environment) as owner:
        try:
            while (last := named("worker1")) is None:
                assert owner.poll() is None
                time.sleep(0.005)
            os.kill(last, signal.SIGSTOP)
            while not any(path.stat().st_size for path in files()):
                assert owner.poll() is None
                time.sleep(0.01)
        finally:
            owner.kill()
    assert list(temporary.glob("actorllm-*")) == []


def test_grammars_and_cached_prefixes_with_two_ranks() -> None:
    """A mask comes late, and to both; what is found in the cache is a half of each block at either."""
    prompt = "Once upon a time there was a girl who lived in a house. " * 4
    grammars = [{"regex": "[a-z ]{8,20}"}, {"choice": ["perhaps later", "no"]}, None]
    params = [SamplingParams(seed=i, max_tokens=24, structured_outputs=grammar) for i, grammar in enumerate(grammars)]
    told = []
    for ranks in ({"topology": "inline"}, {"tensor_parallel_size": 2}):
        with LLM("storyteller", dtype="float32", num_threads=1, **ranks) as llm:
            first = llm.generate([prompt] * 3, params, use_tqdm=False)
            again = llm.generate([prompt] * 3, params, use_tqdm=False)
        assert all(output.num_cached_tokens for output in again)
        assert [o.outputs[0].token_ids for o in again] == [o.outputs[0].token_ids for o in first]
        told.append([(o.outputs[0].token_ids, o.outputs[0].text, o.outputs[0].finish_reason) for o in again])
    assert told[0] == told[1]
    assert told[0][1][1] in ("perhaps later", "no")


def test_logits_in_chunks_and_bfloat16(tmp_path: Path) -> None:
    folder = model_folder(tmp_path, vocab_size=150_000, num_hidden_layers=1)
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=2, ignore_eos=True)  # of a prompt, and of a decode step
    prompts = [[i + 1] * 5 for i in range(120)]  # more logits than MAX_LOGITS_BYTES
    results = []
    for ranks in ({"topology": "inline"}, {"tensor_parallel_size": 2}):
        with LLM(folder, **arguments(**ranks, max_num_seqs=120)) as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False)
        results.append([tuple(o.outputs[0].token_ids) for o in outputs])
    assert results[0] == results[1]
    with LLM(model_folder(tmp_path), **arguments(tensor_parallel_size=2, dtype="bfloat16")) as llm:
        (output,) = llm.generate([[5, 6, 7]], params, use_tqdm=False)
        assert len(output.outputs[0].token_ids) == 2


async def test_the_death_of_any_rank_ends_every_stream(tmp_path: Path) -> None:
    llm = AsyncLLM(model_folder(tmp_path), **arguments(tensor_parallel_size=2, on_failure="raise"))
    stream = llm.generate([1, 2, 3], SamplingParams(max_tokens=200, ignore_eos=True))
    await stream.__anext__()
    os.kill(llm._engine.pids["worker1"], signal.SIGKILL)
    with pytest.raises(EngineDeadError, match="worker1"):
        async for _ in stream:
            pass
    llm.shutdown()


def torn(config: EngineConfig) -> Topology:
    topology = engine_topology(config)
    actors = [
        replace(a, path="tests.model.torn_worker:TornWorkerActor") if a.name.startswith("worker") else a
        for a in topology.actors
    ]
    return replace(topology, actors=tuple(actors))


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_ranks_find_out_together_that_nothing_is_finite_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every rank looks after the same step, and all are replaced; a request that breaks them twice is to blame."""
    monkeypatch.setattr(actorllm.client.engine_supervisor, "engine_topology", torn)
    llm = AsyncLLM(model_folder(tmp_path), **arguments(tensor_parallel_size=2))
    params = SamplingParams(max_tokens=8, ignore_eos=True, temperature=0.0)
    expected = (await llm.complete([1, 2, 3], params)).outputs[0].token_ids
    told = r"ran this request alone; the last time worker[01] failed with EngineError: no step"
    with pytest.raises(RequestFailedError, match=told):
        await llm.complete([1, BLINDS, 3], params)
    assert (await llm.complete([1, 2, 3], params)).outputs[0].token_ids == expected
    health = llm.health()
    assert [health.actors[name].num_restarts for name in ("worker0", "worker1", "scheduler")] == [2, 2, 0]
    llm.shutdown()


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.parametrize(
    ("token", "expected"),
    [
        (RAISES, r"worker1 failed with RuntimeError: planted between two collectives"),
        (RAISES_BEFORE, r"worker1 failed with RuntimeError: planted before the collectives"),
        pytest.param(
            HANGS,
            r"worker[01] was killed because it was stuck: step \d+ ran for",
            marks=pytest.mark.slow(reason="a step has to be stuck for seconds before it is killed"),
        ),
    ],
)
async def test_a_rank_that_leaves_the_others_in_a_collective_is_the_one_that_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, token: int, expected: str
) -> None:
    """The others wait for it where nobody can call them back; they are killed with it, and it is its error that counts."""
    monkeypatch.setattr(actorllm.client.engine_supervisor, "engine_topology", torn)
    final = {"on_failure": "raise"} if "on_failure" in ARGUMENTS else {}
    llm = AsyncLLM(model_folder(tmp_path), **arguments(tensor_parallel_size=2, step_timeout_s=2, **final))
    with anyio.fail_after(30), pytest.raises(EngineDeadError, match=expected):
        async for _ in llm.generate([1, token, 3], SamplingParams(max_tokens=200, ignore_eos=True)):
            pass
    llm.shutdown()
    assert llm._engine.pids == {}


@pytest.mark.parametrize(("size", "possible"), [(3, "1, 2, 4, 8"), (16, "1, 2, 4, 8")])
def test_heads_that_cannot_be_shared_out(tmp_path: Path, size: int, possible: str) -> None:
    with pytest.raises(ConfigError, match=rf"tensor_parallel_size={size}.*possible are {possible}"):
        LLM(model_folder(tmp_path), **arguments(tensor_parallel_size=size))


def test_what_runs_through_transformers_is_not_shared_out() -> None:
    config = EngineConfig.from_arguments("storyteller", model_impl="transformers", tensor_parallel_size=2)
    _, hf = read_model_folder(config.model.path)
    words = "tensor_parallel_size=2: only models with a fused forward .* runs through transformers; set tensor_parallel_size=1"
    with pytest.raises(UnsupportedModelError, match=words):
        check_shares(model_plan(config.model, hf, CpuRunner), config.model, 2)


@pytest.mark.parametrize("size", [0, -1, "2", 1.5])
def test_a_size_that_is_none(size: Any) -> None:
    with pytest.raises(ConfigError, match="tensor_parallel_size"):
        EngineConfig.from_arguments("storyteller", tensor_parallel_size=size)


def test_the_inline_topology_has_one_rank() -> None:
    with pytest.raises(ConfigError, match="topology='process'"):
        EngineConfig.from_arguments("storyteller", tensor_parallel_size=2, topology="inline")


@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 2), (8, 8), (12, 4), (4, 1)])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_every_query_head_is_with_its_key_head(heads: int, kv_heads: int, size: int) -> None:
    config = DecoderConfig.from_hugging_face(SHAPE | {"num_attention_heads": heads, "num_key_value_heads": kv_heads})
    seen = []
    for rank in range(size):
        share = HeadShare(config.num_heads, config.num_kv_heads, config.head_dim, Ranks(rank, size))
        fold = share.num_heads // share.num_kv_heads
        for i, head in enumerate(range(share.heads.start, share.heads.stop)):
            seen.append(head)
            assert head // (heads // kv_heads) == share.kv_heads.start + i // fold
    assert seen == list(range(heads))


def test_parts_of_a_tensor_are_parts_of_the_whole() -> None:
    weights = DummyWeights(0, torch.float32)
    whole = weights.take("model.layers.0.mlp.down_proj.weight", 6, 10)
    assert torch.equal(weights.take("model.layers.0.mlp.down_proj.weight", 6, 10, rows=slice(1, 4)), whole[1:4])
    assert torch.equal(weights.take("model.layers.0.mlp.down_proj.weight", 6, 10, columns=slice(2, 9)), whole[:, 2:9])
