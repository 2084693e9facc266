"""Each kind of model that takes images or audio: tokens as of transformers' `generate`, in chunks, again, and after preemption."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from actorllm import LLM, SamplingParams
from actorllm.errors import InvalidPromptError
from tests.media.small_models import SAVE, VOCAB, generated, picture, sound

GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
BLOCK = 16
ARGUMENTS: dict[str, Any] = {
    "dtype": "float32",
    "num_threads": 1,
    "block_size": BLOCK,
    "topology": "inline",
    "max_model_len": 256,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 32,  # less than a prompt has, and more than the 16 rows that must not be cut
}
MARKS = {
    "gemma3": "<start_of_image>",
    "qwen2_5_vl": "<|vision_start|><|image_pad|><|vision_end|>",
    "qwen2_audio": "<|audio_bos|><|AUDIO|><|audio_eos|>",
    "qwen2_vl": "<|vision_start|><|image_pad|><|vision_end|>",
    "qwen3_vl": "<|vision_start|><|image_pad|><|vision_end|>",
}


class Kind(NamedTuple):
    folder: Path
    llm: LLM
    text: str
    """With two items."""
    items: list[Any]
    """Three."""

    def prompt(self, *items: Any, text: str | None = None) -> dict[str, Any]:
        modality = "audio" if isinstance(items[0], np.ndarray) else "image"
        return {"prompt": text or self.text, "multi_modal_data": {modality: list(items)}}

    def tokens(self, *prompts: Any, max_tokens: int = 20) -> list[list[int]]:
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        return [
            list(output.outputs[0].token_ids) for output in self.llm.generate(list(prompts), params, use_tqdm=False)
        ]

    def expected(self, *items: Any) -> list[int]:
        return generated(self.folder, self.text, list(items), 20)


@pytest.fixture(scope="module", params=SAVE)
def kind(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kind]:
    name = request.param
    folder = SAVE[name](tmp_path_factory.mktemp(name))
    mark = MARKS.get(name, "<image>")
    items: list[Any] = [picture(1), picture(2, 60, 24), picture(3, 48, 48)]
    if name == "qwen2_audio":
        items = [sound(1), sound(2, 0.8), sound(3, 0.3)]
    with LLM(str(folder), num_gpu_blocks_override=100, **ARGUMENTS) as llm:
        yield Kind(folder, llm, f"What is {mark} here? And {mark}, or", items)


def test_tokens_are_those_of_generate(kind: Kind) -> None:
    """In chunks beside others, and again with its blocks found; other items are never taken for these."""
    first, second, third = kind.items
    wanted = [kind.expected(first, second), kind.expected(second, first), kind.expected(third, third)]
    assert len({tuple(tokens) for tokens in wanted}) == 3
    plain = "There is nothing to see here, and that is all."
    orders = [kind.prompt(first, second), kind.prompt(second, first), kind.prompt(third, third)]
    alone = kind.tokens(orders[0])[0]
    *together, blind = kind.tokens(*orders[1:], plain)
    assert [alone, *together] == wanted
    assert kind.tokens(plain) == [blind] == [generated(kind.folder, plain, [], 20)]
    again = kind.llm.generate([orders[0]], GREEDY, use_tqdm=False)[0]
    assert list(again.outputs[0].token_ids) == wanted[0]
    assert again.num_cached_tokens == len(again.prompt_token_ids or ()) // BLOCK * BLOCK
    longer = kind.text + " something else that follows?"
    hit = kind.llm.generate([kind.prompt(first, second, text=longer)], GREEDY, use_tqdm=False)[0]
    assert (hit.num_cached_tokens or 0) > 2 * BLOCK
    assert list(hit.outputs[0].token_ids) == generated(kind.folder, longer, [first, second], 20)


def test_forks_and_preemption_change_no_token(kind: Kind) -> None:
    """Little room: requests are computed again, from their output too."""
    first, second, third = kind.items
    with LLM(str(kind.folder), num_gpu_blocks_override=17, enable_prefix_caching=False, **ARGUMENTS) as llm:
        small = kind._replace(llm=llm)
        orders = [small.prompt(first, second), small.prompt(second, first), small.prompt(third, third)]
        assert small.tokens(*orders, max_tokens=60) == kind.tokens(*orders, max_tokens=60)
        params = SamplingParams(n=2, temperature=1.0, seed=5, max_tokens=8, ignore_eos=True)
        forks, others = (one.generate([orders[0]], params, use_tqdm=False)[0].outputs for one in (llm, kind.llm))
        assert [list(one.token_ids) for one in forks] == [list(one.token_ids) for one in others]
        assert llm.stats()["scheduler"]["scheduler"]["num_preemptions"] > 0


def test_in_bfloat16_an_item_counts_as_in_float32(kind: Kind) -> None:
    """Most models are of this type. What its rounding changes is little beside what another item does."""
    first, second, third = kind.items
    orders = [kind.prompt(first, second), kind.prompt(second, first), kind.prompt(third, third)]
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=VOCAB)

    def probabilities(dtype: str) -> list[Any]:
        with LLM(str(kind.folder), max_logprobs=VOCAB, **ARGUMENTS | {"dtype": dtype}) as llm:
            outputs = llm.generate(orders, params, use_tqdm=False)
        tops = [output.outputs[0].logprobs[0] for output in outputs]
        return [np.exp([top[id].logprob for id in range(VOCAB)]) for top in tops]

    exact, rounded = probabilities("float32"), probabilities("bfloat16")
    for i in range(len(orders)):
        distances = [float(np.abs(rounded[i] - other).sum()) for other in exact]
        assert distances[i] < 0.5 * min(distances[:i] + distances[i + 1 :])


def test_what_is_of_another_kind_is_named(kind: Kind) -> None:
    other = {"image": picture(1)} if isinstance(kind.items[0], np.ndarray) else {"audio": sound(1)}
    with pytest.raises(InvalidPromptError, match="is not supported; prompts of this model may have"):
        kind.llm.generate([{"prompt": kind.text, "multi_modal_data": other}], GREEDY, use_tqdm=False)
