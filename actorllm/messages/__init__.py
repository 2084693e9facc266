"""Every message of the engine, grouped by its receiver. One closed set of types per inbox.

A message is columns: scalars, and one-dimensional numpy arrays that travel as binary segments. `pack` and `unpack` turn
a message into `(kind, scalars, arrays)` and back. `actorllm.ring.codec` carries that over a ring; in the inline topology the
object itself is handed over. The sender of a message never changes its arrays afterwards.

Commands are imperatives to their receiver (Submit, Abort, StepPlan), facts are reports from their sender (StepResult,
Outputs). Rows name requests by small integers: `rid` between a frontend and the scheduler (unique per frontend), `slot`
between the scheduler and the workers. Times are CLOCK_MONOTONIC seconds.
"""

from __future__ import annotations

import reprlib
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from actorllm.messages.schema import EMPTY, SCHEMA, getter_of

I32: TypeAlias = NDArray[np.int32]
I64: TypeAlias = NDArray[np.int64]
U8: TypeAlias = NDArray[np.uint8]
U32: TypeAlias = NDArray[np.uint32]
F32: TypeAlias = NDArray[np.float32]
F64: TypeAlias = NDArray[np.float64]

NO_I32: I32 = EMPTY["i4"]
NO_I64: I64 = EMPTY["i8"]
NO_U8: U8 = EMPTY["u1"]
NO_U32: U32 = EMPTY["u4"]
NO_F32: F32 = EMPTY["f4"]


def no_i32() -> I32:
    return NO_I32


def no_i64() -> I64:
    return NO_I64


def no_u8() -> U8:
    return NO_U8


def no_u32() -> U32:
    return NO_U32


def no_f32() -> F32:
    return NO_F32


# To the scheduler, from a frontend ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Submit:
    """Start a request, or go on with one: `output` holds what was already emitted (empty at first).

    The prompt and the emitted prefix travel apart because limits, penalties, stop text and metrics need the border.
    Sampling continues at token index len(output), so the same message serves first start, hand-back and crash.
    """

    rid: int
    arrival: float
    prompt: I32
    output: I32 = field(default_factory=no_i32)
    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    sample_index: int = 0
    siblings: I32 = field(default_factory=no_i32)
    """The rids of the other sequences of this request, which come with this message (`sequences_of`)."""
    fork_of: int | None = None
    """The rid of a sibling with the same prompt: it computes the prompt, and this request takes that over."""
    num_sequences: int = 1
    """Of the request that this is one sequence of (`sequences_of`): they are refused together."""
    # After the death of a scheduler, the next six fields tell the next one what is known of the request. Three keep its
    # place; three are for the search for the request that schedulers die of. They have their defaults before any death.
    is_resumed: bool = False
    """A scheduler had taken it before: it is never refused for want of room, and no policy turns it away."""
    had_slot: bool = False
    """A scheduler before this one said that it had started (`PauseChanged`), whether or not a token of it came."""
    first_token: float | None = None
    """When the first of `output` was sent, in monotonic seconds, if a scheduler before this one did that."""
    num_deaths: int = 0
    """Schedulers in a row that may have died of it (`supervision.blame.scheduler_deaths`)."""
    probe_size: int = 0
    """Members of its probe group when one of them last died of a group with it; 0: of none (`supervision.blame.bisection`)."""
    num_losses: int = 0
    """Schedulers in a row that died before its frontend had a token of any request."""
    ignore_eos: bool = False
    stop_token_ids: Sequence[int] = ()
    stop: Sequence[str] = ()
    include_stop: bool = False
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    stream_interval: int = 1
    """New tokens per row of Outputs; the first one comes at once. 0: everything comes with the end."""
    priority: int = 0
    slo: Sequence[float | None] | None = None
    is_latency_sensitive: bool = False
    type_info: str | None = None
    tenant: str | None = None
    deadline: float | None = None
    blocked_on: str | None = None
    """Not admitted before an `Unblock`; the reason (grammar compiling, remote KV, encoder) is shown in statistics."""
    pooling: str | None = None
    """Ends at prefill: the worker returns a vector instead of a token, made of its states in this way (`POOLING_CODES`)."""
    is_chunkable: bool = True
    """False: the whole prompt goes through in one step or not at all."""
    rules: dict[str, Any] | None = None
    """What is to be done to its logits and told of its probabilities (`logit_rules.SamplingRules.to_fields`); None: nothing."""
    grammar: dict[str, Any] | None = None
    """What its output must match (`structured_outputs.StructuredOutputsParams.to_fields`); None: nothing."""
    needs_late_inputs: bool = False
    """The worker runs this row's forward, then waits for `LateInputs` before it samples."""
    adapter: str | None = None
    """The digest of the adapter that it is computed with (`types.adapter_folder`), part of what the block hashes cover."""
    adapter_path: str | None = None
    """Where the workers read it."""
    block_hashes: U8 = field(default_factory=no_u8)
    """32 bytes for every full block of the prompt, made by the frontend (kvcache.prefix_index). Without them the request
    neither finds anything in the prefix cache nor leaves anything there."""
    cache_salt: str | None = None
    """Part of what the block hashes cover: only requests with the same salt share KV."""
    skip_reading_prefix_cache: bool = False
    """The whole prompt is computed, whatever is cached; what it leaves behind can be found. So it is anyway while
    log-probabilities of the prompt are to come."""
    prompt_embeds: U8 = field(default_factory=no_u8)
    """Of every position of the prompt whose id is below zero (`embeds`), its row in the bytes of the model's dtype."""
    name: str | None = None
    """The caller's request_id, where the scheduler is recorded: for readers of the recording."""
    processor_params: U8 = field(default_factory=no_u8)
    """What the engine's logits processors are told of it (`actorllm.types.logits_processors.travel`); empty: nothing."""
    pair_start: int = 0
    """Of a pair of texts, of which the model tells the tokens of the second apart: where these begin; 0: it does not."""
    weights: str = ""
    """The identity of the weights that `block_hashes` are of (`WeightSource.identity`), as far as its frontend knew."""
    hands_off: bool = False
    """Once its prompt is computed, another replica may copy the KV (`KvOffer`), and go on with it."""
    kv_lease: I64 = field(default_factory=no_i64)
    """What it may copy of another replica: [replica, slot, number, blocks] of a lease (`tiers.leases`); empty: nothing."""

    @property
    def has_started(self) -> bool:
        """Under another scheduler, as far as is known: a pause that waits for what has started waits for it."""
        return self.had_slot or self.output.size > 0


def sequences_of(submit: Submit) -> list[Submit]:
    """Every sequence of a request as a request of its own: the first, and its siblings as forks of it.

    They differ in their sample index, and only the first one tells of its prompt.
    """
    if not submit.siblings.size:
        return [submit]
    first = replace(submit, siblings=NO_I32, num_sequences=1 + submit.siblings.size)
    rules = submit.rules
    if rules is not None and "num_prompt_logprobs" in rules:
        rules = {name: value for name, value in rules.items() if name != "num_prompt_logprobs"} or None
    forks = [
        replace(first, rid=rid, sample_index=submit.sample_index + 1 + i, fork_of=submit.rid, rules=rules)
        for i, rid in enumerate(submit.siblings.tolist())
    ]
    return [first, *forks]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Abort:
    """Forget these requests and free their blocks. Unknown rids are ignored: they ended meanwhile.

    Of none: over a link that is not the first, all requests of before have been submitted again.
    """

    rids: I32


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Unblock:
    """What the request waited for is there (error is None), or will never be (the request fails with it)."""

    rid: int
    error: str | None = None


# To the scheduler, from a worker --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class StepResult:
    """What one step sampled. Only `EngineConfig.reporting_rank` has tokens; other ranks answer with empty columns.

    Rows are in the order of the plan: decode rows, then the prefill rows that reached the end of their known tokens, then the
    forks, which have one token each.
    counts is empty when every row carries exactly one token; else it says how many (0 and more) of `tokens` each has.
    vector_rows and vectors: pooled rows and their vectors, concatenated. nonfinite_rows: rows whose logits held NaN or
    infinity (nonfinite_counts says how many; none: one each), or whose parameters left nothing to choose (0); their token
    is void. nonfinite_prefills: those of the plan's prefill rows whose states are not finite, be they through or not; what
    they had written is cleared. errors: of each of nonfinite_rows, why a logits processor has failed, or an empty text
    (`actorllm.types.logits_processors.travel`); none: of no row. num_drafted: how many drafts of each row were checked; none:
    there were no drafts. A row has at most one token more than drafts.
    logprob_*: for rows that asked (see `actorllm.messages.logprobs`). The row of a span is that of the result, of a prompt's span
    that of the plan's prefill rows.
    """

    step: int
    tokens: I32 = field(default_factory=no_i32)
    counts: I32 = field(default_factory=no_i32)
    vector_rows: I32 = field(default_factory=no_i32)
    vectors: F32 = field(default_factory=no_f32)
    nonfinite_rows: I32 = field(default_factory=no_i32)
    nonfinite_counts: I32 = field(default_factory=no_i32)
    nonfinite_prefills: I32 = field(default_factory=no_i32)
    logprob_spans: I32 = field(default_factory=no_i32)
    logprob_ids: I32 = field(default_factory=no_i32)
    logprobs: F32 = field(default_factory=no_f32)
    logprob_ranks: I32 = field(default_factory=no_i32)
    errors: U8 = field(default_factory=no_u8)
    num_drafted: I32 = field(default_factory=no_i32)
    started: float = 0.0
    ended: float = 0.0

    @property
    def is_plain(self) -> bool:
        """Whether no column but `tokens` holds anything: so are most results, and a step costs less where that is known."""
        return self.counts is NO_I32 and self.num_drafted is NO_I32 and self.is_run

    @property
    def is_run(self) -> bool:
        """Whether no column but `tokens`, `counts` and `num_drafted` holds anything: so are most results with drafts."""
        return (
            self.vector_rows is NO_I32
            and self.vectors is NO_F32
            and self.nonfinite_rows is NO_I32
            and self.nonfinite_counts is NO_I32
            and self.nonfinite_prefills is NO_I32
            and self.errors is NO_U8
            and self.logprob_spans is NO_I32
            and self.logprob_ids is NO_I32
            and self.logprobs is NO_F32
            and self.logprob_ranks is NO_I32
        )

    @property
    def num_checked(self) -> int:
        """Drafts of all rows together."""
        return 0 if self.num_drafted is NO_I32 else int(self.num_drafted.sum())

    @property
    def came_to_nothing(self) -> bool:
        """Values were not finite, and no row shows that any are."""
        if self.nonfinite_rows is NO_I32 and self.nonfinite_prefills is NO_I32:
            return False
        num_rows = self.counts.size or self.tokens.size
        if not num_rows:
            return self.nonfinite_prefills.size > 0
        is_of_rules = self.nonfinite_counts.size > 0 and not self.nonfinite_counts.any()
        return self.nonfinite_rows.size == num_rows and not is_of_rules


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Drafted:
    """What the late rows of a step try, told when its forward begins: their masks depend on it. Sent by the reporting rank.

    Of each plan with late rows and drafts there is one, before its result, be there drafts or not. tokens: those of slots[0],
    then those of slots[1], counts of each.
    """

    step: int
    slots: I32 = field(default_factory=no_i32)
    counts: I32 = field(default_factory=no_i32)
    tokens: I32 = field(default_factory=no_i32)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class StepFailed:
    """The step raised: nothing of it or of later steps in flight counts. rows: those at fault (empty: not known)."""

    step: int
    error: str
    rows: I32 = field(default_factory=no_i32)
    is_out_of_memory: bool = False


# To a worker, from the scheduler --------------------------------------------------------------------------------------


POOLING_CODES: dict[str | None, int] = {None: 0, "last": 1, "mean": 2, "cls": 3, "all": 4}
"""How a plan says what becomes of the final states of a prompt: a token is sampled from the last one, or they are made a
vector, which is the last one, their mean, or the first one, or one vector each. Part of the wire format."""


class NewRow(NamedTuple):
    """What a slot of the worker's batch is filled with, beside its tokens and blocks. A record of 64 bytes (`NEW_ROW`)."""

    slot: int
    num_tokens: int
    """Known tokens."""
    seed: int = 0
    num_outputs: int = 0
    """How many of the known tokens are output: the token index of the first token to be sampled."""
    num_computed: int = 0
    """How many of the known tokens have their KV in the blocks already (prefix hits)."""
    sample_index: int = 0
    temperature: float = 0.0
    top_p: float = 1.0
    min_p: float = 0.0
    top_k: int = 0
    min_tokens: int = 0
    num_stop_ids: int = 0
    adapter_id: int = 0
    """The slot of the workers that holds its adapter (`scheduling.residency`); 0: it has none."""
    pooling: int = 0
    """0: it samples; else it gives a vector: the lowest 8 bits are one of `POOLING_CODES`, the others `Submit.pair_start`."""
    source: int = -1
    """Of a fork: the slot of the prefill row, ending in this step, whose prompt it shares."""


NEW_ROW = np.dtype(
    [
        ("slot", "<i4"),
        ("num_tokens", "<i4"),
        ("seed", "<u8"),
        ("num_outputs", "<i4"),
        ("num_computed", "<i4"),
        ("sample_index", "<i4"),
        ("temperature", "<f4"),
        ("top_p", "<f4"),
        ("min_p", "<f4"),
        ("top_k", "<i4"),
        ("min_tokens", "<i4"),
        ("num_stop_ids", "<i4"),
        ("adapter_id", "<i4"),
        ("pooling", "<u4"),
        ("source", "<i4"),
    ]
)
_NEW_ROW = struct.Struct("<2iQ3i3f4iIi")


SALT_ROW = np.dtype([("slot", "<i4"), ("salt", "S16")])
"""A slot, and a digest of the cache salt of its request."""


def pack_rows(rows: Iterable[tuple[float, ...]]) -> U8:
    """Records with the fields of `NewRow`, because a plan with one new row should not carry a dozen arrays of one element."""
    return np.frombuffer(b"".join([_NEW_ROW.pack(*row) for row in rows]), np.uint8)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class StepPlan:
    """One step, as the difference to the persistent batch that the worker keeps.

    Applied in this order: `freed` slots are dropped; `new` slots are filled; `extended` blocks are appended to block
    tables; KV blocks are copied, all at once, and then zeroed; then the forward runs over the decode rows (one token each,
    the last one sampled) followed by the prefill rows (`prefill_counts` tokens each, from where the slot stands). A prefill
    row that reaches the end of its known tokens samples, and is a decode row from then on.

    A new slot may be a fork of such a prefill row (`NewRow.source`), which has the same known tokens: it samples from the
    same logits, in the same step, and is a decode row from then on. The full blocks of its tokens are those of the source;
    the block that begins with them ends is a copy, which the next plan asks for.

    decode_slots None: the same rows as in the step of its lane before, plus nothing, minus nothing. Block tables and extended
    blocks carry a KV group (there is one group today).
    """

    step: int
    freed: I32 = field(default_factory=no_i32)

    new_rows: U8 = field(default_factory=no_u8)
    """One `NewRow` after the other (`pack_rows`); `new` reads them."""
    new_tokens: I32 = field(default_factory=no_i32)
    """The known tokens (prompt and emitted output) of the new rows, concatenated."""
    new_num_blocks: I32 = field(default_factory=no_i32)
    """One per new row and KV group, row-major; the ids are concatenated in new_blocks."""
    new_blocks: I32 = field(default_factory=no_i32)
    new_stop_ids: I32 = field(default_factory=no_i32)
    """Ids that must not be sampled before min_tokens; listed only for slots with min_tokens > 0."""
    new_rules: I32 = field(default_factory=no_i32)
    """Of the slots that have any (`actorllm.messages.logit_rules.encode_rules`), with new_rule_numbers."""
    new_rule_numbers: F32 = field(default_factory=no_f32)

    extended_slots: I32 = field(default_factory=no_i32)
    extended_blocks: I32 = field(default_factory=no_i32)
    extended_groups: U8 = field(default_factory=no_u8)
    """Empty: all of group 0."""

    zero_blocks: I32 = field(default_factory=no_i32)
    copy_sources: I32 = field(default_factory=no_i32)
    copy_targets: I32 = field(default_factory=no_i32)

    decode_slots: I32 | None = None
    prefill_slots: I32 = field(default_factory=no_i32)
    prefill_counts: I32 = field(default_factory=no_i32)
    late_slots: I32 = field(default_factory=no_i32)
    """Rows that must not be sampled before `LateInputs(step)` arrived."""
    embeds: U8 = field(default_factory=no_u8)
    """The rows of those prefill tokens, in their order, that have an embedding instead of an id (`actorllm.messages.embeds`)."""
    new_processed: U8 = field(default_factory=no_u8)
    """Of the slots that the engine's logits processors see (`actorllm.types.logits_processors.travel.encode_rows`)."""
    new_salts: U8 = field(default_factory=no_u8)
    """Of the new rows that have a cache salt, one `SALT_ROW` each; only where drafts come from outputs of other requests."""
    lane: I32 = field(default_factory=no_i32)
    """[2]: which lane its decode rows are of, and up to which step their tokens were known when it was made. Empty: there is one
    lane. Each lane has decode_slots of its own (`scheduling.lanes`)."""
    max_drafts: int = 0
    """How many drafts the worker may check for each decode row, which then yields as many tokens more at most."""
    partners: I32 = field(default_factory=no_i32)
    """Pairs of blocks: one of the block tables, and the one that holds its tokens in the layers with a sliding window. They are
    paired in this order, after blocks are copied. A block of the second kind belongs to the last pair that it was in."""
    saved_states: I32 = field(default_factory=no_i32)
    """Slot, tokens and place, of each state of the recurrent layers that the step keeps: what a slot has behind so many of its
    tokens, which the step computes. It is kept in this place, whatever was there."""
    restored_states: I32 = field(default_factory=no_i32)
    """Slot and place, of each new slot whose first tokens are computed: their state was kept in this place. Places are read before
    the step writes to any."""

    @property
    def new(self) -> NDArray[np.void]:
        """The new rows as records with the fields of `NewRow`. ValueError when the bytes are not whole rows."""
        return self.new_rows.view(NEW_ROW)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class LateInputs:
    """What sampling of a step's late rows needs and was not known at launch.

    allowed: for every slot in `slots`, ceil(vocab_size / 32) words; bit i of word j allows id 32 * j + i. A late slot
    that is not listed samples freely.
    counts: how many masks each slot has, none: one each; they follow each other. The i-th is for the token behind i drafts, and
    a draft without one is not checked.
    forced: the only tokens that a slot may go on with from its last mask on, forced_counts of each slot; none: of no slot.
    """

    step: int
    slots: I32 = field(default_factory=no_i32)
    allowed: U32 = field(default_factory=no_u32)
    counts: I32 = field(default_factory=no_i32)
    forced: I32 = field(default_factory=no_i32)
    forced_counts: I32 = field(default_factory=no_i32)


# To a frontend, from the scheduler ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Outputs:
    """New tokens and ends of one frontend's requests, one row per request.

    index: the output index of the row's first token; an output applies only if that is the next one. counts is empty
    when every row carries one token. text_ends[i] is where row i's new text ends in `text` (characters).
    ends: for every row that finished: [row, reason, stop_reason, error, times and counters (see RequestEnd)].
    logprob_*: of the rows that asked (see `actorllm.messages.logprobs`), and in logprob_text the text of every one of logprob_ids,
    the i-th up to character logprob_text_ends[i]; no text where none is made.
    """

    rids: I32
    index: I32
    tokens: I32
    counts: I32 = field(default_factory=no_i32)
    text: str = ""
    text_ends: I32 = field(default_factory=no_i32)
    ends: Sequence[Sequence[Any]] = ()
    vector_rows: I32 = field(default_factory=no_i32)
    vectors: F32 = field(default_factory=no_f32)
    logprob_spans: I32 = field(default_factory=no_i32)
    logprob_ids: I32 = field(default_factory=no_i32)
    logprobs: F32 = field(default_factory=no_f32)
    logprob_ranks: I32 = field(default_factory=no_i32)
    logprob_text: str = ""
    logprob_text_ends: I32 = field(default_factory=no_i32)
    cached: I32 = field(default_factory=no_i32)
    """Pairs (rid, tokens) of requests whose first token is here: how much of the prompt was found in the prefix cache."""
    emitted: float = 0.0
    vector_ends: I32 = field(default_factory=no_i32)
    """Where the vector of each of `vector_rows` ends in `vectors`."""


DEADLINE_PASSED = "deadline"
"""The stop_reason beside reason "abort" of a request whose deadline has passed."""
OVERLOADED = "overloaded"
DRAINING = "draining"
"""The kinds of details of a request that was not taken."""
INVALID = "invalid"
"""Of one that asks for what cannot be done, as only the scheduler's process can tell."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class PauseChanged:
    """Generation was paused (mode as in `scheduling.pause`) or resumed (None): the next scheduler is to know it.

    started: the requests of this frontend that the pause waits for.
    """

    mode: str | None = None
    started: I32 = field(default_factory=no_i32)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class WeightsChanged:
    """Every later token is of these weights: the version that the caller named, and its identity (`WeightSource`).

    rids and num_tokens: the requests of this frontend, and how many tokens of each were sampled before. A request that is not
    listed was not known yet.
    """

    version: str
    identity: str
    rids: I32 = field(default_factory=no_i32)
    num_tokens: I32 = field(default_factory=no_i32)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ProbeGroup:
    """Of what this frontend has submitted again, the scheduler is about to take these on, and nothing else for now.

    size: requests, with those of other frontends; 0: the search is over, and everything is taken on again. is_alone: nothing
    else runs, not even requests that were cleared.
    """

    rids: I32 = field(default_factory=no_i32)
    size: int = 0
    is_alone: bool = False


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Begun:
    """Requests that were submitted again and are in a step from now on."""

    rids: I32


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class KvOffer:
    """The prompt of this request is computed, and another replica may copy these blocks of it for a while.

    lease: [replica, slot, number, blocks], as in `Submit.kv_lease`. blocks: their numbers, for readers of the offer. num_cached:
    tokens of the prompt that were found in the prefix cache.
    """

    rid: int
    lease: I64
    blocks: I32
    num_cached: int


# Between any two actors -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Ask:
    """A typed control that is carried out between steps and always answered (statistics, profile, timeline ...).

    data: the argument of this name, which is bytes and no JSON; empty: there is none.
    """

    id: int
    verb: str
    arguments: dict[str, Any] = field(default_factory=dict)
    data: U8 = field(default_factory=no_u8)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Reply:
    """The answer to an Ask: a value, or the error that it ended with. data: a value that is bytes and no JSON."""

    id: int
    value: Any = None
    error: str | None = None
    data: U8 = field(default_factory=no_u8)


ToScheduler: TypeAlias = Submit | Abort | Unblock | StepResult | StepFailed | Drafted | Ask | Reply
ToWorker: TypeAlias = StepPlan | LateInputs | Ask
ToFrontend: TypeAlias = Outputs | PauseChanged | WeightsChanged | ProbeGroup | Begun | KvOffer | Ask | Reply
Message: TypeAlias = ToScheduler | ToWorker | ToFrontend

KINDS: dict[int, type[Any]] = {
    1: Submit,
    2: Abort,
    3: Unblock,
    4: StepPlan,
    5: LateInputs,
    6: StepResult,
    7: StepFailed,
    8: Outputs,
    9: Ask,
    10: Reply,
    11: PauseChanged,
    12: ProbeGroup,
    13: Begun,
    14: WeightsChanged,
    15: Drafted,
    16: KvOffer,
}
"""The numbers are part of the wire format: a number is never used again for something else."""

KIND_OF: dict[type[Any], int] = {cls: kind for kind, cls in KINDS.items()}


class _Form(NamedTuple):
    """How the messages of one type travel."""

    kind: int
    scalars: tuple[str, ...]
    columns: tuple[tuple[str, np.dtype[Any], NDArray[Any]], ...]
    """Name, dtype, and the array that stands for none; the i-th is bit i of the masks."""
    num_values: int
    """Scalars on the wire: the two masks, then the fields."""
    told: int
    """The columns that must be said to be empty, because that is not their default."""
    scalars_of: Callable[[Any], tuple[Any, ...]]
    columns_of: Callable[[Any], tuple[int, int, list[NDArray[Any]]]]
    """The two masks, and the columns that travel."""


def _form(kind: int, cls: type[Any]) -> _Form:
    """Scalars and columns travel in the order of the fields; which is which, and the dtypes, `schema` says."""
    kinds = {f.name: SCHEMA[cls.__name__].fields[f.name] for f in fields(cls)}
    scalars = tuple(name for name, of in kinds.items() if not of.is_column)
    columns = tuple((name, np.dtype(of.kind), EMPTY[of.kind]) for name, of in kinds.items() if of.is_column)
    defaults = cls.__init__.__kwdefaults__ or {}
    told = sum(1 << bit for bit, (name, _, empty) in enumerate(columns) if defaults.get(name) is not empty)
    return _Form(kind, scalars, columns, 2 + len(scalars), told, getter_of(scalars), _columns_getter(columns))


def _columns_getter(
    columns: tuple[tuple[str, np.dtype[Any], NDArray[Any]], ...],
) -> Callable[[Any], tuple[int, int, list[NDArray[Any]]]]:
    """What finds the masks of a message and its columns that travel.

    Most columns are the shared empty one. A line of its own for each passes over it sooner than a loop does.
    """
    lines = ["def columns_of(message):", "present = absent = 0", "arrays = []"]
    for i, (name, dtype, _) in enumerate(columns):
        lines += [
            f"if message.{name} is not {dtype.char}_empty:",
            f"    if message.{name} is None: absent |= {1 << i}",
            f"    elif message.{name}.size: present |= {1 << i}; arrays.append(message.{name})",
        ]
    found: dict[str, Any] = {f"{dtype.char}_empty": empty for _, dtype, empty in columns}
    exec("\n    ".join([*lines, "return present, absent, arrays"]), found)
    getter: Callable[[Any], tuple[int, int, list[NDArray[Any]]]] = found["columns_of"]
    return getter


def _share_empty_columns(cls: type[Any]) -> None:
    """Make the shared empty arrays themselves the defaults of columns: a message has many, and nearly all are empty.

    `dataclass` takes no array as a default, only a factory, and calls it for each field of each message.
    """
    defaults: dict[str, Any] = cls.__init__.__kwdefaults__ or {}
    for f in fields(cls):
        if SCHEMA[cls.__name__].fields[f.name].is_column and f.default_factory is not MISSING:
            defaults[f.name] = f.default_factory()


def _set_by_assignment(cls: type[Any]) -> None:
    """Give a message an `__init__` that assigns its fields.

    The one of a frozen dataclass calls `object.__setattr__` for each of them, which takes ten times as long. An object is of
    an unfrozen class with the same slots until its fields are set.
    """
    if any(f.default_factory is not MISSING and not SCHEMA[cls.__name__].fields[f.name].is_column for f in fields(cls)):
        return  # what the factory makes belongs to one message
    names = [f.name for f in fields(cls)]
    unfrozen = type(cls.__name__, (), {"__slots__": cls.__slots__})
    lines = [f"def __init__(self, *, {', '.join(names)}):", "set_attribute(self, '__class__', unfrozen)"]
    lines += [f"self.{name} = {name}" for name in names]
    found: dict[str, Any] = {
        "__name__": __name__,
        "set_attribute": object.__setattr__,
        "unfrozen": unfrozen,
        "frozen": cls,
    }
    exec("\n    ".join([*lines, "self.__class__ = frozen"]), found)
    init = found["__init__"]
    init.__kwdefaults__, init.__annotations__ = cls.__init__.__kwdefaults__, cls.__init__.__annotations__
    init.__qualname__ = cls.__init__.__qualname__
    cls.__init__ = init


for _cls in KINDS.values():
    _share_empty_columns(_cls)
    _set_by_assignment(_cls)
_FORMS = {cls: _form(kind, cls) for kind, cls in KINDS.items()}


def pack(message: Message) -> tuple[int, list[Any], list[NDArray[Any]]]:
    """`(kind, scalars, arrays)`: element 0 of the scalars is a bit mask of the array fields that are not empty.

    An array field that is None sets its bit in element 1, so that None and empty stay apart; empty and None arrays do
    not travel.
    """
    form = _FORMS[type(message)]
    present, absent, arrays = form.columns_of(message)
    return form.kind, [present, absent, *form.scalars_of(message)], arrays


def unpack(kind: int, scalars: Any, arrays: Sequence[NDArray[Any]]) -> Message:
    """The message again; ValueError when anything about it is not as `pack` would have made it.

    What its scalars hold, and whether a column may be None, is not looked at: see `schema.violation`.
    """
    cls = KINDS.get(kind)
    if cls is None:
        raise ValueError(f"message kind {kind} is unknown")
    form = _FORMS[cls]
    if not isinstance(scalars, list) or len(scalars) != form.num_values:
        raise ValueError(f"{cls.__name__}: {form.num_values} scalars expected, got {reprlib.repr(scalars)}")
    # Columns at their defaults do not travel: `present` has a bit for each one that does, `absent` for each that is
    # None.
    present, absent = scalars[0], scalars[1]
    if not isinstance(present, int) or not isinstance(absent, int):
        raise ValueError(f"{cls.__name__}: masks {reprlib.repr(present)} and {reprlib.repr(absent)} must be integers")
    columns = form.columns
    rest = present | absent | form.told
    if rest >> len(columns) or present & absent:
        raise ValueError(f"{cls.__name__}: masks {present:#x} and {absent:#x} of {len(columns)} columns")
    values = dict(zip(form.scalars, scalars[2:], strict=True))
    incoming = iter(arrays)
    # Bit by bit from the lowest: only columns that differ from the default cost anything.
    while rest:
        bit = rest & -rest
        rest ^= bit
        name, dtype, empty = columns[bit.bit_length() - 1]
        if present & bit:
            array = next(incoming, None)
            if array is None or array.dtype != dtype:
                raise ValueError(f"{cls.__name__}.{name}: an array of {dtype.str[1:]} expected, got {array!r:.80}")
            values[name] = array
        else:
            values[name] = None if absent & bit else empty
    if next(incoming, None) is not None:
        raise ValueError(f"{cls.__name__}: more arrays than the mask {present:#x} announces")
    message: Message = cls(**values)
    return message
