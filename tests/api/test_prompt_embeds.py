"""Prompts given as embeddings: what the model's own rows give is what their ids give, and any others what transformers does."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM

import actorllm
from actorllm import LLM, AsyncLLM, EmbedsPrompt, LLMEngine, SamplingParams
from actorllm.config import EngineConfig
from actorllm.errors import ActorLLMError, ConfigError, InvalidParameterError, InvalidPromptError
from tests.model.hf.decoders import prompt as token_ids
from tests.model.hf.decoders import save

STORYTELLER = Path(actorllm.__file__).parent / "bundled" / "storyteller"
WIDTH = 256
TEXT = "Once upon a time there was a little fox who lived in a large and very dark wood with his mother and a bear. "
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
RANDOM = SamplingParams(temperature=0.9, seed=5, max_tokens=24, ignore_eos=True, n=2)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def table() -> torch.Tensor:
    """The embeddings of all ids."""
    with safe_open(STORYTELLER / "model.safetensors", "pt") as file:
        tensor: torch.Tensor = file.get_tensor("model.embed_tokens.weight").float()
    return tensor


def new_llm(**changes: Any) -> LLM:
    arguments: dict[str, Any] = {"dtype": "float32", "num_threads": 1, "block_size": 16, "topology": "inline"}
    return LLM("storyteller", enable_prompt_embeds=True, **(arguments | changes))


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with new_llm() as engine:
        yield engine


def streams(llm: LLM, prompts: list[Any], params: SamplingParams | list[SamplingParams]) -> list[list[list[int]]]:
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [[list(completion.token_ids) for completion in output.outputs] for output in outputs]


def own_rows(llm: LLM, table: torch.Tensor, *texts: str) -> tuple[list[list[int]], list[EmbedsPrompt]]:
    ids = [llm._engine.prompts.tokenize(text).ids.tolist() for text in texts]
    return ids, [EmbedsPrompt(prompt_embeds=table[one]) for one in ids]


def test_the_models_own_rows_are_its_ids(llm: LLM, table: torch.Tensor) -> None:
    ids, embedded = own_rows(llm, table, TEXT, TEXT[:30], "A")
    expected = llm.generate([{"prompt_token_ids": one} for one in ids], GREEDY, use_tqdm=False)
    found = llm.generate(embedded, GREEDY, use_tqdm=False)
    assert [o.outputs[0].token_ids for o in found] == [o.outputs[0].token_ids for o in expected]
    assert [o.prompt_token_ids for o in found] == [[0] * len(one) for one in ids]
    assert [o.prompt for o in found] == [None] * 3
    assert [o.outputs[0].text.strip() for o in found] == [o.outputs[0].text.strip() for o in expected]
    # every sequence of several, the forms that it may have, and the text that it shows
    given = {"prompt_embeds": table[ids[0]][None].numpy(), "prompt": "shown"}
    (output,) = llm.generate(given, RANDOM, use_tqdm=False)  # type: ignore[arg-type]
    assert output.prompt == "shown"
    assert [[list(c.token_ids) for c in output.outputs]] == streams(llm, [ids[0]], RANDOM)
    logged = SamplingParams(temperature=0, max_tokens=3, logprobs=2)
    for of_ids, of_rows in zip(
        *(o.outputs[0].logprobs or [] for o in llm.generate([ids[0], embedded[0]], logged)), strict=True
    ):
        assert list(of_ids) == list(of_rows)
        assert [e.logprob for e in of_ids.values()] == pytest.approx([e.logprob for e in of_rows.values()], abs=1e-4)


def test_chunks_preemption_and_every_topology(table: torch.Tensor) -> None:
    """Short steps, too few blocks for all at once; one step in flight and one process, then two and three."""
    texts = [TEXT * 3, "A fox " + TEXT, TEXT[:40], TEXT[10:] * 2]
    expected: list[list[list[int]]] | None = None
    long = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    tight = {"max_num_batched_tokens": 24, "max_num_seqs": 4, "kv_cache_memory_bytes": 22 * 16 * 4 * 2 * 2 * 64 * 4}
    tight["max_model_len"] = 256
    for changes in (
        {"async_scheduling": False},
        {"topology": "process", "tensor_parallel_size": 2, "kv_cache_memory_bytes": 11 * 16 * 4 * 2 * 2 * 64 * 4},
    ):
        with new_llm(**(tight | {"enable_prefix_caching": False} | changes)) as llm:
            ids, embedded = own_rows(llm, table, *texts)
            if expected is None:
                expected = [streams(llm, [one], long)[0] for one in ids]
            assert streams(llm, embedded, long) == expected
            statistics = llm.stats()["scheduler"]["scheduler"]
            assert statistics["num_preemptions"] > 0
            assert statistics["kv"]["num_free"] == statistics["kv"]["num_blocks"]


def test_any_vectors_are_what_transformers_makes_of_them(llm: LLM, table: torch.Tensor) -> None:
    model = AutoModelForCausalLM.from_pretrained(STORYTELLER, dtype=torch.float32)
    generator = torch.Generator().manual_seed(3)
    prompts = [table[:n] + 0.3 * table.std() * torch.randn(n, WIDTH, generator=generator) for n in (1, 17, 90)]
    for embeds, (found,) in zip(
        prompts, streams(llm, [{"prompt_embeds": embeds} for embeds in prompts], GREEDY), strict=True
    ):
        with torch.inference_mode():
            given = torch.cat((embeds, table[found[:-1]]))[None]
            logits = model(inputs_embeds=given).logits[0, len(embeds) - 1 :]
        assert logits.argmax(1).tolist() == found


def test_ids_and_rows_in_one_prompt(llm: LLM, table: torch.Tensor) -> None:
    ids = llm._engine.prompts.tokenize(TEXT).ids.tolist()
    rows = table[ids].clone()
    counts = [i % 3 == 0 or i > 20 for i in range(len(ids))]
    rows[counts] = 7.0  # not looked at
    shown = [i if c else 10**6 for i, c in zip(ids, counts, strict=True)]  # placeholders may be anything
    prompt = EmbedsPrompt(prompt_embeds=rows, prompt_token_ids=shown, prompt_is_token_ids=counts)
    expected, found = llm.generate([ids, prompt], GREEDY, use_tqdm=False)
    assert found.outputs[0].token_ids == expected.outputs[0].token_ids
    assert found.outputs[0].text == expected.outputs[0].text
    assert found.prompt_token_ids == shown
    (short,) = llm.generate(
        prompt, GREEDY, use_tqdm=False, tokenization_kwargs={"truncate_prompt_tokens": len(ids) - 2}
    )
    assert short.prompt_token_ids == shown[2:]
    assert [list(short.outputs[0].token_ids)] == streams(llm, [ids[2:]], GREEDY)[0]


def test_penalties_find_no_ids_in_it(llm: LLM, table: torch.Tensor) -> None:
    """A repetition penalty so large that no token of the prompt could be repeated: of a prompt without ids all can."""
    ids, embedded = own_rows(llm, table, TEXT)
    harsh = SamplingParams(temperature=0, max_tokens=1, repetition_penalty=1000.0)
    (plain,), (of_ids,), (of_rows,) = (
        streams(llm, [prompt], params)[0]
        for prompt, params in ((ids[0], GREEDY), (ids[0], harsh), (embedded[0], harsh))
    )
    mixed = EmbedsPrompt(
        prompt_embeds=table[ids[0]], prompt_token_ids=ids[0], prompt_is_token_ids=[i == plain[0] for i in ids[0]]
    )
    assert of_rows[0] == plain[0]
    if plain[0] in ids[0]:
        assert of_ids[0] != plain[0]
        assert streams(llm, [mixed], harsh)[0][0] == of_ids


def test_blocks_are_shared_where_all_rows_are_the_same(table: torch.Tensor) -> None:
    with new_llm() as llm:
        ids, (prompt,) = own_rows(llm, table, TEXT * 2)
        other = EmbedsPrompt(prompt_embeds=prompt["prompt_embeds"].clone())
        other["prompt_embeds"][-1] += 0.1
        short = SamplingParams(temperature=0, max_tokens=20)
        outputs = [
            llm.generate(one, short, use_tqdm=False)[0]
            for one in (ids[0], prompt, other, {**prompt, "cache_salt": "a"}, prompt)  # type: ignore[misc]
        ]
        cached = [output.num_cached_tokens for output in outputs]
        assert cached == [0, 0, 0, 0, (len(ids[0]) - 1) // 16 * 16]
        assert outputs[4].outputs[0].token_ids == outputs[0].outputs[0].token_ids
        # shorter than a block: what follows it is shared with its like only
        tiny = [EmbedsPrompt(prompt_embeds=table[[n, 7]]) for n in (300, 301)]
        long = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
        first = streams(llm, tiny, long)
        assert streams(llm, tiny, long) == first


BAD = [
    ({"prompt_embeds": torch.zeros(3, WIDTH - 1)}, r"shape \(num_tokens, 256\), not of shape \(3, 255\)"),
    ({"prompt_embeds": torch.zeros(WIDTH)}, r"not of shape \(256,\)"),
    ({"prompt_embeds": torch.zeros(2, 3, WIDTH)}, r"not of shape \(2, 3, 256\)"),
    ({"prompt_embeds": torch.zeros(3, WIDTH, dtype=torch.int64)}, "not one of torch.int64"),
    ({"prompt_embeds": np.zeros((3, WIDTH), np.int32)}, "not one of int32"),
    ({"prompt_embeds": [[0.0] * WIDTH]}, "not list"),
    ({"prompt_embeds": torch.zeros(0, WIDTH)}, "the prompt is empty"),
    ({"prompt_embeds": torch.zeros(2000, WIDTH)}, "2000 tokens and max_model_len is 1024"),
    ({"prompt_embeds": torch.tensor([0.0, float("nan")])[:, None].expand(2, WIDTH)}, "the row of token 1 holds NaN"),
    ({"prompt_embeds": torch.full((1, WIDTH), float("inf"))}, "the row of token 0 holds NaN or infinity"),
    ({"prompt_embeds": torch.zeros(2, WIDTH), "prompt_token_ids": [1, 2]}, "need prompt_is_token_ids, too"),
    ({"prompt_embeds": torch.zeros(2, WIDTH), "prompt_is_token_ids": [True, False]}, "need prompt_token_ids, too"),
    (
        {"prompt_embeds": torch.zeros(2, WIDTH), "prompt_token_ids": [1], "prompt_is_token_ids": [True]},
        "embeds of 2 tokens need as many",
    ),
    (
        {"prompt_embeds": torch.zeros(2, WIDTH), "prompt_token_ids": [1, 9999], "prompt_is_token_ids": [False, True]},
        "token id 9999 is outside",
    ),
    (
        {"prompt_embeds": torch.zeros(2, WIDTH), "prompt_token_ids": [1, 2], "prompt_is_token_ids": [True, [False]]},
        "must be booleans, and item 1 is \\[False\\]",
    ),
    (
        {"prompt_embeds": torch.zeros(2, WIDTH), "prompt_token_ids": [1, 2], "prompt_is_token_ids": [1, 0]},
        "must be booleans, and item 0 is 1",
    ),
    ({"prompt_embeds": torch.zeros(2, WIDTH, device="meta")}, "on device 'meta'; give a dense one with values"),
    ({"prompt_token_ids": [1, 2], "prompt_is_token_ids": [True, False]}, "which is missing"),
    ({"prompt_embed": torch.zeros(2, WIDTH)}, "did you mean 'prompt_embeds'"),
]


@pytest.mark.parametrize(("prompt", "message"), BAD, ids=[message[:30] for _, message in BAD])
def test_what_is_no_prompt_is_named(prompt: Any, message: str, llm: LLM) -> None:
    with pytest.raises(InvalidPromptError, match=message):
        llm.generate(prompt, GREEDY, use_tqdm=False)


def test_what_needs_ids_is_refused(llm: LLM, table: torch.Tensor) -> None:
    prompt = EmbedsPrompt(prompt_embeds=table[:5])
    with pytest.raises(InvalidParameterError, match="prompt_logprobs=1: there are none"):
        llm.generate(prompt, SamplingParams(prompt_logprobs=1), use_tqdm=False)
    with pytest.raises(InvalidPromptError, match="beam search"):
        llm.beam_search([prompt], actorllm.BeamSearchParams(beam_width=2, max_tokens=2))
    with (
        LLM("storyteller", topology="inline", num_threads=1) as plain,
        pytest.raises(InvalidPromptError, match="enable_prompt_embeds=True"),
    ):
        plain.generate(prompt, GREEDY, use_tqdm=False)
    with pytest.raises(ConfigError, match="enable_prompt_embeds=1"):
        EngineConfig.from_arguments("storyteller", enable_prompt_embeds=1)


async def test_what_the_caller_changes_afterwards_is_his_own(table: torch.Tensor) -> None:
    async with AsyncLLM(
        "storyteller", topology="inline", num_threads=1, dtype="bfloat16", enable_prompt_embeds=True
    ) as llm:
        mine = table[100:140].clone().requires_grad_()
        stream = llm.generate({"prompt_embeds": mine}, GREEDY)
        with torch.no_grad():
            mine.zero_()
        found = [output async for output in stream][-1]
        expected = await llm.complete({"prompt_token_ids": list(range(100, 140))}, GREEDY)
        assert found.outputs[0].token_ids == expected.outputs[0].token_ids, "rows that are exact in bfloat16 stay exact"
        with pytest.raises(InvalidPromptError, match="too large for bfloat16"):
            await llm.complete({"prompt_embeds": torch.full((1, WIDTH), 3.4e38)}, GREEDY)


async def test_from_another_program(table: torch.Tensor) -> None:
    """What an attached frontend knows of the model it was told by the engine."""
    arguments: dict[str, Any] = {"dtype": "float32", "num_threads": 1, "enable_prompt_embeds": True}
    async with AsyncLLM("storyteller", name="embeds", **arguments) as owner, AsyncLLM.attach("embeds") as guest:
        expected = await owner.complete({"prompt_token_ids": list(range(40, 90))}, GREEDY)
        found = await guest.complete({"prompt_embeds": table[40:90]}, GREEDY)
        assert found.outputs[0].token_ids == expected.outputs[0].token_ids
        with pytest.raises(InvalidPromptError, match=r"not of shape \(2, 3\)"):
            await guest.complete({"prompt_embeds": torch.zeros(2, 3)}, GREEDY)


async def test_they_go_on_over_the_death_of_the_scheduler(llm: LLM, table: torch.Tensor) -> None:
    """The next one takes the rows from the journal, and the worker takes them from the next one."""
    (ids,), (prompt,) = own_rows(llm, table, TEXT)
    params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
    [[expected]] = streams(llm, [{"prompt_token_ids": ids}], params)
    async with AsyncLLM(
        "storyteller", enable_prompt_embeds=True, dtype="float32", num_threads=1, block_size=16
    ) as killed:
        heard: list[int] = []
        async for output in killed.generate(prompt, params):
            if not heard:
                pid = killed.health().actors["scheduler"].pid
                assert pid is not None
                os.kill(pid, signal.SIGKILL)
            heard = output.outputs[0].token_ids
    assert heard == expected
    assert output.metrics.num_recoveries == 1


def test_stepped_by_hand(table: torch.Tensor) -> None:
    engine = LLMEngine("storyteller", topology="inline", num_threads=1, dtype="float32", enable_prompt_embeds=True)
    for request_id, prompt in (("rows", {"prompt_embeds": table[50:60]}), ("ids", list(range(50, 60)))):
        engine.add_request(request_id, prompt, GREEDY)
    final = {}
    while engine.has_unfinished_requests():
        final |= {output.request_id: output.outputs[0].token_ids for output in engine.step() if output.finished}
    engine.shutdown()
    assert final["rows"] == final["ids"]


MODELS: dict[str, dict[str, Any]] = {
    "GPT2LMHeadModel": {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "OPTForCausalLM": {
        "model_type": "opt",
        "hidden_size": 32,
        "word_embed_proj_dim": 16,
        "ffn_dim": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 64,
        "do_layer_norm_before": False,
    },
    "Gemma3ForCausalLM": {
        "model_type": "gemma3_text",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 64,
    },
}


@pytest.mark.parametrize("architecture", MODELS)
def test_through_transformers(architecture: str, tmp_path: Path) -> None:
    """Learned positions, a projection behind the embeddings, embeddings that are scaled when they are looked up."""
    tree = {"architectures": [architecture], "vocab_size": 97, "eos_token_id": None, "dtype": "float32"}
    (tmp_path / "config.json").write_text(json.dumps(tree | MODELS[architecture]))
    torch.manual_seed(0)
    from transformers import AutoConfig

    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path), dtype=torch.float32).eval()
    for parameter in model.parameters():
        parameter.data.add_(0.2 * torch.randn_like(parameter))
    model.save_pretrained(tmp_path)
    arguments: dict[str, Any] = {"skip_tokenizer_init": True, "topology": "inline", "num_threads": 1}
    with LLM(tmp_path, enable_prompt_embeds=True, max_num_batched_tokens=8, max_num_seqs=4, **arguments) as llm:
        ids = np.random.default_rng(0).integers(0, 97, 13).tolist()
        with torch.inference_mode():
            own = model.get_input_embeddings()(torch.tensor(ids))
            other = own + torch.randn_like(own)
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        of_ids, of_rows, of_others = streams(llm, [ids, {"prompt_embeds": own}, {"prompt_embeds": other}], params)
        assert of_rows == of_ids
        with torch.inference_mode():
            given = torch.cat((other, model.get_input_embeddings()(torch.tensor(of_others[0][:-1]))))
            logits = model(inputs_embeds=given[None]).logits[0, len(ids) - 1 :]
        assert logits.argmax(1).tolist() == of_others[0]


def test_a_model_that_cannot_start_from_embeddings_is_refused(tmp_path: Path) -> None:
    tree = {"architectures": ["GPT2LMHeadModel"], "vocab_size": 97, "dtype": "float32"}
    (tmp_path / "config.json").write_text(json.dumps(tree | MODELS["GPT2LMHeadModel"] | {"word_embed_proj_dim": 48}))
    with pytest.raises(ActorLLMError, match=r"enable_prompt_embeds=True: architecture 'GPT2LMHeadModel'.* 48 numbers"):
        LLM(
            tmp_path,
            enable_prompt_embeds=True,
            skip_tokenizer_init=True,
            topology="inline",
            load_format="dummy",
        )


def test_embeddings_beyond_what_a_message_carries_are_refused(
    llm: LLM, table: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("actorllm.intake.tokenization.MAX_PROMPT_BYTES", 10 * 4 * WIDTH)
    (output,) = llm.generate({"prompt_embeds": table[:10]}, GREEDY, use_tqdm=False)
    assert output.finished
    with pytest.raises(InvalidPromptError, match=r"of 11264 bytes .* may carry \(10240\): shorten them to 10 tokens"):
        llm.generate({"prompt_embeds": table[:11]}, GREEDY, use_tqdm=False)


@pytest.mark.parametrize(
    ("name", "differences"),
    [
        ("granite-hybrid", {"embedding_multiplier": 12.0}),
        ("recurrent-gemma", {}),
        ("falcon-h1", {"embedding_multiplier": 5.0}),
    ],
)
def test_rows_of_the_table_are_scaled_as_those_of_ids(tmp_path: Path, name: str, differences: dict[str, Any]) -> None:
    rows = save(name, tmp_path, max_position_embeddings=256, **differences).get_input_embeddings().weight.detach()
    ids = token_ids(3, 40)
    options: dict[str, Any] = {"dtype": "float32", "num_threads": 1, "max_model_len": 128, "skip_tokenizer_init": True}
    with LLM(str(tmp_path), enable_prompt_embeds=True, topology="inline", **options) as llm:
        expected, found = (
            streams(llm, [prompt], GREEDY) for prompt in ({"prompt_token_ids": ids}, {"prompt_embeds": rows[ids]})
        )
    assert found == expected
