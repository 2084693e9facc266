"""What an engine computes beside plain models, shown on this GPU: small models of each kind, whole steps of the worker's runner.

A case is right if three things hold. Its self-check has replaced no kernel, and has found its recorded steps right. Its logits
are those of the same checkpoint in float32 on a CPU, where torch takes the place of the kernels. And nothing was not finite. Both
runners are given the same steps: prompts in chunks and beside decode rows, few rows and many, filters, log-probabilities. Tokens of
the CPU are fed to both, so that one near tie does not part them. Of drafts, whole streams are held against the model itself: each
of their tokens must be the likeliest behind those before it, up to rounding.

A decode step is timed beside that of the plain bfloat16 model, in turns.

On a GPU, processes first prepare the cases in parallel: checkpoints, logits of the CPU, compiled kernels. Then a process of its
own measures case by case, and another goes on where it ends (`apart`).
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import statistics
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from actorllm.config import EngineConfig
from actorllm.messages import POOLING_CODES, LateInputs, NewRow, StepPlan, StepResult, pack_rows
from actorllm.messages.logit_rules import SamplingRules, encode_rules
from actorllm.messages.logprobs import spans_of
from actorllm.model.cuda import ops
from actorllm.model.cuda.device import CudaDevice, HostDevice
from actorllm.model.cuda.graphs import GraphPart
from actorllm.model.cuda.runner import MEASURED_STEPS, CudaRunner
from actorllm.types.adapter_folder import AdapterDigests

from . import apart, steps
from .capability_cases import BASE, OF_MOST_ROWS, Case, cases, write, write_adapter
from .clock import Bench, interval

PREPARING_S = 200.0
"""After which cases that are not prepared are prepared one by one, where they are measured."""
CASE_S = 120.0
"""A case that takes longer is given up."""
BUDGET_S = 400.0
"""No case begins later: what was found is of more worth than one more case."""
LOGPROB_ERROR = 2e-3
"""Of log-probabilities, against those of the same logits."""
ALMOST_LIKELIEST = 0.5
"""How much less likely than the likeliest a token of a greedy stream may be, in log-probability."""
MIN_SAME_TOKENS = 0.8
"""Of all tokens, drawn ones included; others are near ties."""
NUM_BLOCKS = 128
"""Of a cache, where nothing is timed."""
ADAPTERS = {1: 16, 2: 7}
"""Slots of adapters, and their ranks."""


# The stage --------------------------------------------------------------------------------------------------------------


def run(bench: Bench) -> dict[str, Any]:
    rows: list[dict[str, Any]] = []
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        folder, names = Path(name), wanted(bench)
        for case, row in _measured(bench, names, folder):
            rows.append({"case": case, **row})
            print(line(rows[-1]), flush=True)
            if time.monotonic() - began > BUDGET_S:
                break
    left = names[len(rows) :]
    rows += [{"case": case, "right": False, "problem": "not run: no time was left"} for case in left]
    wrong = [row["case"] for row in rows if not row.get("right")]
    return {
        "capabilities": [{key: value for key, value in row.items() if key != "steps"} for row in rows],
        "capability steps": [{"case": row["case"], **step} for row in rows for step in row.get("steps", [])],
        "wrong": f"not right: {', '.join(wrong)}" if wrong else "",
    }


def wanted(bench: Bench) -> list[str]:
    """The cases of this run. Raises ValueError where there are none."""
    every = list(cases(bench))
    names = [name for name in every if not bench.only or any(part in name for part in bench.only)]
    if not names:
        raise ValueError(f"--cases {','.join(bench.only)}: the cases are {'; '.join(every)}")
    return names


def line(row: dict[str, Any]) -> str:
    """What is printed of a case."""
    parts = [f"  {row['case']}: {'ok' if row.get('right') else 'WRONG'}"]
    if (error := row.get("error")) is not None:
        parts.append(f"off by {error:.3f} of {row['limit']:.2f}")
    parts += [
        str(row[key]) for key in ("verdict", "note", "problem", "told") if row.get(key) not in (None, "", "right")
    ]
    for step in row.get("steps", []):
        ratio = f", {step['ratio']:.2f} of bfloat16" if step["ratio"] is not None else ""
        parts.append(f"batch {step['batch']}: {step['step, ms']:.3f} ms{ratio}")
    if "seconds" in row:
        parts.append(f"{row['seconds']:.0f} s")
    return "; ".join(parts)


def _measured(bench: Bench, names: list[str], folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    if bench.is_check:
        with contextlib.ExitStack() as stack:
            bases = Bases(bench, folder, stack)
            for name in names:
                yield name, attempt(bench, cases(bench)[name], folder, bases)
        return
    began = time.monotonic()
    apart.share_out(prepare_share, apart.num_processes(), PREPARING_S, bench, str(folder))
    print(f"  prepared in {time.monotonic() - began:.0f} s", flush=True)
    yield from apart.one_by_one(measure_apart, names, CASE_S, bench, str(folder))


def prepare_share(first: int, count: int, bench: Bench, folder: str) -> None:
    """Every `count`-th case: what it needs, and its kernels compiled. What goes wrong is met again where it counts."""
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // count))
    logging.disable(logging.CRITICAL)
    for case in [cases(bench)[name] for name in wanted(bench)[first::count]]:
        with contextlib.suppress(Exception):
            expected = prepared(bench, case, Path(folder))
            with _environment(case), runner_of(bench, case, place(folder, case)) as runner:
                if not case.drafts:
                    follow(bench, case, runner, expected)


_bases: dict[str, Bases] = {}
"""Of this process."""


def measure_apart(name: str, bench: Bench, folder: str) -> tuple[dict[str, Any], bool]:
    """The row of a case, and whether this process still has its GPU."""
    if folder not in _bases:
        logging.basicConfig(level=logging.WARNING)
        _bases[folder] = Bases(bench, Path(folder), contextlib.ExitStack())  # memory goes with the process
    row = attempt(bench, cases(bench)[name], Path(folder), _bases[folder])
    try:
        bench.synchronize()
    except Exception as problem:
        row |= {"right": False, "problem": row.get("problem") or f"{type(problem).__name__}: the GPU was lost in it"}
        return row, False
    return row, True


def attempt(bench: Bench, case: Case, folder: Path, bases: Bases) -> dict[str, Any]:
    """The row of a case, with what has stopped it."""
    began, told = time.monotonic(), Told()
    logging.getLogger("actorllm").addHandler(told)
    row: dict[str, Any] = {"right": False, "problem": ""}
    try:
        with _environment(case):
            row |= measure(bench, case, folder, bases)
    except Exception as problem:
        traceback.print_exc()
        row |= {"right": False, "problem": one_line(problem)}
    finally:
        logging.getLogger("actorllm").removeHandler(told)
    return {**row, "told": "; ".join(told.lines)[:1200], "seconds": time.monotonic() - began}


def one_line(problem: BaseException) -> str:
    """What has gone wrong, for a cell of a table."""
    return f"{type(problem).__name__}: {' '.join(str(problem).replace('|', '/').split())[:300]}"


class Told(logging.Handler):
    """Warnings of the runner: which kernel is wrong and how, why a step is not a graph."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        why = "" if error is None else f" ({one_line(error)})"
        self.lines.append(" ".join(record.getMessage().split())[:400] + why)


@contextlib.contextmanager
def _environment(case: Case) -> Iterator[None]:
    """Its variables. In a walk through the script torch takes the place of kernels, which have tests of their own."""
    wanted = case.environment | ({"TRITON_INTERPRET": "0"} if os.environ.get("TRITON_INTERPRET") == "1" else {})
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


# Its runners ------------------------------------------------------------------------------------------------------------


def place(folder: Path | str, case: Case) -> Path:
    """Of its checkpoint."""
    return Path(folder) / "".join(c if c.isalnum() else "-" for c in case.name)


@contextlib.contextmanager
def runner_of(
    bench: Bench, case: Case, path: Path, *, is_oracle: bool = False, is_timed: bool = False
) -> Iterator[CudaRunner]:
    """With the weights of this folder, adapters in their slots, and a cache.

    is_oracle: on the CPU in float32, without kernels and graphs. is_timed: with a cache for the steps that are timed.
    """
    for operation in ops.OPERATIONS.values():
        operation.is_replaced = False  # by what another case has found
    on_host = is_oracle or bench.is_check
    device = HostDevice() if on_host else CudaDevice()
    runner = CudaRunner(_config(bench, case, path, is_oracle=is_oracle), show_progress=False, device=device)
    try:
        runner.load()
        for slot in ADAPTERS if case.has_adapters else ():
            assert runner.adapters is not None
            adapter = AdapterDigests(max_rank=max(ADAPTERS.values())).adapter_of(str(path / f"adapter{slot}"))
            runner.adapters.put(slot, adapter.digest, runner.adapters.read(adapter))
        runner.allocate(Sizes.of(bench).num_timed_blocks if is_timed else NUM_BLOCKS)
        yield runner
    finally:
        with contextlib.suppress(RuntimeError):  # of a lost GPU; what lost it is under way already
            runner.close()
            bench.empty_cache()


def _config(bench: Bench, case: Case, path: Path, *, is_oracle: bool, **more: Any) -> EngineConfig:
    arguments: dict[str, Any] = {
        **Sizes.of(bench).arguments,
        "dtype": case.dtype,
        "block_size": 64,
        "skip_tokenizer_init": True,
        **({"model_impl": "transformers"} if case.is_module else {}),
        **case.arguments,
        **more,
    }
    if case.drafts:
        wish = {**arguments["speculative_config"], "num_speculative_tokens": case.drafts}
        if wish["method"] == "draft_model":
            wish["model"] = str(path)  # its own drafts are right but for rounding
        arguments["speculative_config"] = wish
    if not is_oracle and not bench.is_check:
        return EngineConfig.from_arguments(path, **arguments, device="cuda")
    given = dict(arguments)
    if is_oracle:
        given |= {"dtype": "float32", "enforce_eager": True}
    rounds = given.get("quantization") == "fp8" and given.pop("quantization")
    is_small = given.get("kv_cache_dtype") == "fp8" and given.pop("kv_cache_dtype")
    config = EngineConfig.from_arguments(path, **given, device="cpu", num_threads=torch.get_num_threads())
    if rounds:  # a configuration for a CPU refuses both
        config = replace(config, model=replace(config.model, quantization="fp8"))
    if is_small:
        config = replace(config, cache=replace(config.cache, dtype="fp8"))
    return config


@dataclass(frozen=True)
class Sizes:
    """Of requests and caches."""

    lengths: tuple[int, int, int]
    """Prompts of the first three slots; the first goes through in two chunks, the larger of which is no graph."""
    chunk: int
    crowd: int
    """Rows of a step with many."""
    context: int
    batches: tuple[int, ...]
    """Of steps that are timed."""
    stream: int
    """Tokens of a stream."""
    arguments: dict[str, Any]

    @classmethod
    def of(cls, bench: Bench) -> Sizes:
        common = {"max_num_batched_tokens": 2048, "max_num_seqs": 256, "max_model_len": 4096}
        tiny = {"max_num_batched_tokens": 64, "max_num_seqs": 10, "max_model_len": 256}
        real = cls((740, 33, 70), 600, 40, steps.CONTEXT, (1, 32, 256), 64, common)
        return bench.pick(real, cls((70, 5, 9), 60, 3, 5, (3,), 12, tiny))  # type: ignore[no-any-return]

    @property
    def num_timed_blocks(self) -> int:
        """What `steady_step` asks for, but for steps that are longer than any sequence may be."""
        per_row = -(-min(self.context + MEASURED_STEPS, self.arguments["max_model_len"]) // 64)
        return max(NUM_BLOCKS, max(self.batches) * per_row + 8)


@contextlib.contextmanager
def as_it_was(runner: CudaRunner) -> Iterator[None]:
    """Requests that come meanwhile leave no trace but in the cache."""
    with torch.inference_mode(), runner.device.active():
        state = runner.state.snapshot()
        yield
        runner.forget_requests()
        runner.state.restore(state)


class Bases:
    """Runners of plain models, which others are timed beside; each is made once, and stays."""

    def __init__(self, bench: Bench, folder: Path, stack: contextlib.ExitStack) -> None:
        self._bench, self._folder, self._stack = bench, folder, stack
        self._made: dict[str, CudaRunner | None] = {}

    def __call__(self, name: str) -> CudaRunner | None:
        """None: there is none to be timed beside, or it is not right itself."""
        if name and name not in self._made:
            self._made[name] = None
            try:
                case = cases(self._bench)[name]
                prepared(self._bench, case, self._folder)
                made = runner_of(self._bench, case, place(self._folder, case), is_timed=True)
                runner = self._stack.enter_context(made)
            except Exception:  # what is to be beside it is looked at all the same
                traceback.print_exc()
            else:
                self._made[name] = runner if steps.verdict_of(runner) == "right" else None
        return self._made.get(name)


# What is compared -------------------------------------------------------------------------------------------------------


@dataclass
class Step:
    """A plan, and what is to be looked at behind it."""

    plan: StepPlan
    slots: list[int]
    """Of the sampled rows, in the order of the result."""
    late: LateInputs | None = None
    shows: bool = False
    """Its logits are compared."""


def script(bench: Bench, case: Case, vocab: int) -> list[Step]:
    """The same steps for every runner."""
    sizes = Sizes.of(bench)
    made = Maker(vocab, case)
    long, short, middle = sizes.lengths
    if case.pools:
        kinds = ("last", "mean", "last")
        for slot, (length, kind) in enumerate(zip(sizes.lengths, kinds, strict=True)):
            made.add(slot, length, pooling=POOLING_CODES[kind])
        return [
            made.step({0: sizes.chunk, 1: short}, []),
            made.step({0: long - sizes.chunk, 2: middle}, []),
        ]
    for slot, length in enumerate(sizes.lengths[:2]):
        made.add(slot, length, is_told=True)
    found = [
        made.step({0: sizes.chunk, 1: short}, [], [1]),
        made.step({0: long - sizes.chunk}, [1], [1, 0]),
    ]
    made.add(2, middle, is_told=True)
    found.append(made.step({2: middle}, [1, 0], [1, 0, 2]))
    found += [made.step({}, [1, 0, 2], [1, 0, 2]) for _ in range(4)]
    # Few rows that want nothing but a token: the product with the head draws it.
    made.add(3, 20, seed=7, temperature=0.8)
    made.add(4, 12)
    found.append(made.step({3: 20, 4: 12}, [], [3, 4], shows=False))
    found += [made.step({}, [3, 4], [3, 4], shows=False) for _ in range(6)]
    made.add(5, 9, seed=9, temperature=1.0, top_k=20, top_p=0.9)
    found.append(made.step({5: 9}, [3, 4], [3, 4, 5], shows=False))
    found += [made.step({}, [3, 4, 5], [3, 4, 5], shows=False) for _ in range(3)]
    crowd = list(range(6, 6 + sizes.crowd))
    for slot in crowd:
        made.add(slot, 10 + slot % 3, is_told=True)
    found.append(made.step({slot: 10 + slot % 3 for slot in crowd}, [], crowd))
    found += [made.step({}, crowd, crowd) for _ in range(2)]
    return found


class Maker:
    """Plans, as a scheduler would make them. Each request has all of its blocks from its first step on."""

    def __init__(self, vocab: int, case: Case) -> None:
        self._vocab, self._case = vocab, case
        self._new: list[tuple[NewRow, list[int], int]] = []
        self._rules: list[tuple[int, int, SamplingRules]] = []
        self._draw = np.random.default_rng(0)
        self._next_block = self._number = 0

    def add(
        self, slot: int, length: int, *, is_told: bool = False, prompt: list[int] | None = None, **row: Any
    ) -> None:
        """A request of the next step. is_told: with log-probabilities, and the rules of its slot."""
        tokens = prompt or self._draw.integers(0, self._vocab, length).tolist()
        adapter = slot % 3 if self._case.has_adapters else 0
        blocks = -(-(length + 80) // 64)
        self._new.append((NewRow(slot, length, adapter_id=adapter, **row), tokens, blocks))
        if is_told:
            rules = SamplingRules(num_logprobs=2, **self._case.rules.get(slot, {}))
            self._rules.append((slot, length, rules))

    def ask(self, slot: int, first: int) -> None:
        """Log-probabilities of the prompt from this position on."""
        self._rules.append((slot, first, SamplingRules(num_prompt_logprobs=1)))

    def step(
        self,
        prefill: dict[int, int],
        decode: list[int],
        slots: list[int] | None = None,
        *,
        shows: bool = True,
        **more: Any,
    ) -> Step:
        """slots: of the rows that sample."""
        new, rules, slots = self._new, self._rules, slots or []
        self._new, self._rules = [], []
        columns: dict[str, Any] = {}
        if new:
            count = sum(blocks for _, _, blocks in new)
            columns = {
                "new_rows": pack_rows(row for row, _, _ in new),
                "new_tokens": np.array([token for _, tokens, _ in new for token in tokens], np.int32),
                "new_num_blocks": np.array([blocks for _, _, blocks in new], np.int32),
                "new_blocks": np.arange(self._next_block, self._next_block + count, dtype=np.int32),
            }
            self._next_block += count
        if rules:
            columns["new_rules"], columns["new_rule_numbers"] = encode_rules(rules)
        late: LateInputs | None = None
        if self._case.has_masks and shows and 1 in slots:
            columns["late_slots"] = np.array([1], np.int32)
            late = self._mask()
        plan = StepPlan(
            step=self._number,
            prefill_slots=np.array(list(prefill), np.int32),
            prefill_counts=np.array(list(prefill.values()), np.int32),
            decode_slots=np.array(decode, np.int32),
            **columns,
            **more,
        )
        self._number += 1
        return Step(plan, slots, late, shows)

    def _mask(self) -> LateInputs:
        """Slot 1 chooses even and odd ids in turn."""
        ids = np.arange(-(-self._vocab // 32) * 32)
        words = np.packbits(ids % 2 == self._number % 2, bitorder="little").view(np.uint32)
        return LateInputs(step=self._number, slots=np.array([1], np.int32), allowed=words)


@dataclass
class Seen:
    """What a runner made of a script."""

    tokens: list[list[int]] = field(default_factory=list)
    logits: list[torch.Tensor | None] = field(default_factory=list)
    """float32 [num_rows, vocab_size]; of a model that pools its vectors [1, ...]."""
    logprob_error: float = 0.0
    num_bad: int = 0
    """Rows that were not finite."""


@torch.inference_mode()
def follow(bench: Bench, case: Case, runner: CudaRunner, expected: Seen | None = None) -> Seen:
    """Go through the script. expected: whose tokens each row goes on with; None: its own."""
    seen, forced = Seen(), [-1]
    learn = runner._learn

    def learn_forced(slots: Any, owners: Any, tokens: Any) -> None:
        learn(slots, owners, tokens if expected is None else np.array(expected.tokens[forced[0]], np.int32))

    runner._learn = learn_forced  # type: ignore[method-assign]
    try:
        for i, step in enumerate(script(bench, case, runner.model_config.vocab_size)):
            forced[0] = i
            result = runner.step(step.plan, step.late)
            _see(case, runner, step, result, seen)
            if expected is not None and step.slots:
                device = runner.device
                with device.active():
                    at, tokens = device.upload_parts(
                        np.array(step.slots, np.int32), np.array(expected.tokens[i], np.int32)
                    )
                    runner.state.last_token.index_copy_(0, at.long(), tokens)
    finally:
        runner._learn = learn  # type: ignore[method-assign]
    return seen


def _see(case: Case, runner: CudaRunner, step: Step, result: StepResult, seen: Seen) -> None:
    seen.tokens.append(result.tokens.tolist())
    seen.num_bad += len(result.nonfinite_rows) + len(result.nonfinite_prefills)
    shown: torch.Tensor | None = None
    if case.pools:
        shown = torch.from_numpy(np.array(result.vectors)).view(len(result.vector_rows), -1)
    elif step.shows and step.slots:
        with runner.device.active():
            shown = runner.sampler.logits[: len(step.slots)].clone().cpu()
    seen.logits.append(shown)
    if shown is None or case.rules or case.pools:
        return  # rules change logits behind what is told of them
    logprobs = shown.log_softmax(1)
    for span in spans_of(result):
        of_row = logprobs[span.row][torch.from_numpy(span.ids[0].astype(np.int64))]
        error = float((of_row - torch.from_numpy(np.array(span.values[0]))).abs().max())
        seen.logprob_error = max(seen.logprob_error, error)


def record(bench: Bench, runner: CudaRunner) -> None:
    """Record the steps that are compared: launched, they would take the same kernels, but show nothing of graphs."""
    graphs, crowd = runner.graphs, Sizes.of(bench).crowd
    if not runner._records:
        return
    most = runner._max_rows
    for size in dict.fromkeys(graphs.size_for(min(count, most)) for count in (1, 2, 3, 15, crowd)):
        for part in (runner._way_part(size), GraphPart.LOGITS, GraphPart.FORWARD):
            for is_adapted in runner._kinds:
                graphs.want(part.of_step(is_adapted), size)
        graphs.want(GraphPart.CHOICE, size)
    while runner.record_next():
        pass


def prepared(bench: Bench, case: Case, folder: Path) -> Seen:
    """The checkpoint in its folder, and what the CPU makes of it; both are kept."""
    path = place(folder, case)
    kept = path.with_suffix(".pt")
    if kept.is_file():
        return Seen(**torch.load(kept))
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(path)  # half of it, of a process that was ended
    write(case, path)
    for slot, rank in ADAPTERS.items() if case.has_adapters else ():
        write_adapter(path / f"adapter{slot}", case.config, slot, rank)
    seen = Seen()
    if not case.drafts:
        with runner_of(bench, case, path, is_oracle=True) as runner:
            seen = follow(bench, case, runner)
    new = kept.with_suffix(".new")
    torch.save(vars(seen), new)
    new.rename(kept)  # whole, or not at all
    return seen


def measure(bench: Bench, case: Case, folder: Path, bases: Bases) -> dict[str, Any]:
    """The row of a case. Raises whatever stops it."""
    expected = prepared(bench, case, folder)
    path = place(folder, case)
    if case.drafts:
        return streams(bench, case, path, bases)
    base = bases(case.beside) if case.is_timed else None
    with runner_of(bench, case, path, is_timed=case.is_timed) as runner:
        record(bench, runner)
        with as_it_was(runner):
            row = compared(case, follow(bench, case, runner, expected), expected)
        verdict = steps.verdict_of(runner)
        counts = {"replays": runner.graphs.num_replays, "launched parts": runner.graphs.num_launched}
        row |= {"verdict": verdict, "right": row["right"] and verdict == "right", **counts}
        if case.is_timed:
            try:
                row["steps"] = timed(bench, case, runner, base)
            except Exception as problem:  # what was compared stays
                traceback.print_exc()
                row["problem"] = f"not timed: {one_line(problem)}"
                row["right"] = False
        return row


def compared(case: Case, found: Seen, expected: Seen) -> dict[str, Any]:
    """How far logits, tokens and log-probabilities are off."""
    errors = [
        errors_of(one, other)
        for one, other in zip(found.logits, expected.logits, strict=True)
        if one is not None and other is not None
    ]
    of_rows = torch.cat(errors)
    error = float(of_rows.quantile(OF_MOST_ROWS if case.has_experts else 1.0))
    pairs = [
        (a, b)
        for one, other in zip(found.tokens, expected.tokens, strict=True)
        for a, b in zip(one, other, strict=True)
    ]
    same = sum(a == b for a, b in pairs) / max(1, len(pairs))
    notes = []
    if found.num_bad:
        notes.append(f"{found.num_bad} rows are not finite")
    if found.logprob_error > LOGPROB_ERROR:
        notes.append(f"log-probabilities are off by {found.logprob_error:.2g}")
    if pairs and same < MIN_SAME_TOKENS:
        notes.append("other tokens")
    return {
        "right": error <= case.tolerance and not notes,
        "error": error,
        "limit": case.tolerance,
        "worst row": float(of_rows.max()),
        "same tokens": same if pairs else None,
        "note": "; ".join(notes),
    }


def errors_of(found: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """By row, the root mean square of the differences by the standard deviation of what is expected; infinite where it is not."""
    is_number = expected.isfinite()
    if not torch.equal(found.isfinite(), is_number):
        return torch.full((len(expected),), torch.inf)
    x, y = (one.double().masked_fill(~is_number, 0.0) for one in (found, expected))
    count = is_number.sum(1)
    mean = (y.sum(1) / count).unsqueeze(1)
    variance = ((y - mean).square() * is_number).sum(1) / count
    return ((x - y).square().sum(1) / count / variance).sqrt().float()


# How long it takes ------------------------------------------------------------------------------------------------------


def timed(bench: Bench, case: Case, runner: CudaRunner, base: CudaRunner | None) -> list[dict[str, Any]]:
    """Decode steps, and their ratio to those of the base."""
    found, sizes = [], Sizes.of(bench)
    for batch in sizes.batches:
        row: dict[str, Any] = {"batch": batch, "context": sizes.context}
        with torch.inference_mode(), runner.device.active():  # one stream, which the clock is on
            call, before, count = calls_of(bench, runner, batch, sizes.context)
            samples = [seconds / count for seconds in bench.samples(call, before=before)]
            low, high = interval(samples)
            row |= {"step, ms": statistics.median(samples) * 1e3, "from, ms": low * 1e3, "to, ms": high * 1e3}
            row |= {"ratio": None, "ratio from": None, "ratio to": None}
            if base is not None:
                first, before_first, _ = calls_of(bench, base, batch, sizes.context)
                ratios = bench.paired((first, call), (before_first, before))
                low, high = interval(ratios)
                row |= {"ratio": statistics.median(ratios), "ratio from": low, "ratio to": high}
        found.append(row)
    return found


def calls_of(
    bench: Bench, runner: CudaRunner, batch: int, context: int
) -> tuple[Callable[[], Any], Callable[[], Any], int]:
    """As `steps.step_calls`. Of a runner with adapters, all rows have one."""
    call, before, count = steps.step_calls(bench, runner, batch, context, is_recorded=runner.graphs.is_on)
    if runner.adapters is None:
        return call, before, count
    slots = np.resize(np.array(list(ADAPTERS), np.int32), batch)
    runner.state.adapters[:batch].copy_(runner.device.upload(slots))
    size = runner.graphs.size_for(batch)
    part = runner._way_part(size).of_step(True)
    if runner.graphs.is_on and (part, size) not in runner.graphs:
        runner.graphs.record((part, size))
        if (part, size) not in runner.graphs:
            raise RuntimeError(f"a step of {size} rows with adapters cannot be recorded; the log says why")
    return lambda: [runner.graphs.run(part, size) for _ in range(count)], before, count


# Drafts -----------------------------------------------------------------------------------------------------------------


def streams(bench: Bench, case: Case, path: Path, bases: Bases) -> dict[str, Any]:
    """Greedy streams with drafts, and without: where they part, and whether each token is the likeliest."""
    base = bases(BASE)
    if base is None:
        raise RuntimeError("the plain model is not right, so nothing can be held against it")
    number = Sizes.of(bench).stream
    with as_it_was(base), runner_of(bench, case, path) as runner:
        for one in (base, runner):
            record(bench, one)
        for _ in range(2):  # the first round warms up
            plain, _, plain_s = stream(case, base, number, 0)
            drafted, num_steps, drafted_s = stream(case, runner, number, case.drafts)
        verdict = steps.verdict_of(runner)
        unlikely, other = (num_unlikely(case, base, found) for found in (drafted, plain))
    same, count = [_same(*pair) for pair in zip(plain, drafted, strict=True)], number * len(drafted)
    lengths = ", ".join(map(str, same))
    note = (
        f"{count / num_steps:.2f} tokens a step of {len(drafted)} rows, {drafted_s / plain_s:.2f} of the time without drafts; "
        f"equal for {lengths} of {number} tokens; not the likeliest: {unlikely} of {count} (without drafts {other})"
    )
    return {
        "right": verdict == "right" and not unlikely,
        "verdict": verdict,
        "same tokens": sum(same) / count,
        "note": note,
    }


def _same(one: list[int], other: list[int]) -> int:
    """How many tokens they begin with alike."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), len(one))


def draft_prompts(vocab: int) -> list[list[int]]:
    """Something to copy."""
    draw = np.random.default_rng(1)
    return [draw.integers(0, vocab, length).tolist() * 3 for length in (9, 14, 5)]


def stream(case: Case, runner: CudaRunner, number: int, most: int) -> tuple[list[list[int]], int, float]:
    """So many greedy tokens of each prompt, with up to `most` drafts a step; decode steps, and their seconds."""
    vocab = runner.model_config.vocab_size
    prompts, made = draft_prompts(vocab), Maker(vocab, case)
    slots, more = range(len(prompts)), {"max_drafts": most} if most else {}
    for slot, prompt in enumerate(prompts):
        made.add(slot, len(prompt), prompt=prompt)
    runner.forget_requests()
    prefill = {slot: len(prompt) for slot, prompt in enumerate(prompts)}
    first = runner.step(made.step(prefill, [], list(slots)).plan)
    found, num_steps = [[token] for token in first.tokens.tolist()], 0
    began = time.perf_counter()
    while left := [slot for slot in slots if len(found[slot]) < number]:
        result = runner.step(made.step({}, left, left, **more).plan)
        counts = result.counts.tolist() if result.counts.size else [1] * len(left)
        tokens = iter(result.tokens.tolist())
        for slot, count in zip(left, counts, strict=True):
            found[slot] += [next(tokens) for _ in range(count)]
        num_steps += 1
    return [row[:number] for row in found], num_steps, time.perf_counter() - began


def num_unlikely(case: Case, base: CudaRunner, found: list[list[int]]) -> int:
    """How many tokens of these streams are not the likeliest behind those before them, all computed as prompts."""
    vocab = base.model_config.vocab_size
    made, prefill = Maker(vocab, case), {}
    for slot, (prompt, tokens) in enumerate(zip(draft_prompts(vocab), found, strict=True)):
        whole = prompt + tokens
        made.add(slot, len(whole), prompt=whole)
        made.ask(slot, len(prompt))
        prefill[slot] = len(whole)
    base.forget_requests()
    result = base.step(made.step(prefill, [], list(prefill)).plan)
    gaps = [span.values[:, 1:].max(1) - span.values[:, 0] for span in spans_of(result) if span.is_prompt]
    of_all = np.concatenate(gaps)
    if len(of_all) != sum(map(len, found)):
        raise RuntimeError(f"{len(of_all)} log-probabilities of {sum(map(len, found))} tokens came")
    return int((of_all > ALMOST_LIKELIEST).sum())
