"""Drafts change no token: whatever the drafter, how many drafts, the depth, the topology, preemptions and kills (float32)."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from actorllm import LLM, AsyncLLM, SamplingParams
from actorllm.actors.record_file import fresh_scheduler, read_recording, recorded_configuration
from actorllm.config import BUNDLED_MODELS, EngineConfig
from actorllm.errors import ConfigError
from actorllm.model.cpu.runner import CpuRunner
from actorllm.model.inputs import PersistentBatch
from actorllm.model.sampler import Sampler
from actorllm.scheduling.telemetry.recording import replay
from actorllm.types.device import BackendRules, rules_of
from actorllm.types.logits_processors import LogitsProcessor
from tests.api import worker_functions
from tests.api.knowing_drafter import STREAMS
from tests.model.cpu.draft_head_oracle import save_eagle, save_eagle3
from tests.oracle import Account, Stream

NUM_PROMPTS = 30
NUM_KINDS = 6
MAX_TOKENS = 64
ARGUMENTS: dict[str, Any] = {"dtype": "float32", "max_model_len": 320, "max_num_seqs": 24, "num_threads": 1}
TOKEN_BYTES = 4 * 2 * 2 * 64 * 4
"""In the cache of the storyteller in float32: layers, key and value, heads, width, bytes."""
ENOUGH_TOKENS, TOO_FEW_TOKENS = 8_000, 1_600
KNOWING = "tests.api.knowing_drafter:KnowingDrafter"


def requests() -> tuple[list[list[int]], list[SamplingParams]]:
    """Every kind of sampling; some prompts repeat themselves."""
    rng = np.random.default_rng(11)
    prompts = [rng.integers(1, 4096, n).tolist() for n in rng.integers(1, 60, NUM_PROMPTS)]
    prompts = [prompt * 3 if i % 3 == 0 else prompt for i, prompt in enumerate(prompts)]
    kinds: list[dict[str, Any]] = [
        {"temperature": 1.0},
        {"temperature": 0.0},
        {"temperature": 0.8, "top_p": 0.95},
        {"temperature": 1.3, "top_k": 40},
        {"temperature": 0.0, "repetition_penalty": 1.1},
        {"temperature": 0.9, "min_p": 0.02, "frequency_penalty": 0.4, "presence_penalty": 0.2},
    ]
    params = [
        SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True, seed=500 + i, **kinds[i % NUM_KINDS])
        for i in range(NUM_PROMPTS)
    ]
    return prompts, params


MODELS = {"draft_model": "storyteller-draft"}
"""What drafts, by method; heads with random weights are made by `reference`."""
RARELY_RIGHT = ("eagle", "eagle3")


def config(method: str, most: int) -> dict[str, Any]:
    """For any number of rows, so that drafts are checked in large batches, too."""
    return {
        "method": KNOWING if method == "knowing" else method,
        **({"model": MODELS[method]} if method in MODELS else {}),
        "num_speculative_tokens": most,
        "num_speculative_tokens_per_batch_size": [[1, 1000, most]],
        **({"prompt_lookup_min": 1, "prompt_lookup_max": 3} if method == "ngram" else {}),
    }


def run(num_prompts: int = NUM_PROMPTS, **arguments: Any) -> tuple[list[Stream], dict[str, Any]]:
    prompts, params = requests()
    with LLM("storyteller", **(ARGUMENTS | arguments)) as llm:
        outputs = llm.generate(prompts[:num_prompts], params[:num_prompts], use_tqdm=False)
        statistics = llm.stats()["scheduler"]["scheduler"]
    return [output.outputs[0].token_ids for output in outputs], statistics


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Stream]]:
    """Without drafts. What the knowing drafter knows."""
    streams, statistics = run(topology="inline", async_scheduling=False)
    assert statistics["speculation"] is None
    file = tmp_path_factory.mktemp("streams") / "streams.json"
    file.write_text(json.dumps(list(zip(requests()[0], streams, strict=True))))
    os.environ[STREAMS] = str(file)
    tree = json.loads((BUNDLED_MODELS["storyteller"] / "config.json").read_text())
    MODELS["eagle"] = str(save_eagle(tmp_path_factory.mktemp("eagle"), tree))
    own = {"draft_vocab_size": 1000, "eagle_aux_hidden_state_layer_ids": [1, 2, 3]}
    MODELS["eagle3"] = str(save_eagle3(tmp_path_factory.mktemp("eagle3"), tree, **own))
    yield streams
    del os.environ[STREAMS]


def compare(streams: list[Stream], reference: list[Stream]) -> Account:
    account = Account()
    for prompt, one, stream, expected in zip(*requests(), streams, reference, strict=False):
        account.compare(prompt, one, stream, expected)
        account.tokens += len(stream)
    return account


GRID = [
    (method, most, topology, depth, preempt)
    for method in ("ngram", "suffix", "knowing", "draft_model", "eagle", "eagle3")
    for most in (1, 3, 7)
    for topology in ("inline", "process")
    for depth in (1, 2)
    for preempt in (False, True)
]
QUICK = [
    cell
    for cell in GRID
    if (cell[2:] in {("inline", 1, False), ("inline", 2, True), ("process", 2, False)} and cell[0] == "knowing")
    or cell == ("ngram", 3, "process", 2, True)
    or cell in {("ngram", 7, "inline", 1, False), ("suffix", 7, "inline", 2, True)}
    or cell
    in {("draft_model", 3, "inline", 2, False), ("eagle", 7, "inline", 2, True), ("eagle3", 3, "inline", 1, False)}
]


def cells() -> list[Any]:
    slow = pytest.mark.slow(reason="some seconds; the quick cells have each value of each factor")
    return [pytest.param(*cell, marks=[] if cell in QUICK else [slow]) for cell in GRID]


def test_the_grid_compares_enough_tokens() -> None:
    assert len(GRID) * NUM_PROMPTS * MAX_TOKENS >= 50_000
    assert [{cell[i] for cell in QUICK} for i in range(5)] == [{cell[i] for cell in GRID} for i in range(5)]


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("method", "most", "topology", "depth", "preempt"), cells())
def test_streams_are_those_without_drafts(
    reference: list[Stream], method: str, most: int, topology: str, depth: int, preempt: bool
) -> None:
    streams, statistics = run(
        speculative_config=config(method, most),
        topology=topology,
        async_scheduling=depth == 2,
        kv_cache_memory_bytes=TOKEN_BYTES * (TOO_FEW_TOKENS if preempt else ENOUGH_TOKENS),
    )
    assert (statistics["num_preemptions"] > 0) == preempt
    account = compare(streams, reference)
    assert account.tokens == NUM_PROMPTS * MAX_TOKENS
    assert account.real == 0, account
    assert account.inside_margin <= 5, "rows inside the margin are rare"
    drafts = statistics["speculation"]
    assert len(drafts["num_accepted_tokens_per_pos"]) == most
    assert drafts["num_draft_tokens"] > 100
    if method not in RARELY_RIGHT:
        assert 0 < drafts["num_accepted_tokens"] < drafts["num_draft_tokens"], "some are right, and some are not"
    if method == "knowing":
        assert drafts["num_accepted_tokens"] > 0.2 * account.tokens


BITS = [
    (method, most, depth)
    for method in ("ngram", "suffix", "draft_model", "eagle", "eagle3")
    for most in (1, 3, 7)
    for depth in (1, 2)
]
QUICK_BITS = {("ngram", 7, 2), ("draft_model", 3, 1), ("eagle3", 1, 2)}


@pytest.fixture(scope="module")
def bits(reference: list[Stream]) -> Callable[..., list[Any]]:
    """Tokens and log-probabilities of a run in bfloat16, whose bits depend on the request only."""

    def of(**more: Any) -> list[Any]:
        prompts, params = requests()
        prompts, params = prompts[:12], params[:12]
        for one in params:
            one.logprobs = 1
        given = ARGUMENTS | {"dtype": "bfloat16", "batch_invariant": True, "topology": "inline"} | more
        with LLM("storyteller", **given) as llm:
            outputs = [output.outputs[0] for output in llm.generate(prompts, params, use_tqdm=False)]
            drafts = llm.stats()["scheduler"]["scheduler"]["speculation"]
        assert drafts is None or drafts["num_draft_tokens"] > 40
        return [
            [(token, at[token].logprob) for token, at in zip(one.token_ids, one.logprobs or (), strict=True)]
            for one in outputs
        ]

    return of


@pytest.fixture(scope="module")
def plain_bits(bits: Callable[..., list[Any]]) -> list[Any]:
    return bits()


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("method", "most", "depth"),
    [
        pytest.param(
            *cell, marks=[] if cell in QUICK_BITS else [pytest.mark.slow(reason="some seconds; three stand for all")]
        )
        for cell in BITS
    ],
)
def test_bits_in_bfloat16_are_those_without_drafts(
    bits: Callable[..., list[Any]], plain_bits: list[Any], method: str, most: int, depth: int
) -> None:
    assert bits(speculative_config=config(method, most), async_scheduling=depth == 2) == plain_bits


# Planted mistakes -----------------------------------------------------------------------------------------------------


def drafting(most: int = 3) -> list[Stream]:
    streams, _ = run(speculative_config=config("knowing", most), topology="inline", num_prompts=12)
    return streams


def test_without_a_mistake_a_small_run_is_right(reference: list[Stream]) -> None:
    assert compare(drafting(), reference).real == 0


def test_a_counter_off_by_one_at_drafts_is_found(reference: list[Stream], monkeypatch: pytest.MonkeyPatch) -> None:
    check, sample = CpuRunner._check_drafts, Sampler.sample
    inside = []

    def checking(self: Any, *arguments: Any) -> Any:
        inside.append(True)
        try:
            return check(self, *arguments)
        finally:
            inside.clear()

    def shifted(self: Any, logits: Any, columns: Any) -> Any:
        if inside:
            columns.token_index = columns.token_index + 1
        return sample(self, logits, columns)

    monkeypatch.setattr(CpuRunner, "_check_drafts", checking)
    monkeypatch.setattr(Sampler, "sample", shifted)
    assert compare(drafting(), reference).real > 0


def test_keys_of_a_wrong_draft_that_are_kept_are_found(
    reference: list[Stream], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The token that is sampled in place of a draft stores nothing, as if the draft had been right."""
    inputs = PersistentBatch.inputs
    drafted_to: dict[int, int] = {}

    def keeping(self: Any, plan: Any, drafts: Any = None) -> Any:
        made = inputs(self, plan, drafts)
        counts = np.zeros(len(self.decode_slots), np.int32) if drafts is None else drafts.counts
        for row, slot in enumerate(self.decode_slots.tolist()):
            here = int(self.columns.num_computed[slot])
            if drafted_to.get(slot, 0) > here:
                made.kv_slots[made.result_tokens[row]] = self.padding_block * self.block_size
            drafted_to[slot] = here + 1 + int(counts[row])
        return made

    monkeypatch.setattr(PersistentBatch, "inputs", keeping)
    assert compare(drafting(), reference).real > 0


@pytest.mark.parametrize("by", [-1, 1])
def test_a_mask_of_attention_that_is_shifted_is_found(
    reference: list[Stream], monkeypatch: pytest.MonkeyPatch, by: int
) -> None:
    """Drafts do not see themselves, or rows see the draft behind them."""
    inputs = PersistentBatch.inputs

    def shifting(self: Any, plan: Any, drafts: Any = None) -> Any:
        made = inputs(self, plan, drafts)
        if drafts is not None and by < 0:
            made.decode_lengths[made.draft_tokens] -= 1
        elif drafts is not None:
            have = np.flatnonzero(drafts.counts)
            last = np.cumsum(drafts.counts)[have] - 1
            made.decode_lengths[np.delete(made.draft_tokens, last)] += 1
            made.decode_lengths[made.result_tokens[have]] += 1
        return made

    monkeypatch.setattr(PersistentBatch, "inputs", shifting)
    assert compare(drafting(), reference).real > 0


def test_a_draft_that_is_taken_unseen_is_found(reference: list[Stream], monkeypatch: pytest.MonkeyPatch) -> None:
    """As if every draft were what was sampled."""
    check = CpuRunner._check_drafts

    def believing(self: Any, handle: Any, logits: Any, tokens: Any, *rest: Any) -> Any:
        drafts = handle.inputs.drafts
        firsts = np.cumsum(drafts.counts) - drafts.counts
        tokens = tokens.copy()
        rows = np.flatnonzero(drafts.counts)
        tokens[rows] = drafts.tokens[firsts[rows]]
        return check(self, handle, logits, tokens, *rest)

    monkeypatch.setattr(CpuRunner, "_check_drafts", believing)
    assert compare(drafting(), reference).real > 0


# What else a request may ask for --------------------------------------------------------------------------------------

END_OF_TEXT = 0
"""Of the storyteller. A bias makes it the most likely token wherever it may be one."""

RULES: list[dict[str, Any]] = [
    {"min_tokens": 20, "ignore_eos": False, "logit_bias": {END_OF_TEXT: 100.0}, "temperature": 0.0},
    {"bad_words": [" the", " said the"], "temperature": 0.0},
    {"stop": ["ing ", ". "], "temperature": 0.0},
    {"stop": ["e"], "include_stop_str_in_output": True, "temperature": 0.0},
    {"logprobs": 3, "temperature": 0.0},
    {"logprobs": 2, "prompt_logprobs": 2, "temperature": 1.0, "repetition_penalty": 1.2},
    {"logprob_token_ids": [5, 9], "temperature": 0.0},
    {"logit_bias": {17: 3.0}, "temperature": 1.0},
    {"allowed_token_ids": list(range(200, 300)), "temperature": 0.0},
    {"n": 3, "temperature": 1.0},
    {"repetition_detection": {"max_pattern_size": 4, "min_count": 3}, "temperature": 0.0},
]


SHORT = pytest.mark.slow(reason="the end of a request is in fewer drafts; each rule is held at its full length")


def told(outputs: list[Any], number: Callable[[float], Any] = float) -> list[Any]:
    """Everything that a caller sees of the outputs. number: how log-probabilities are compared."""

    def entries(positions: Any) -> list[Any]:
        return [
            None
            if position is None
            else {token: (entry.rank, entry.decoded_token, number(entry.logprob)) for token, entry in position.items()}
            for position in positions or ()
        ]

    return [
        [
            completion.index,
            completion.text,
            completion.token_ids,
            completion.finish_reason,
            completion.stop_reason,
            entries(completion.logprobs),
            entries(output.prompt_logprobs),
        ]
        for output in outputs
        for completion in output.outputs
    ]


@pytest.fixture(scope="module")
def plain_and_drafting() -> Iterator[tuple[LLM, LLM]]:
    arguments: dict[str, Any] = ARGUMENTS | {"topology": "inline"}
    with (
        LLM("storyteller", **arguments) as plain,
        LLM("storyteller", speculative_config=config("ngram", 5), **arguments) as other,
    ):
        yield plain, other


@pytest.mark.parametrize("rules", RULES, ids=lambda rules: next(iter(rules)))
@pytest.mark.parametrize("max_tokens", [pytest.param(21, marks=SHORT), 90])
def test_rules_ends_and_probabilities_are_those_without_drafts(
    plain_and_drafting: tuple[LLM, LLM], rules: dict[str, Any], max_tokens: int
) -> None:
    prompts = [
        "The fox and the hen. The fox and the hen. The fox and the",
        "One, two, one, two, one",
        "Once upon a time",
    ]
    params = SamplingParams(**({"max_tokens": max_tokens, "ignore_eos": True, "seed": 4} | rules))
    plain, other = plain_and_drafting
    before = other.stats()["scheduler"]["scheduler"]["speculation"]["num_draft_tokens"]
    wanted = told(plain.generate(prompts, params, use_tqdm=False), partial(pytest.approx, abs=1e-3))
    assert told(other.generate(prompts, params, use_tqdm=False)) == wanted
    if max_tokens == 90 and rules.get("temperature") == 0.0 and "stop" not in rules:
        assert other.stats()["scheduler"]["scheduler"]["speculation"]["num_draft_tokens"] > before


class Refrain(LogitsProcessor):
    """Every fourth token is the same one, and no token comes twice in a row: both go by the output so far."""

    def __init__(self, config: Any, device: Any, is_pin_memory: bool) -> None:
        self._outputs: dict[int, list[int]] = {}

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: Any) -> None:
        if batch_update is None:
            return
        for index in batch_update.removed:
            self._outputs.pop(index, None)
        for index, _, _, output in batch_update.added:
            self._outputs[index] = output
        for source, target, _ in batch_update.moved:
            self._outputs[target] = self._outputs.pop(source)

    def apply(self, logits: Any) -> Any:
        for index, output in self._outputs.items():
            if len(output) % 4 == 3:
                logits[index] = -np.inf
                logits[index, 17] = 0.0
            elif output:
                logits[index, output[-1]] = -np.inf
        return logits


def test_logits_processors_see_each_token_in_its_turn() -> None:
    prompts = ["One, two, one, two, one", "The fox and the hen", "Once upon a time"]
    params = SamplingParams(max_tokens=80, temperature=0.0, ignore_eos=True)
    found = []
    for drafts in (None, config("ngram", 5)):
        arguments: dict[str, Any] = ARGUMENTS | {"topology": "inline", "speculative_config": drafts}
        with LLM("storyteller", logits_processors=["tests.api.test_speculation:Refrain"], **arguments) as llm:
            found.append(told(llm.generate(prompts, params, use_tqdm=False)))
            statistics = llm.stats()["scheduler"]["scheduler"]["speculation"]
    assert found[0] == found[1]
    assert found[0][0][2][3::4] == [17] * 20
    assert statistics["num_accepted_tokens"] > 20


def test_structured_output_shares_steps_with_rows_that_draft(plain_and_drafting: tuple[LLM, LLM]) -> None:
    prompts = ["One, two, one, two, one, two", "One, two, one, two, one, two"]
    params = [
        SamplingParams(max_tokens=60, temperature=0.0, structured_outputs={"regex": "(ab){12}"}),
        SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True),
    ]
    plain, other = plain_and_drafting
    found = told(other.generate(prompts, params, use_tqdm=False))
    assert found == told(plain.generate(prompts, params, use_tqdm=False))
    assert found[0][1] == "ab" * 12


def test_a_request_and_a_step_tell_of_their_drafts(plain_and_drafting: tuple[LLM, LLM]) -> None:
    plain, other = plain_and_drafting
    params = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)
    prompts = ["one two one two one two", "Once upon a time"]
    assert [o.metrics.num_draft_tokens for o in plain.generate(prompts, params, use_tqdm=False) if o.metrics] == [0, 0]
    before = other.stats()["scheduler"]["scheduler"]["speculation"]
    other._engine.ask_scheduler("start_timeline").result()
    metrics = [output.metrics for output in other.generate(prompts, params, use_tqdm=False)]
    after = other.stats()["scheduler"]["scheduler"]["speculation"]
    told = [
        event["args"]
        for event in other._engine.ask_scheduler("take_timeline").result()
        if "drafts" in event.get("args", {})
    ]
    by_position = zip(*(one.num_accepted_tokens_per_pos for one in metrics), strict=True)
    before_by_position, after_by_position = (one["num_accepted_tokens_per_pos"] for one in (before, after))
    found = [earlier + sum(here) for earlier, here in zip(before_by_position, by_position, strict=True)]
    assert found == list(after_by_position) != list(before_by_position)
    for name, key in (("num_draft_tokens", "drafts"), ("num_accepted_tokens", "accepted")):
        number = after[name] - before[name]
        assert number > 0
        assert sum(getattr(one, name) for one in metrics) == number
        assert sum(args[key] for args in told) == number


def test_suffixes_are_found_in_outputs_with_the_same_cache_salt() -> None:
    drafts = {"method": "suffix", "num_speculative_tokens": 7, "num_speculative_tokens_per_batch_size": [[1, 9, 7]]}
    params = SamplingParams(max_tokens=48, temperature=1.0, seed=8, ignore_eos=True)
    arguments: dict[str, Any] = ARGUMENTS | {"topology": "inline"}
    with LLM("storyteller", speculative_config=drafts, **arguments) as llm:

        def accepted(salt: str | None) -> int:
            prompt: Any = {"prompt": "Once upon a time"} | ({} if salt is None else {"cache_salt": salt})
            output = llm.generate([prompt], params, use_tqdm=False)[0]
            streams.add(tuple(output.outputs[0].token_ids))
            assert output.metrics is not None
            return output.metrics.num_accepted_tokens

        streams: set[tuple[int, ...]] = set()
        first = accepted("one")
        assert accepted("one") > first + 20
        assert accepted("two") == first, "what others have written is not to be seen in how fast it is"
        assert accepted(None) == first
        assert accepted(None) > first + 20
        assert len(streams) == 1


def test_metrics_have_the_names_of_vllm(plain_and_drafting: tuple[LLM, LLM]) -> None:
    plain, other = plain_and_drafting
    other.generate("one two one two one two", SamplingParams(max_tokens=60, temperature=0.0), use_tqdm=False)
    drafts = other.stats()["scheduler"]["scheduler"]["speculation"]
    values = {metric.name: getattr(metric, "value", None) for metric in other.get_metrics()}
    for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens"):
        assert values[f"vllm:spec_decode_{name}"] == drafts[name] > 0
    by_position = [m for m in other.get_metrics() if m.name == "vllm:spec_decode_num_accepted_tokens_per_pos"]
    assert [m.labels["position"] for m in by_position] == ["0", "1", "2", "3", "4"]
    assert {m.labels["drafter"] for m in by_position} == {drafts["drafter"]} == {"ngram"}
    assert not any("spec_decode" in metric.name for metric in plain.get_metrics())


# Crashes and recordings -----------------------------------------------------------------------------------------------


def test_the_draft_model_that_ships_is_often_right() -> None:
    """Of what the storyteller says of itself, at the temperature of its stories: as often as their distributions agree, 0.43."""
    drafts = config("draft_model", 2)
    params = [SamplingParams(max_tokens=60, temperature=0.8, top_p=0.95, seed=i, ignore_eos=True) for i in range(12)]
    with LLM("storyteller", **ARGUMENTS, topology="inline", speculative_config=drafts) as llm:
        llm.generate(["Once upon a time"] * 12, params, use_tqdm=False)
        found = llm.stats()["scheduler"]["scheduler"]["speculation"]
    assert found["num_drafts"] > 100
    assert 0.3 * found["num_drafts"] < found["num_accepted_tokens_per_pos"][0] < 0.6 * found["num_drafts"]


KILLS = [
    (victim, method, most, depth)
    for victim in ("worker0", "scheduler")
    for method in ("knowing", "ngram", "suffix", "draft_model", "eagle", "eagle3")
    for most in (1, 3, 7)
    for depth in (1, 2)
]
KILLS += [("worker1", "ngram", 3, 2), ("worker1", "draft_model", 3, 1)]  # of one of two ranks
QUICK_KILLS = {("worker0", "knowing", 3, 2), ("scheduler", "knowing", 3, 1), ("worker0", "eagle3", 3, 2)}


def kills() -> list[Any]:
    slow = pytest.mark.slow(reason="some seconds; the quick ones kill each process")
    return [pytest.param(*kill, marks=[] if kill in QUICK_KILLS else [slow]) for kill in KILLS]


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("victim", "method", "most", "depth"), kills())
def test_a_kill_in_the_middle_changes_no_token(
    reference: list[Stream], victim: str, method: str, most: int, depth: int
) -> None:
    import anyio

    prompts, params = requests()
    streams: dict[int, list[int]] = {}

    async def consume(engine: AsyncLLM, number: int, kill_at: int | None) -> None:
        async for output in engine.generate({"prompt_token_ids": prompts[number]}, params[number]):
            streams[number] = list(output.outputs[0].token_ids)
            if kill_at is not None and len(streams[number]) >= kill_at:
                os.kill(engine._engine.pids[victim], signal.SIGKILL)
                kill_at = None

    async def main() -> dict[str, Any]:
        arguments = ARGUMENTS | {"speculative_config": config(method, most), "async_scheduling": depth == 2}
        arguments["tensor_parallel_size"] = 1 + (victim == "worker1")
        async with AsyncLLM("storyteller", **arguments) as engine, anyio.create_task_group() as group:
            async with anyio.create_task_group() as consumers:
                for number in range(12):
                    consumers.start_soon(consume, engine, number, 20 if number == 0 else None)
            found: dict[str, Any] = await engine.stats()
            group.cancel_scope.cancel()
        return found

    statistics = anyio.run(main)
    drafts = statistics["scheduler"]["scheduler"]["speculation"]
    assert drafts["num_draft_tokens"] > 0
    assert drafts["num_accepted_tokens"] > 0 or method in RARELY_RIGHT
    account = compare([streams[number] for number in range(12)], reference)
    assert account.tokens == 12 * MAX_TOKENS
    assert account.real == 0, account


def test_a_recording_replays(reference: list[Stream], tmp_path: Path) -> None:
    file = tmp_path / "record"
    run(speculative_config=config("knowing", 7), topology="inline", record=str(file), num_prompts=12)
    plans = list(replay(read_recording(file), fresh_scheduler(file)))
    assert any(plan.max_drafts == 7 for plan in plans)


def test_costs_are_measured_once_and_recorded(tmp_path: Path) -> None:
    """A worker that takes another's place goes on with them: what is planned is what the recording says."""
    file = tmp_path / "record"
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
    with LLM("storyteller", **ARGUMENTS, topology="process", record=str(file), speculative_config=drafts) as llm:
        params = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
        prompt = "One, two, one, two, one, two"
        before = llm.generate(prompt, params, use_tqdm=False)[0].outputs[0].token_ids
        known = llm.collective_rpc(f"{worker_functions.__name__}:step_costs")
        os.kill(llm._engine.pids["worker0"], signal.SIGKILL)
        assert llm.generate(prompt, params, use_tqdm=False)[0].outputs[0].token_ids == before
        assert llm.collective_rpc(f"{worker_functions.__name__}:step_costs") == known, "it has measured nothing anew"
        used = llm._engine.config.speculation
        assert llm.stats()["workers"][0]["num_steps"] > 0
    assert used is not None
    assert known == [[list(entry) for entry in used.step_costs]]
    assert [size for size, _ in used.step_costs][:4] == [1, 2, 4, 8]
    assert all(seconds > 0 for _, seconds in used.step_costs)
    assert recorded_configuration(file).speculation == used
    assert list(replay(read_recording(file), fresh_scheduler(file)))


# What does not go together --------------------------------------------------------------------------------------------


def test_the_cache_must_hold_a_sequence_and_its_drafts() -> None:
    drafts = {"method": "ngram", "num_speculative_tokens": 4}
    made = EngineConfig.from_arguments("storyteller", max_model_len=64, speculative_config=drafts)
    with pytest.raises(
        ConfigError, match=r"max_model_len=64 and 8 drafts; give more memory .* or set max_model_len=56"
    ):
        made.resolved(2)
    assert made.resolved(3).cache.num_blocks == 3
    assert EngineConfig.from_json(made.to_json()) == made
    with pytest.raises(ConfigError, match="num_gpu_blocks_override=2: so many blocks"):
        EngineConfig.from_arguments(
            "storyteller", max_model_len=64, speculative_config=drafts, num_gpu_blocks_override=2
        )


def test_backends_that_do_not_know_drafts_refuse_them_by_name() -> None:
    options = {"dtype": "auto", "block_size": None, "device": "npu", "speculative_config": {"method": "ngram"}}
    told = "speculative_config={'method': 'ngram'} is not supported on device='npu' yet; leave it at None"
    assert BackendRules().why_not(options, pools=False) == told
    options["speculative_config"] = {"method": "ngram", "num_speculative_tokens": 2}
    assert rules_of("cuda").why_not(options, pools=False) is None
    assert rules_of("cuda").why_not(options | {"tensor_parallel_size": 2}, pools=False) is None
    assert rules_of("cpu").why_not(options, pools=False) is None
    options["speculative_config"] = {"method": "eagle3", "model": "a-head", "num_speculative_tokens": 2}
    assert rules_of("cuda").why_not(options, pools=False) is None
    told = (
        "speculative_config (method='eagle3') is not supported with tensor_parallel_size=2 on CUDA yet; use 'ngram' or"
    )
    assert str(rules_of("cuda").why_not(options | {"tensor_parallel_size": 2}, pools=False)).startswith(told)
    told = "speculative_config (method='eagle3') is not supported on device='npu' yet; use 'ngram' or 'suffix'"
    assert BackendRules(drafts=True).why_not(options, pools=False) == told


MODEL = {"speculative_config": {"method": "draft_model", "model": "storyteller-draft", "num_speculative_tokens": 2}}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({**MODEL, "model_impl": "transformers"}, "not supported for modules of transformers yet; use 'ngram'"),
        (
            {"block_size": 8},
            "num_speculative_tokens=4 for each of 2 steps in flight must be less than block_size=8; use 3",
        ),
        ({"runner": "pooling", "convert": "embed"}, "a model that makes vectors samples no tokens"),
    ],
)
def test_what_does_not_go_together_is_refused_by_name(arguments: dict[str, Any], message: str) -> None:
    drafts = {"method": "ngram", "num_speculative_tokens": 4}
    with pytest.raises(ConfigError, match=message):
        LLM("storyteller", **({"speculative_config": drafts} | arguments))
