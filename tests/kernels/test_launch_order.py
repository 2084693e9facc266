"""A whole model from these kernels, launched in the order of the GPU worker, gives the tokens of the CPU worker.

Prompts in two chunks, then decode steps that never look at a token on the host: the state table carries it from step to step.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from actorllm.config import EngineConfig
from actorllm.model.runner import ModelRunner
from actorllm_kernels.attn_combine import attn_combine
from actorllm_kernels.attn_decode import attn_decode
from actorllm_kernels.attn_prefill import attn_prefill, query_tiles
from actorllm_kernels.embed import embed
from actorllm_kernels.lm_head_sample import lm_head_sample
from actorllm_kernels.plan_decode import plan_decode
from actorllm_kernels.qknorm_rope_kv import qknorm_rope_kv
from actorllm_kernels.rmsnorm import rmsnorm
from actorllm_kernels.sample_pick import Offers, SamplingState, sample_pick
from actorllm_kernels.silu_mul import activation_mul
from actorllm_kernels.skinny_gemm import skinny_gemm
from actorllm_kernels.step_prep import step_prep
from tests.model.driver import Driver

HIDDEN, HEADS, KV_HEADS, DIM, LAYERS, VOCAB, EPS = 64, 4, 2, 32, 2, 300, 1e-6
PAGE, TILE, PROGRAMS = 32, 16, 3
PROMPTS = {1: 5, 4: 33, 2: 20}
"""Slot and length."""
NUM_STEPS = 5
PARAMETERS = {1: (0.0, 11), 4: (0.8, 2**63 + 5), 2: (1.2, 7)}
"""Temperature and seed."""

I32, I64 = torch.int32, torch.int64


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=96,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=DIM,
        rms_norm_eps=EPS,
        max_position_embeddings=128,
        tie_word_embeddings=False,
    )
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.2)
    model.save_pretrained(tmp_path)
    return tmp_path


def cpu_worker(folder: Path, prompts: dict[int, list[int]]) -> dict[int, list[int]]:
    """The tokens of every slot, its prompt first."""
    config = EngineConfig.from_arguments(
        folder, block_size=16, skip_tokenizer_init=True, num_threads=1, dtype="float32"
    )
    runner = ModelRunner(config, show_progress=False)
    runner.load()
    runner.allocate(64)
    driver = Driver(runner)
    for slot, tokens in prompts.items():
        driver.add(slot, tokens, temperature=PARAMETERS[slot][0], seed=PARAMETERS[slot][1])
    driver.step(prefill={slot: len(tokens) for slot, tokens in prompts.items()})
    for step in range(NUM_STEPS):
        driver.step(decode=list(prompts) if step == 0 else None)
    return {slot: request.tokens for slot, request in driver.requests.items()}


@dataclass
class GPU:
    """What the GPU worker keeps on the device: weights, cache, state table."""

    weights: dict[str, torch.Tensor]

    def __post_init__(self) -> None:
        frequencies = 10000.0 ** (-torch.arange(0, DIM, 2).float() / DIM)
        angles = torch.outer(torch.arange(128.0), frequencies)
        self.cos, self.sin = angles.cos(), angles.sin()
        self.pool = torch.zeros(LAYERS, 16, 2, KV_HEADS, PAGE, DIM)
        self.table = torch.arange(15, 0, -1, dtype=I32).view(5, 3).contiguous()
        self.num_computed, self.last_token = torch.zeros(5, dtype=I32), torch.zeros(5, dtype=I32)
        self.state = SamplingState(
            torch.zeros(5),
            torch.zeros(5, dtype=I64),
            torch.zeros(5, dtype=I32),
            torch.zeros(5, dtype=I32),
            self.last_token,
        )
        for slot, (temperature, seed) in PARAMETERS.items():
            self.state.temperature[slot] = temperature
            self.state.seed[slot] = torch.from_numpy(np.array([seed], np.uint64).view(np.int64))[0]

    def layer(self, i: int) -> dict[str, torch.Tensor]:
        prefix = f"model.layers.{i}."
        found = {name.removeprefix(prefix): tensor for name, tensor in self.weights.items() if name.startswith(prefix)}
        qkv = torch.cat([found[f"self_attn.{name}_proj.weight"] for name in "qkv"])
        return found | {"qkv": qkv, "gate_up": torch.cat([found[f"mlp.{name}_proj.weight"] for name in ("gate", "up")])}

    def write_kv(self, i: int, qkv: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        weights, q = self.layer(i), torch.empty(len(qkv), HEADS, DIM)
        norms = (weights["self_attn.q_norm.weight"], weights["self_attn.k_norm.weight"])
        keys, values = self.pool[i].unbind(1)
        qknorm_rope_kv(qkv, positions, slots, self.cos, self.sin, q, keys, values, norms, EPS)
        return q

    def prefill(self, slots: list[int], chunks: list[list[int]]) -> torch.Tensor:
        """The hidden states of the last token of every chunk."""
        counts = np.array([len(chunk) for chunk in chunks], np.int32)
        rows = torch.tensor(slots, dtype=I32)
        history = self.num_computed[rows].numpy()
        seq_lens = history + counts
        positions = np.concatenate([np.arange(a, b) for a, b in zip(history, seq_lens, strict=True)])
        blocks = self.table[np.repeat(slots, counts), positions // PAGE].numpy().astype(np.int64)
        kv_slots = torch.from_numpy(blocks * PAGE + positions % PAGE)
        starts = torch.from_numpy(np.concatenate(([0], counts.cumsum())).astype(np.int32))
        tiles = torch.from_numpy(query_tiles(counts, seq_lens, 32 // (HEADS // KV_HEADS)))
        ids = torch.tensor([token for chunk in chunks for token in chunk], dtype=I32)
        h, where = torch.empty(len(ids), HIDDEN), torch.from_numpy(positions.astype(np.int32))
        embed(ids, self.weights["model.embed_tokens.weight"], h)
        delta = None
        for i in range(LAYERS):
            w, x = self.layer(i), torch.empty_like(h)
            if delta is None:
                rmsnorm(h, w["input_layernorm.weight"], EPS, x)
            else:
                rmsnorm(delta, w["input_layernorm.weight"], EPS, x, h)
            q = self.write_kv(i, x @ w["qkv"].T, where, kv_slots)
            out = torch.empty_like(q)
            keys, values = self.pool[i].unbind(1)
            attn_prefill(
                q, keys, values, rows, self.table, torch.from_numpy(seq_lens), starts, tiles, out, DIM**-0.5,
                block_m=32, tile=TILE,
            )  # fmt: skip
            rmsnorm(
                out.view(len(ids), -1) @ w["self_attn.o_proj.weight"].T, w["post_attention_layernorm.weight"], EPS, x, h
            )
            middle = torch.empty(len(ids), w["mlp.down_proj.weight"].shape[1])
            activation_mul(x @ w["gate_up"].T, middle)
            delta = middle @ w["mlp.down_proj.weight"].T
        assert delta is not None
        self.num_computed[rows] = torch.from_numpy(seq_lens)
        return (h + delta)[starts[1:].long() - 1].contiguous()

    def sample(self, h: torch.Tensor, rows: torch.Tensor) -> list[int]:
        offers = Offers.empty(len(rows), VOCAB, h.device)
        tokens, is_finite = torch.empty(len(rows), dtype=I32), torch.empty(len(rows), dtype=I32)
        lm_head_sample(
            h, self.weights["lm_head.weight"], rows, self.state, offers, norm=self.weights["model.norm.weight"], eps=EPS
        )
        sample_pick(offers, rows, self.state, tokens, is_finite)
        assert is_finite.all()
        return tokens.tolist()

    def decode(self, rows: torch.Tensor) -> list[int]:
        """One step as the graph has it: only `rows` comes from the host."""
        count = len(rows)
        ids, positions, seq_lens, kv_slots = (torch.empty(count, dtype=kind) for kind in (I32, I32, I32, I64))
        ends, quota = torch.empty(count + 1, dtype=I32), torch.empty(1, dtype=I32)
        h, middle = torch.empty(count, HIDDEN), torch.empty(count, 96)
        qkv, out = torch.empty(count, (HEADS + 2 * KV_HEADS) * DIM), torch.empty(count, HEADS, DIM)
        partials, partial_lse = (torch.empty(2 * PROGRAMS, 2, *shape) for shape in ((DIM,), ()))
        step_prep(rows, self.last_token, self.num_computed, self.table, PAGE, ids, positions, kv_slots, seq_lens)
        plan_decode(seq_lens, ends, quota, PROGRAMS, KV_HEADS, tile=TILE)
        embed(ids, self.weights["model.embed_tokens.weight"], h)
        for i in range(LAYERS):
            w = self.layer(i)
            keys, values = self.pool[i].unbind(1)
            skinny_gemm(h, w["qkv"], qkv, norm=w["input_layernorm.weight"], eps=EPS)
            q = self.write_kv(i, qkv, positions, kv_slots)
            attn_decode(
                q, keys, values, rows, self.table, seq_lens, ends, quota, out, partials, partial_lse, DIM**-0.5,
                programs=PROGRAMS, tile=TILE,
            )  # fmt: skip
            attn_combine(out, partials, partial_lse, ends, quota, KV_HEADS)
            skinny_gemm(out.view(count, -1), w["self_attn.o_proj.weight"], h, residual=h)
            skinny_gemm(h, w["gate_up"], middle, norm=w["post_attention_layernorm.weight"], eps=EPS, activation="silu")
            skinny_gemm(middle, w["mlp.down_proj.weight"], h, residual=h)
        return self.sample(h, rows)


@pytest.mark.timeout(200)
def test_the_tokens_are_those_of_the_cpu_worker(folder: Path) -> None:
    from safetensors.torch import load_file

    rng = np.random.default_rng(1)
    prompts = {slot: rng.integers(0, VOCAB, length).tolist() for slot, length in PROMPTS.items()}
    expected = cpu_worker(folder, prompts)

    gpu = GPU(load_file(folder / "model.safetensors"))
    slots = list(prompts)
    gpu.prefill(slots, [prompts[slot][:4] for slot in slots])
    first = gpu.sample(gpu.prefill(slots, [prompts[slot][4:] for slot in slots]), torch.tensor(slots, dtype=I32))
    outputs = {slot: [token] for slot, token in zip(slots, first, strict=True)}
    rows = torch.tensor([slots[0], -1, *slots[1:]], dtype=I32)
    for _ in range(NUM_STEPS):
        for slot, token in zip(rows.tolist(), gpu.decode(rows), strict=True):
            if slot >= 0:
                outputs[slot].append(token)
    assert {slot: prompts[slot] + tokens for slot, tokens in outputs.items()} == expected
