"""How prompts become vectors: which models are run for that, how their states are pooled, and what a request may change.

`read_pooler` says it of a model's folder, as vLLM's `runner`, `convert` and `pooler_config` do. Where these leave it open, the
files of sentence-transformers in the folder decide. They are modules.json (a Pooling module, perhaps a Normalize one), the
Pooling module's config.json, and sentence_bert_config.json. `Pooler.resolved` checks one request's `PoolingParams` against
it. Pure, but for reading those files. Called by `config` and by the engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from actorllm.errors import ConfigError, CorruptModelError, InvalidParameterError, UnsupportedModelError, nearest_name
from actorllm.types.model_files import read_json, read_object
from actorllm.types.params import (
    PoolingParams,
    PoolingType,
    check_pooling_type,
    check_returned_ids,
    names_unknown_parameters,
)
from actorllm.types.pooling_head import MAX_VECTOR_BYTES, REWARD_HEADS, STEP_TAGS, WITHOUT_ACTIVATION, Head, read_head

RUNNERS = ("auto", "generate", "pooling")
CONVERTS = ("auto", "none", "embed")

POSITIONS_FROM_PADDING = frozenset(
    ("roberta", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl", "camembert", "data2vec-text", "mpnet")
)
"""Model types whose first position is the one behind that of the padding token."""

ENCODERS = POSITIONS_FROM_PADDING | {
    "bert",
    "distilbert",
    "electra",
    "ernie",
    "mobilebert",
    "albert",
    "modernbert",
}
"""Model types in which every token sees all others, and which therefore write no text."""

POOLING_ARCHITECTURES = ("Model", "ForTextEncoding")
"""What the names of architectures without a head for text end with."""
WRITING_ARCHITECTURES = ("LMHeadModel", "ChatModel", "ForCausalLM")
"""Of those that have one."""
OTHER_HEADS = ("ClassificationModel", "RewardModel", "ForRewardModeling")
"""Of those whose heads are shaped otherwise than `pooling_head` knows."""

SENTENCE_CONFIGS = (
    *("sentence_bert_config.json", "sentence_roberta_config.json", "sentence_distilbert_config.json"),
    *("sentence_camembert_config.json", "sentence_albert_config.json", "sentence_xlm-roberta_config.json"),
)

IDLE_POOLER_CONFIG: dict[str, tuple[Any, ...]] = {
    "enable_flash_late_interaction": (True, False),
    "enable_chunked_processing": (False,),
    "max_embed_len": (None,),
    "logit_mean": (None,),
    "logit_sigma": (None,),
}
"""Fields of vLLM's PoolerConfig that are accepted where they ask for what is done anyway."""


@names_unknown_parameters(IDLE_POOLER_CONFIG)
@dataclass(frozen=True, slots=True, kw_only=True)
class PoolerConfig:
    """vLLM's: how an engine with runner="pooling" makes vectors. None (default): as the model's folder says.

    Arguments:
        task: one of the tasks of the model (`Pooler.tasks`).
        pooling_type, seq_pooling_type: "LAST", "MEAN" or "CLS": the last final state, their mean, or the first.
        use_activation: vectors have length 1.
        normalize: the older name of use_activation.
        dimensions: only the first so many numbers, of models that are trained for that.
        tok_pooling_type: of vectors of tokens "ALL", or "STEP": those of one token that ends a step; None: as the model is made.
        step_tag_id: that token; it means "STEP".
        returned_token_ids: only these numbers of each vector.
    """

    task: str | None = None
    pooling_type: str | None = None
    seq_pooling_type: str | None = None
    use_activation: bool | None = None
    normalize: bool | None = None
    dimensions: int | None = None
    tok_pooling_type: str | None = None
    step_tag_id: int | None = None
    returned_token_ids: Sequence[int] | None = None


@dataclass(frozen=True, slots=True)
class Pooler:
    """How the vectors of an engine are made, unless a request says otherwise."""

    pooling_type: PoolingType
    use_activation: bool
    """They are scaled to length 1, or the scores of a head become probabilities."""
    embedding_size: int
    """Numbers of a state."""
    dimensions: int | None = None
    """Only the first so many; None: all."""
    matryoshka: tuple[int, ...] | None = None
    """The lengths to which vectors may be shortened; (): any; None: none."""
    is_encoder: bool = False
    """Every token sees all others: a prompt goes through in one step, and nothing of it can be used again."""
    lowercases: bool = False
    """Texts are, before they become tokens."""
    max_length: int | None = None
    """Tokens of a prompt that the model's author allows."""
    head: Head | None = None
    """What makes scores of states; None: the states are the vectors."""
    task: str | None = None
    """What is meant where a request says nothing; None: the first of `tasks`."""
    step_tag_id: int | None = None
    """Of vectors of tokens, those of this one alone; None: of all tokens."""
    returned_ids: tuple[int, ...] = ()
    """Of vectors of tokens, these numbers alone; (): all."""

    @property
    def vector_size(self) -> int:
        """Numbers of a vector that is not shortened."""
        return self.embedding_size if self.head is None else self.head.size

    @property
    def tasks(self) -> tuple[str, ...]:
        """What a request may ask for, by vLLM's names; the first one is meant where it says nothing."""
        if self.head is None:
            return ("embed", "token_embed")
        if self.head.is_of_tokens:
            return ("token_classify",)
        # The head of an encoder is more than one product, and is made for the one pooled state.
        return ("classify",) if self.is_encoder else ("classify", "token_classify")

    @property
    def is_cross_encoder(self) -> bool:
        """It scores a pair of texts that it reads as one prompt."""
        return self.head is not None and self.head.size == 1 and not self.head.is_of_tokens

    @classmethod
    def from_tree(cls, tree: dict[str, Any] | None) -> Pooler | None:
        """From what `dataclasses.asdict` and JSON make of one."""
        if tree is None:
            return None
        lengths, head = tree.pop("matryoshka"), Head.from_tree(tree.pop("head"))
        tree["returned_ids"] = tuple(tree["returned_ids"])
        return cls(**tree, matryoshka=None if lengths is None else tuple(lengths), head=head)

    def resolved(self, params: PoolingParams, model: str) -> Pooling:
        """What is to be done for one request. model: for messages. Raises InvalidParameterError."""
        task = self._task(params.task)
        kind = self.pooling_type if params.pooling_type is None else params.pooling_type
        if task.startswith("token_"):
            kind = "ALL"
        dimensions = self.dimensions if params.dimensions is None else params.dimensions
        if dimensions is not None:
            self.check_dimensions(dimensions, model)
        is_active = self.use_activation if params.use_activation is None else params.use_activation
        activation = "identity"
        if is_active:
            activation = "length" if self.head is None else self.head.activation
        tag, ids = params.step_tag_id, tuple(params.returned_token_ids or ())
        if kind != "ALL":
            for name, value in (("step_tag_id", tag), ("returned_token_ids", ids or None)):
                if value is not None:
                    raise InvalidParameterError(f"{name}={value!r:.80} is for vectors of tokens; this task is {task!r}")
            return Pooling(kind.lower(), activation, dimensions, self.vector_size)
        self.check_ids(ids)
        tag = self.step_tag_id if tag is None else tag
        return Pooling(kind.lower(), activation, dimensions, self.vector_size, tag, ids or self.returned_ids)

    def check_ids(self, ids: tuple[int, ...]) -> None:
        """Raises InvalidParameterError for numbers that a vector does not have."""
        for id in ids:
            if id >= self.vector_size:
                raise InvalidParameterError(
                    f"returned_token_ids: {id} is none of the {self.vector_size} numbers of a vector, which begin at 0"
                )

    def _task(self, wanted: str | None) -> str:
        tasks = self.tasks
        if wanted is None:
            return self.task or tasks[0]
        if wanted == "score" and (self.head is None or self.is_cross_encoder):
            return tasks[0]  # by the cosine of two vectors, or by the score of a pair
        if wanted in tasks:
            return wanted
        told = f"tasks are {' and '.join(map(repr, tasks))}" if len(tasks) > 1 else f"task is {tasks[0]!r}"
        raise InvalidParameterError(f"task={wanted!r:.80} is not supported; this engine's {told}")

    def check_room(self, pooling: Pooling, max_num_batched_tokens: int) -> None:
        """Raises InvalidParameterError where the vectors of a step's tokens may be more than one message holds."""
        most = MAX_VECTOR_BYTES // (4 * self.vector_size)
        if pooling.is_of_tokens and max_num_batched_tokens > most:
            raise InvalidParameterError(
                f"vectors of every token have {self.vector_size} numbers each, and one step returns {most} of them at most: "
                f"build the engine with max_num_batched_tokens={most} or less"
            )

    def check_dimensions(self, dimensions: int, model: str) -> None:
        if self.head is not None:
            raise InvalidParameterError(
                f"dimensions={dimensions}: model {model!r} gives scores, which cannot be shortened; leave dimensions out"
            )
        if self.matryoshka is None:
            raise InvalidParameterError(
                f"dimensions={dimensions}: model {model!r} does not support Matryoshka embeddings, so that its vectors have "
                f"{self.embedding_size} numbers; leave dimensions out (or say hf_overrides={{'is_matryoshka': True}} when "
                f"the engine is built)"
            )
        if dimensions > self.embedding_size:
            raise InvalidParameterError(
                f"dimensions={dimensions}: the vectors of model {model!r} have {self.embedding_size} numbers; use as many "
                f"or fewer"
            )
        if self.matryoshka and dimensions not in self.matryoshka:
            raise InvalidParameterError(
                f"dimensions={dimensions}: model {model!r} was trained for {', '.join(map(str, self.matryoshka))}"
            )


@dataclass(frozen=True, slots=True)
class Pooling:
    """How the vector of one request is made."""

    kind: str
    """One of `messages.POOLING_CODES`."""
    activation: str
    """"length": it is scaled to length 1; else one of `Head.activation`."""
    dimensions: int | None
    """Only the first so many numbers."""
    size: int
    """Numbers of a vector, or of each token's."""
    step_tag_id: int | None = None
    """Of vectors of tokens, those of this one alone."""
    returned_ids: tuple[int, ...] = ()
    """Of vectors of tokens, these numbers alone; (): all."""

    @property
    def is_of_tokens(self) -> bool:
        """Every token has a vector."""
        return self.kind == "all"

    @property
    def needs_all_states(self) -> bool:
        """Of tokens found in the prefix cache there are no final states."""
        return self.kind != "last"


@dataclass(frozen=True, slots=True)
class SentenceFiles:
    """What the files of sentence-transformers say."""

    pooling_type: PoolingType | None
    unsupported: str | None
    """Why the folder's own way of pooling cannot be used."""
    normalizes: bool


def read_pooler(
    path: Path,
    hf: Mapping[str, Any],
    *,
    runner: Any = "auto",
    convert: Any = "auto",
    pooler_config: Any = None,
) -> Pooler | None:
    """How the model of this folder makes vectors; None: it generates text. hf: its config.json.

    Raises ConfigError for the arguments, UnsupportedModelError for what the folder asks for and there is not.
    """
    for name, value, choices in (("runner", runner, RUNNERS), ("convert", convert, CONVERTS)):
        if value not in choices:
            raise ConfigError(
                f"{name}={value!r} is not supported; use {', '.join(map(repr, choices))}{nearest_name(str(value), choices)}"
            )
    given = _pooler_config(pooler_config)
    kind = str(hf.get("model_type"))
    names = hf.get("architectures")
    architecture = str(names[0]) if isinstance(names, list) and names else "?"  # its own error comes later
    # Three signs that a model was made for vectors: its type, the files of sentence-transformers, a class without a
    # head.
    writes = architecture.endswith(WRITING_ARCHITECTURES)
    is_encoder = kind in ENCODERS and not hf.get("is_decoder") and not writes
    files = None if runner == "generate" else _read_sentence_files(path)
    has_no_head = architecture.endswith(POOLING_ARCHITECTURES) and not writes
    head = read_head(architecture, hf)
    is_made_for_it = is_encoder or files is not None or has_no_head or head is not None
    if runner == "generate" and is_encoder:
        raise ConfigError(f"runner='generate': {architecture} is an encoder and writes no text; leave runner at 'auto'")
    pools = runner == "pooling" or (runner == "auto" and (convert == "embed" or is_made_for_it))
    # Arguments that only pooling reads are refused where the engine generates text.
    if not pools:
        for name, value in (("convert", convert if convert == "embed" else None), ("pooler_config", pooler_config)):
            if value is not None:
                raise ConfigError(f"{name}={value!r:.200} needs runner='pooling'; this engine generates text")
        return None
    if head is None and architecture.endswith(OTHER_HEADS):
        raise UnsupportedModelError(
            f"architecture {architecture!r} is not supported: of the heads that classify, those of ...ForSequenceClassification "
            f"and ...ForTokenClassification are, and {' and '.join(REWARD_HEADS)}"
        )
    # A generating model pools only when it is converted.
    if convert == "none" and not is_made_for_it:
        raise ConfigError(
            f"convert='none': {architecture} generates text; use convert='embed' or 'auto' to pool its states"
        )
    size = _hidden_size(hf)
    matryoshka = _matryoshka(path, hf)
    pooler = Pooler(
        pooling_type=_pooling_type(
            path, given, files, is_encoder, None if head is None else hf.get("classifier_pooling")
        ),
        use_activation=_first(
            given.use_activation,
            given.normalize,
            None if files is None else files.normalizes,
            architecture not in WITHOUT_ACTIVATION,
        ),
        embedding_size=size,
        dimensions=given.dimensions,
        matryoshka=matryoshka,
        is_encoder=is_encoder,
        head=head,
        task=given.task,
        step_tag_id=_step_tag(given, architecture),
        returned_ids=_returned_ids(given),
        **_read_sentence_config(path),
    )
    try:
        pooler.check_ids(pooler.returned_ids)
    except InvalidParameterError as error:
        raise ConfigError(f"pooler_config: {error}") from error
    if given.task is not None and given.task not in pooler.tasks:
        raise ConfigError(
            f"pooler_config: task={given.task!r:.80} is not supported; this model's are {', '.join(map(repr, pooler.tasks))}"
        )
    # What a request may ask for is checked with each request; the default for all of them is checked here.
    if given.dimensions is not None:
        try:
            pooler.check_dimensions(given.dimensions, path.name)
        except InvalidParameterError as error:
            raise ConfigError(f"pooler_config: {error}") from error
    return pooler


def max_positions(hf: Mapping[str, Any], positions: int) -> int:
    """How many tokens a sequence may have in a model with so many positions."""
    if hf.get("model_type") in POSITIONS_FROM_PADDING:
        return positions - position_offset(hf)
    return positions


def position_offset(hf: Mapping[str, Any]) -> int:
    """The position of a sequence's first token."""
    padding = hf.get("pad_token_id")
    return (1 if padding is None else int(padding)) + 1 if hf.get("model_type") in POSITIONS_FROM_PADDING else 0


def _first(*values: Any) -> Any:
    return next(value for value in values if value is not None)


def _from_text(name: str, given: Any) -> Any:
    """What a command line says as JSON."""
    if not isinstance(given, str):
        return given
    try:
        return orjson.loads(given)
    except orjson.JSONDecodeError as error:
        raise ConfigError(f"{name}={given!r:.200} is not valid JSON: {error}") from error


def _pooler_config(given: Any) -> PoolerConfig:
    given = _from_text("pooler_config", given)
    if given is None:
        return PoolerConfig()
    if isinstance(given, Mapping):
        try:
            given = PoolerConfig(**given)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"pooler_config: {error}") from error
    if not isinstance(given, PoolerConfig):
        raise ConfigError(f"pooler_config={given!r:.200} must be a PoolerConfig or a mapping of its fields")
    for name in ("use_activation", "normalize"):
        if not isinstance(getattr(given, name), bool | None):
            raise ConfigError(f"pooler_config: {name}={getattr(given, name)!r:.80} must be True, False or None")
    if None not in (given.use_activation, given.normalize) and given.use_activation != given.normalize:
        raise ConfigError("pooler_config: use_activation and normalize contradict each other; leave one out")
    number = given.dimensions
    if number is not None and (isinstance(number, bool) or not isinstance(number, int) or number < 1):
        raise ConfigError(f"pooler_config: dimensions={number!r:.80} must be a positive integer, or None")
    if given.pooling_type is not None and given.seq_pooling_type is not None:
        raise ConfigError("pooler_config: pooling_type and seq_pooling_type say the same; leave one out")
    return given


def _step_tag(given: PoolerConfig, architecture: str) -> int | None:
    kind, tag = given.tok_pooling_type, given.step_tag_id
    if kind not in (None, "ALL", "STEP"):
        raise ConfigError(f"pooler_config: tok_pooling_type={kind!r:.80} is not supported; use 'ALL' or 'STEP'")
    if tag is not None and (isinstance(tag, bool) or not isinstance(tag, int) or tag < 0):
        raise ConfigError(f"pooler_config: step_tag_id={tag!r:.80} must be the id of a token, or None")
    if kind == "ALL":
        if tag is not None:
            raise ConfigError(
                "pooler_config: step_tag_id and tok_pooling_type='ALL' contradict each other; leave one out"
            )
        return None
    return STEP_TAGS.get(architecture) if tag is None else tag


def _returned_ids(given: PoolerConfig) -> tuple[int, ...]:
    ids = given.returned_token_ids
    try:
        return tuple(check_returned_ids(ids) or ())
    except InvalidParameterError as error:
        raise ConfigError(f"pooler_config: {error}") from error


def _pooling_type(
    path: Path, given: PoolerConfig, files: SentenceFiles | None, is_encoder: bool, of_head: Any
) -> PoolingType:
    """of_head: what config.json says that the head of a classifier was trained with."""
    chosen = given.pooling_type if given.seq_pooling_type is None else given.seq_pooling_type
    if chosen is not None:
        try:
            return check_pooling_type(chosen, "pooler_config: ")
        except InvalidParameterError as error:
            raise ConfigError(str(error)) from error
    if of_head is not None:
        return "MEAN" if of_head == "mean" else "CLS"
    if files is not None and files.unsupported is not None:
        raise UnsupportedModelError(
            f"{path}: {files.unsupported}; or choose with pooler_config={{'pooling_type': 'MEAN'}}"
        )
    if files is not None and files.pooling_type is not None:
        return files.pooling_type
    return "CLS" if is_encoder else "LAST"


def _hidden_size(hf: Mapping[str, Any]) -> int:
    for key in ("hidden_size", "n_embd", "d_model", "dim"):
        size = hf.get(key)
        if isinstance(size, int) and not isinstance(size, bool) and size > 0:
            return size
    raise ConfigError("runner='pooling': the model's config.json does not say its hidden_size")


def _matryoshka(path: Path, hf: Mapping[str, Any]) -> tuple[int, ...] | None:
    lengths = hf.get("matryoshka_dimensions")
    if lengths:
        if not isinstance(lengths, list | tuple) or not all(type(n) is int and n > 0 for n in lengths):
            raise CorruptModelError(
                f"{path}/config.json: matryoshka_dimensions is {lengths!r:.80}, a list of sizes is needed"
            )
        return tuple(lengths)
    return () if hf.get("is_matryoshka") else None


# The files of sentence-transformers


def _read_sentence_files(path: Path) -> SentenceFiles | None:
    """What modules.json lists; None: there is none, or it has no Pooling module."""
    file = path / "modules.json"
    if not file.is_file():
        return None
    modules = read_json(file)
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise CorruptModelError(f"{file} must hold a list of objects")
    kinds = [str(module.get("type")).rsplit(".", 1)[-1] for module in modules]
    if "Pooling" not in kinds:
        return None
    other = [kind for kind in kinds if kind not in ("Transformer", "Pooling", "Normalize")]
    # A further module (Dense, for one) would change the vectors: better refused than left out.
    if other:
        raise UnsupportedModelError(
            f"{file}: a module of type {other[0]!r} is not supported; Pooling and Normalize are"
        )
    folder = str(modules[kinds.index("Pooling")].get("path", ""))
    # The path is the model author's: it must not lead out of the folder.
    if Path(folder).is_absolute() or ".." in Path(folder).parts:
        raise CorruptModelError(f"{file} names {folder!r}, which is not in this folder")
    config = read_object(path / folder / "config.json")
    # Old files have a switch per mode, new ones a string.
    modes = [str(key).removeprefix("pooling_mode_") for key, value in config.items() if value is True]
    modes = [mode for mode in modes if mode != "include_prompt"]
    if isinstance(config.get("pooling_mode"), str):
        modes = [config["pooling_mode"]]
    known: dict[str, PoolingType] = {
        "cls": "CLS",
        "cls_token": "CLS",
        "mean": "MEAN",
        "mean_tokens": "MEAN",
        "lasttoken": "LAST",
        "last": "LAST",
        "last_token": "LAST",
    }
    # An unsupported mode is an error only if the user does not choose another one (`_pooling_type`).
    unsupported = None
    if len(modes) > 1:
        unsupported = f"{folder}/config.json joins the vectors of {' and '.join(modes)}, which is not supported"
    elif modes and modes[0] not in known:
        unsupported = f"{folder}/config.json pools by {modes[0]!r}, which is not supported"
    kind = known.get(modes[0]) if len(modes) == 1 else None
    return SentenceFiles(kind, unsupported, "Normalize" in kinds)


def _read_sentence_config(path: Path) -> dict[str, Any]:
    """Fields of `Pooler`."""
    for name in SENTENCE_CONFIGS:
        file = path / name
        if file.is_file():
            tree = read_object(file)
            length = tree.get("max_seq_length")
            if length is not None and (type(length) is not int or length < 1):
                raise CorruptModelError(f"{file}: max_seq_length is {length!r:.80}, a positive integer is needed")
            return {"lowercases": bool(tree.get("do_lower_case")), "max_length": length}
    return {}
