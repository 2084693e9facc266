"""`LogitRules`: what requests want done to their logits before a token is chosen, applied to all rows at once.

The order is vLLM's. Allowed ids, bad words and min_tokens take ids out (they become -inf), then biases are added. Then come the
repetition, frequency and presence penalties; temperature and the filters of the sampler follow. Penalties touch the tokens that a
request has seen, so they are kept as one entry per slot and distinct token. Memory and time go with those, not with slots times
vocabulary. The worker counts the tokens that it samples itself (`store`), as it must at depth 2. The plan of the next step was
made before they were known.

Invariants (`check_integrity`): entries exist for live slots only, and each (slot, id) has at most one in each table. Owned
by the persistent batch, which adds and removes slots and stores tokens; the runner calls `apply`. numpy only.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from actorllm.messages import F32, I32, U32, LateInputs
from actorllm.messages.logit_rules import MAX_COUNT, SamplingRules

I64 = NDArray[np.int64]

LARGEST = np.float32(1e30)
"""A changed logit is at most this, so that no temperature makes an infinity of it that would not be one by itself."""

NO_TOKEN = -1
ANY_TOKEN = -2


class Entries:
    """A table of columns, each entry of which belongs to a slot; grows at its end, and is closed up when slots leave."""

    def __init__(self, **kinds: Any) -> None:
        self._columns: dict[str, NDArray[Any]] = {name: np.zeros(0, kind) for name, kind in kinds.items()}
        self.size = 0

    def __getitem__(self, name: str) -> NDArray[Any]:
        """A view, valid until the table changes size."""
        return self._columns[name][: self.size]

    def append(self, **values: Any) -> None:
        """One entry per element; scalars are the same for all of them."""
        count = max(np.size(value) for value in values.values())
        size = self.size + count
        for name, column in self._columns.items():
            if size > column.size:
                column = np.zeros(max(size, 2 * column.size, 64), column.dtype)
                column[: self.size] = self[name]
                self._columns[name] = column
            column[self.size : size] = values[name]
        self.size = size

    def copied(self) -> Entries:
        other = copy.copy(self)
        other._columns = {name: self[name].copy() for name in self._columns}
        return other

    def keep(self, mask: NDArray[np.bool_]) -> None:
        """Only these entries, in their order."""
        size = int(np.count_nonzero(mask))
        if size < self.size:
            for name, column in self._columns.items():
                column[:size] = self[name][mask]
            self.size = size


@dataclass(slots=True)
class AllowedIds:
    """What one slot may choose from; the shorter of the two lists is kept."""

    ids: I64
    is_allowed: bool
    """False: these are the ids that it may not choose."""
    num_allowed: int

    @classmethod
    def of(cls, allowed: tuple[int, ...], vocab_size: int) -> AllowedIds:
        mask = np.zeros(vocab_size, np.bool_)
        mask[np.array(allowed, np.int64)] = True
        ids = np.flatnonzero(mask)
        if 2 * len(ids) <= vocab_size:
            return cls(ids, True, len(ids))
        return cls(np.flatnonzero(~mask), False, len(ids))

    def bits(self, vocab_size: int) -> U32:
        """The same as a bit mask: bit i % 32 of word i // 32 is set where id i is allowed."""
        mask = np.full(-(-vocab_size // 32) * 32, not self.is_allowed)
        mask[self.ids] = self.is_allowed
        words: U32 = np.packbits(mask, bitorder="little").view(np.uint32)
        return words

    def apply(self, row: F32) -> None:
        if self.is_allowed:
            kept = row[self.ids]
            row[:] = -np.inf
            row[self.ids] = kept
        else:
            row[self.ids] = -np.inf


@dataclass(frozen=True, slots=True)
class EditList:
    """What `LogitRules.apply` would do to single logits, for a device to do it. One entry per row and id that changes."""

    row: I32
    id: I32
    bias: F32
    """-inf takes the id out."""
    count: I32
    """How often the id is in the output; -1: it is not penalized, 0: it is in the prompt only."""
    penalties: F32  # [3, num_rows] presence, frequency, repetition


class Phrases:
    """The bad words that are several tokens: those of every slot, and the tokens that come before the last of each."""

    def __init__(self) -> None:
        self._words = Entries(slot=np.int32, last=np.int64)
        self._before: I32 = np.zeros((0, 0), np.int32)  # [num_words, width]
        self._recent: I32 = np.zeros((0, 0), np.int32)  # [num_slots, width] the last tokens of each slot's output
        self._has_words: NDArray[np.bool_] = np.zeros(0, np.bool_)  # [num_slots]

    def __bool__(self) -> bool:
        return self._words.size > 0

    @property
    def slots(self) -> set[int]:
        return set(self._words["slot"].tolist())

    def add(self, slot: int, words: list[tuple[int, ...]], output: I32) -> None:
        num_words, width = self._before.shape
        before = np.full((num_words + len(words), max(width, max(map(len, words)) - 1)), ANY_TOKEN, np.int32)
        before[:num_words, before.shape[1] - width :] = self._before
        for row, word in enumerate(words, num_words):
            before[row, before.shape[1] - len(word) + 1 :] = word[:-1]
        self._before = before
        self._words.append(slot=slot, last=np.array([word[-1] for word in words]))
        num_slots, old_width = self._recent.shape
        if slot >= num_slots or before.shape[1] > old_width:
            recent = np.full((max(num_slots, 2 * slot + 1), before.shape[1]), NO_TOKEN, np.int32)
            recent[:num_slots, before.shape[1] - old_width :] = self._recent
            has_words = np.zeros(len(recent), np.bool_)
            has_words[:num_slots] = self._has_words
            self._recent, self._has_words = recent, has_words
        self._has_words[slot] = True
        self._recent[slot] = NO_TOKEN
        last = output[-before.shape[1] :]
        self._recent[slot, before.shape[1] - last.size :] = last

    def copied(self) -> Phrases:
        other = copy.copy(self)
        other._recent = self._recent.copy()
        return other

    def remove(self, slots: list[int]) -> None:
        keep = ~np.isin(self._words["slot"], slots)
        if not keep.all():
            self._before = self._before[keep]
            self._words.keep(keep)
            self._has_words[[slot for slot in slots if slot < self._has_words.size]] = False

    def push(self, slots: I32, tokens: I32) -> None:
        """What was sampled for these rows."""
        mine = slots < self._has_words.size
        mine[mine] = self._has_words[slots[mine]]
        slots, tokens = slots[mine], tokens[mine]
        self._recent[slots, :-1] = self._recent[slots, 1:]
        self._recent[slots, -1] = tokens

    def completed_by(self) -> tuple[I32, I64]:
        """Slots, and the ids that would complete one of their words now."""
        slots = self._words["slot"]
        would = ((self._before == self._recent[slots]) | (self._before == ANY_TOKEN)).all(1)
        return slots[would], self._words["last"][would]


def apply_masks(logits: F32, slots: I32, masked_slots: I32, allowed: U32) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Take out, in place, what the masks of some slots do not allow (`messages.LateInputs`).

    logits: [num_rows, vocab_size], slots: of each row. Returns the rows that had a mask, and those whose mask allows nothing.
    """
    vocab_size = logits.shape[1]
    order = np.argsort(slots, kind="stable")
    at = np.minimum(np.searchsorted(slots, masked_slots, sorter=order), slots.size - 1)
    rows = order[at]
    is_here = slots[rows] == masked_slots
    rows = rows[is_here]
    words = allowed.reshape(masked_slots.size, -1)[is_here]
    bits = np.unpackbits(words.view(np.uint8), axis=1, count=vocab_size, bitorder="little").view(np.bool_)
    np.logical_not(bits, out=bits)
    if rows.size == len(logits) and (rows == np.arange(rows.size)).all():
        np.copyto(logits, -np.inf, where=bits)
    else:
        for row, mask in zip(rows.tolist(), bits, strict=True):
            np.copyto(logits[row], -np.inf, where=mask)
    return rows, rows[bits.all(axis=1)]


def masks_behind(late: LateInputs, num_drafts: int, vocab_size: int) -> LateInputs:
    """Of late inputs the masks for the token behind so many drafts, one for each slot that has one."""
    if not late.counts.size:
        return late if not num_drafts else LateInputs(step=late.step)
    kept = late.counts > num_drafts
    where = (np.cumsum(late.counts) - late.counts)[kept] + num_drafts
    masks = late.allowed.reshape(-1, -(-vocab_size // 32))[where]
    return LateInputs(step=late.step, slots=late.slots[kept], allowed=masks.reshape(-1))


def only_choices(slots: I32, late: LateInputs) -> I32 | None:
    """The one token that the mask of each slot allows; None: some slot has a choice."""
    if late.slots.size < slots.size:
        return None
    masks = late.allowed.reshape(late.slots.size, -1)
    rows, words = np.nonzero(masks)
    if rows.size != late.slots.size or (rows != np.arange(rows.size)).any():
        return None
    bits = masks[rows, words]
    if (bits & (bits - np.uint32(1))).any():
        return None
    tokens = 32 * words + np.log2(bits.astype(np.float64)).astype(np.int64)
    of = dict(zip(late.slots.tolist(), tokens.tolist(), strict=True))
    found = [of.get(slot, NO_TOKEN) for slot in slots.tolist()]
    return None if NO_TOKEN in found else np.array(found, np.int32)


class LogitRules:
    """See the module docstring."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.logprob_ids: dict[int, I64] = {}
        """Of slots that want log-probabilities of these ids, and not of the most likely ones."""
        self.num_logprobs: dict[int, int] = {}
        """Of slots that want the log-probabilities of their tokens."""
        self._slots: set[int] = set()  # with anything that `apply` would do
        self._allowed: dict[int, AllowedIds] = {}
        self._phrases = Phrases()
        self._taken_out = Entries(slot=np.int32, id=np.int64, until=np.int32)  # before that many tokens of output
        self._biases = Entries(slot=np.int32, id=np.int64, value=np.float32)
        self._seen = Entries(slot=np.int32, id=np.int64, count=np.int32)  # count: in the output
        self._penalties: F32 = np.zeros((3, 0), np.float32)  # presence, frequency, repetition, by slot
        self._is_penalized: NDArray[np.bool_] = np.zeros(0, np.bool_)
        self._num_penalized = 0

    @property
    def is_used(self) -> bool:
        """Whether any slot has a rule or wants log-probabilities."""
        return bool(self._slots or self.num_logprobs)

    @property
    def has_memory(self) -> bool:
        """Whether any slot's rules depend on what was sampled for it (`store`)."""
        return bool(self._num_penalized or self._phrases)

    def add(self, slot: int, rules: SamplingRules, prompt: I32, output: I32) -> None:
        """A new slot with rules. prompt, output: its tokens so far."""
        if rules.allowed_ids:
            self._slots.add(slot)
            self._allowed[slot] = AllowedIds.of(rules.allowed_ids, self.vocab_size)
        if rules.bad_words:
            self._slots.add(slot)
            # A bad word of one token is an id that is never allowed; a longer one depends on the tokens before.
            single = [word[0] for word in rules.bad_words if len(word) == 1]
            if single:
                self._taken_out.append(slot=slot, id=np.unique(single), until=MAX_COUNT)
            longer = [word for word in rules.bad_words if len(word) > 1]
            if longer:
                self._phrases.add(slot, longer, output)
        if rules.bias_ids:
            self._slots.add(slot)
            self._biases.append(slot=slot, id=np.array(rules.bias_ids), value=np.array(rules.biases, np.float32))
        if rules.has_penalties:
            self._slots.add(slot)
            self._penalize(slot, rules, prompt, output)
        if rules.num_logprobs >= 0:
            self.num_logprobs[slot] = rules.num_logprobs
            if rules.logprob_ids:
                self.logprob_ids[slot] = np.array(rules.logprob_ids, np.int64)

    def hold_back(self, slot: int, ids: I64, until: int) -> None:
        """The slot must not sample these ids before it has so many tokens of output."""
        if ids.size:
            self._slots.add(slot)
            self._taken_out.append(slot=slot, id=np.unique(ids), until=until)

    def _penalize(self, slot: int, rules: SamplingRules, prompt: I32, output: I32) -> None:
        if slot >= self._is_penalized.size:
            size = max(slot + 1, 2 * self._is_penalized.size)
            penalties, is_penalized = np.zeros((3, size), np.float32), np.zeros(size, np.bool_)
            penalties[:, : self._is_penalized.size] = self._penalties
            is_penalized[: self._is_penalized.size] = self._is_penalized
            self._penalties, self._is_penalized = penalties, is_penalized
        self._penalties[:, slot] = rules.presence_penalty, rules.frequency_penalty, rules.repetition_penalty
        self._is_penalized[slot] = True
        self._num_penalized += 1
        # The prompt matters to the repetition penalty only.
        tokens = np.concatenate((prompt, output)) if rules.repetition_penalty != 1 else output
        ids = np.unique(tokens)
        counts = np.zeros(ids.size, np.int32)
        if output.size:
            found, times = np.unique(output, return_counts=True)
            counts[np.searchsorted(ids, found)] = times
        if ids.size:
            self._seen.append(slot=slot, id=ids, count=counts)

    def remove(self, slots: I32) -> None:
        """These slots are free; most of them never had a rule."""
        gone = [slot for slot in slots.tolist() if slot in self._slots]
        for slot in slots.tolist():
            if self.num_logprobs.pop(slot, None) is not None:
                self.logprob_ids.pop(slot, None)
        if not gone:
            return
        for slot in gone:
            self._slots.discard(slot)
            self._allowed.pop(slot, None)
            if slot < self._is_penalized.size and self._is_penalized[slot]:
                self._is_penalized[slot] = False
                self._num_penalized -= 1
        self._phrases.remove(gone)
        for table in (self._taken_out, self._biases, self._seen):
            table.keep(~np.isin(table["slot"], gone))

    def trial(self) -> LogitRules:
        """The same rules, in which tokens may be stored that are only guessed. No slot may come or go in it."""
        other = copy.copy(self)
        other._taken_out, other._seen = self._taken_out.copied(), self._seen.copied()
        other._phrases = self._phrases.copied()
        return other

    def store(self, slots: I32, tokens: I32) -> None:
        """What was sampled for these rows."""
        if self._num_penalized:
            self._count(slots, tokens)
        if self._phrases:
            self._phrases.push(slots, tokens)

    def _count(self, slots: I32, tokens: I32) -> None:
        mine = slots < self._is_penalized.size
        mine[mine] = self._is_penalized[slots[mine]]
        slots, tokens = slots[mine], tokens[mine]
        if not slots.size:
            return
        token_of = np.full(self._is_penalized.size, NO_TOKEN, np.int64)
        token_of[slots] = tokens
        known = self._seen["id"] == token_of[self._seen["slot"]]
        self._seen["count"][known] += 1
        token_of[self._seen["slot"][known]] = NO_TOKEN
        new = token_of[slots] != NO_TOKEN
        if new.any():
            self._seen.append(slot=slots[new], id=tokens[new], count=1)

    def concerns(self, slots: I32) -> bool:
        """Whether `apply` has anything to do for these rows; that changes only with the slots' owners."""
        return bool(self._slots) and not self._slots.isdisjoint(slots.tolist())

    def apply(self, logits: F32, slots: I32, num_outputs: I32) -> NDArray[np.intp]:
        """Change the logits of these rows, [num_rows, vocab_size], in place. Returns the rows with nothing left to choose.

        num_outputs: how many tokens of output each row has.
        """
        row_of = np.full(int(max(slots.max(initial=0), max(self._slots, default=0))) + 1, -1, np.intp)
        row_of[slots] = np.arange(slots.size)
        num_out = np.zeros(slots.size, np.int64)  # ids taken out, by row; some perhaps twice
        for slot, allowed in self._allowed.items():
            row = int(row_of[slot])
            if row >= 0:
                allowed.apply(logits[row])
                num_out[row] = self.vocab_size - allowed.num_allowed
        self._take_out(logits, row_of, num_outputs, num_out)
        if self._phrases:
            completing, ids = self._phrases.completed_by()
            rows = row_of[completing]
            rows, ids = rows[rows >= 0], ids[rows >= 0]
            logits[rows, ids] = -np.inf
            num_out += np.bincount(rows, minlength=num_out.size)
        suspects = np.flatnonzero(num_out >= self.vocab_size)
        exhausted = suspects[logits[suspects].max(axis=1, initial=-np.inf) == -np.inf] if suspects.size else suspects
        self._add_biases(logits, row_of)
        if self._num_penalized:
            self._apply_penalties(logits, row_of)
        return exhausted

    def edits(self, slots: I32, num_outputs: I32) -> EditList:
        """The same as `apply`, but for allowed ids (`masks`), as a list."""
        row_of = np.full(int(max(slots.max(initial=0), max(self._slots, default=0))) + 1, -1, np.intp)
        row_of[slots] = np.arange(slots.size)
        penalties = np.zeros((3, slots.size), np.float32)
        penalties[2] = 1
        parts: list[tuple[NDArray[np.intp], I64, F32, I32]] = []

        def add(of: I32, ids: I64, bias: F32, count: I32) -> None:
            rows = row_of[of]
            is_here = rows >= 0
            parts.append((rows[is_here], ids[is_here], bias[is_here], count[is_here]))

        table = self._taken_out
        if table.size:
            rows = row_of[table["slot"]]
            is_over = (rows >= 0) & (num_outputs[rows] >= table["until"])
            if is_over.any():
                table.keep(~is_over)
            add(table["slot"], table["id"], *_constant(table.size, -np.inf, -1))
        if self._phrases:
            completing, ids = self._phrases.completed_by()
            add(completing, ids, *_constant(ids.size, -np.inf, -1))
        if self._biases.size:
            _, no_count = _constant(self._biases.size, 0, -1)
            add(self._biases["slot"], self._biases["id"], self._biases["value"], no_count)
        if self._num_penalized:
            no_bias, _ = _constant(self._seen.size, 0, -1)
            add(self._seen["slot"], self._seen["id"], no_bias, self._seen["count"])
            mine = np.flatnonzero(slots < self._is_penalized.size)
            mine = mine[self._is_penalized[slots[mine]]]
            penalties[:, mine] = self._penalties[:, slots[mine]]
        rows, ids, bias, count = (np.concatenate(columns) for columns in zip(*parts, strict=True)) if parts else _NONE
        keys, place = np.unique(rows * self.vocab_size + ids, return_inverse=True)
        if keys.size < rows.size:  # an id of a row in several tables: a bias and a penalty are one entry
            biases, counts = np.zeros(keys.size, np.float32), np.full(keys.size, -1, np.int32)
            np.add.at(biases, place, bias)
            np.maximum.at(counts, place, count)
            rows, ids, bias, count = keys // self.vocab_size, keys % self.vocab_size, biases, counts
        return EditList(rows.astype(np.int32), ids.astype(np.int32), bias, count, penalties)

    def masks(self, slots: I32) -> dict[int, U32]:
        """By row, the bit mask of those that may choose only some ids (`AllowedIds.bits`)."""
        found = [(row, self._allowed.get(slot)) for row, slot in enumerate(slots.tolist())] if self._allowed else []
        return {row: allowed.bits(self.vocab_size) for row, allowed in found if allowed is not None}

    def _take_out(self, logits: F32, row_of: NDArray[np.intp], num_outputs: I32, num_out: I64) -> None:
        table = self._taken_out
        if not table.size:
            return
        rows = row_of[table["slot"]]
        is_here = rows >= 0
        is_over = is_here & (num_outputs[rows] >= table["until"])
        is_here &= ~is_over
        rows = rows[is_here]
        logits[rows, table["id"][is_here]] = -np.inf
        num_out += np.bincount(rows, minlength=num_out.size)
        if is_over.any():
            table.keep(~is_over)

    def _add_biases(self, logits: F32, row_of: NDArray[np.intp]) -> None:
        table = self._biases
        if not table.size:
            return
        rows, ids, values = row_of[table["slot"]], table["id"], table["value"]
        is_here = rows >= 0
        if not is_here.all():
            rows, ids, values = rows[is_here], ids[is_here], values[is_here]
        logits[rows, ids] = np.minimum(logits[rows, ids] + values, LARGEST)

    def _apply_penalties(self, logits: F32, row_of: NDArray[np.intp]) -> None:
        slots, ids, counts = self._seen["slot"], self._seen["id"], self._seen["count"]
        rows = row_of[slots]
        is_here = rows >= 0
        if not is_here.all():
            slots, rows, ids, counts = slots[is_here], rows[is_here], ids[is_here], counts[is_here]
        presence, frequency, repetition = self._penalties[:, slots]
        values = logits[rows, ids]
        with np.errstate(over="ignore", divide="ignore"):  # cut below; a penalty may be the least that there is
            values = np.where(values > 0, values / repetition, values * repetition)
        values = np.minimum(values, LARGEST)
        values -= frequency * counts.astype(np.float32)
        values -= presence * (counts > 0)
        logits[rows, ids] = values

    def check_integrity(self, live: set[int]) -> None:
        """Raises AssertionError when an invariant of the module does not hold."""
        assert self._slots <= live, "rules kept of a dead slot"
        assert set(self.logprob_ids) <= set(self.num_logprobs) <= live, "logprobs kept of a dead slot"
        assert set(self._allowed) | self._phrases.slots <= self._slots, "rules of a slot that has none"
        assert self._num_penalized == int(self._is_penalized.sum()), "count of penalties"
        for table in (self._taken_out, self._biases, self._seen):
            assert set(table["slot"].tolist()) <= self._slots, "an entry of a slot without rules"
        for table in (self._biases, self._seen):
            pairs = list(zip(table["slot"].tolist(), table["id"].tolist(), strict=True))
            assert len(set(pairs)) == len(pairs), "an id of a slot is there twice"


def _constant(size: int, bias: float, count: int) -> tuple[F32, I32]:
    return np.full(size, bias, np.float32), np.full(size, count, np.int32)


_NONE = (np.zeros(0, np.intp), np.zeros(0, np.int64), np.zeros(0, np.float32), np.zeros(0, np.int32))
