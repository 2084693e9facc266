"""A LoRA adapter as peft writes it, as far as files tell without torch: what it asks for, and the digest of its content.

`AdapterSettings` is what adapter_config.json says of the arithmetic. What changes the model in another way than by products of
low rank on linear layers is refused by its name. `AdapterDigests` names a folder by its content. All sizes are bounded before
anything is read. The tensors are read by the workers (`actorllm.model.adapters`).
"""

from __future__ import annotations

import hashlib
import os
import re
import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import orjson

from actorllm.errors import InvalidParameterError, shown

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
MAX_CONFIG_BYTES = 1 << 20
MAX_WEIGHTS_BYTES = 4 << 30
MAX_PATTERNS = 10_000
"""Entries of rank_pattern and of alpha_pattern."""
MAX_DIGESTS = 1024
"""Folders whose digests are remembered."""
PIECE_BYTES = 1 << 20

INITIALISATIONS = (None, True, False, "gaussian", "eva", "orthogonal")
"""Values of init_lora_weights that leave the weights of the base as they are."""

REFUSED = {
    "use_dora": "DoRA scales the columns of the base's weights; train the adapter with use_dora=False",
    "modules_to_save": "whole modules take the place of the base's; train the adapter without modules_to_save",
    "trainable_token_indices": "rows of the embedding take the place of the base's; train without trainable_token_indices",
    "layer_replication": "layers of the base are repeated; train without layer_replication",
    "target_parameters": "parameters that are no linear layers are adapted; use target_modules",
    "lora_bias": "the products have a bias; train with lora_bias=False",
    "use_qalora": "the inputs are pooled; train with use_qalora=False",
    "alora_invocation_tokens": "the adapter begins in the middle of a prompt; train without alora_invocation_tokens",
    "arrow_config": "several adapters are mixed; train without arrow_config",
    "use_bdlora": "the products are of blocks; train without use_bdlora",
}
"""Fields that ask for more than low-rank products where they are anything but empty, and what to do instead."""


@dataclass(frozen=True, slots=True)
class AdapterSettings:
    """What adapter_config.json says."""

    rank: int
    alpha: float
    is_rank_stabilized: bool
    """Products are scaled by alpha / sqrt(rank), not by alpha / rank (rsLoRA, arXiv:2312.03732)."""
    ranks: Mapping[str, int]
    """Of layers with a rank of their own, by the end of their name."""
    alphas: Mapping[str, float]

    def rank_of(self, name: str) -> int:
        """The rank of a layer by its whole name, such as 'model.layers.0.self_attn.q_proj'."""
        return int(_of_pattern(self.ranks, name, self.rank))

    def scale_of(self, name: str) -> float:
        """What the product of a layer is multiplied with."""
        rank, alpha = self.rank_of(name), _of_pattern(self.alphas, name, self.alpha)
        return float(alpha / (rank**0.5 if self.is_rank_stabilized else rank))

    @property
    def max_rank(self) -> int:
        return max((self.rank, *self.ranks.values()))

    @classmethod
    def from_json(cls, data: bytes, path: str) -> AdapterSettings:
        """Raises InvalidParameterError for what is no adapter, or asks for what is not done."""
        try:
            tree = orjson.loads(data)
        except ValueError as error:
            raise InvalidParameterError(f"{path}/{CONFIG_FILE} is no JSON: {error!s:.200}") from None
        if not isinstance(tree, dict):
            raise InvalidParameterError(f"{path}/{CONFIG_FILE} is no JSON object")

        def refuse(name: str, what: str) -> InvalidParameterError:
            return InvalidParameterError(f"{path}/{CONFIG_FILE}: {name}={shown(tree.get(name))} {what}")

        if tree.get("peft_type") != "LORA":
            raise refuse("peft_type", "is not supported; only 'LORA' is")
        if tree.get("bias", "none") != "none":
            raise refuse("bias", "is not supported: the biases of the base would change; train with bias='none'")
        if tree.get("init_lora_weights") not in INITIALISATIONS:
            raise refuse(
                "init_lora_weights", "changes the weights of the base; convert the adapter to a plain one with peft"
            )
        for name, instead in REFUSED.items():
            if tree.get(name) not in (None, False, [], {}):
                raise refuse(name, f"is not supported: {instead}")

        def rank(value: Any) -> bool:
            return type(value) is int and 0 < value <= 1 << 16

        def alpha(value: Any) -> bool:
            return type(value) in (int, float) and abs(value) <= 1e6

        if not rank(tree.get("r")):
            raise refuse("r", "must be a positive integer")
        if not alpha(tree.get("lora_alpha")):
            raise refuse("lora_alpha", "must be a number")
        ranks, alphas = tree.get("rank_pattern") or {}, tree.get("alpha_pattern") or {}
        for name, pattern, is_right in (("rank_pattern", ranks, rank), ("alpha_pattern", alphas, alpha)):
            if not isinstance(pattern, dict) or len(pattern) > MAX_PATTERNS or not all(map(is_right, pattern.values())):
                raise refuse(name, f"must be an object of at most {MAX_PATTERNS} numbers")
            for key in pattern:
                # peft takes keys as regular expressions. It writes names, and nothing else is evaluated here.
                if not re.fullmatch(r"\^?[A-Za-z0-9_.]+", key):
                    raise InvalidParameterError(
                        f"{path}/{CONFIG_FILE}: {name} has the key {shown(key)}, which is no name of a layer; write names"
                    )
        return cls(tree["r"], float(tree["lora_alpha"]), bool(tree.get("use_rslora")), ranks, alphas)


def _of_pattern(patterns: Mapping[str, Any], name: str, default: Any) -> Any:
    """The first key that the name is or ends with, as in peft; one with '^' is the whole name."""
    for key, value in patterns.items():
        if name == key.lstrip("^") or (not key.startswith("^") and name.endswith("." + key)):
            return value
    return default


@dataclass(frozen=True, slots=True)
class Adapter:
    """What a request says of its adapter to the engine."""

    digest: str
    """SHA-256 of the content, in hexadecimal digits."""
    path: str


def folder_of(path: str) -> Path:
    """An adapter's. Raises InvalidParameterError where the path begins with a user that there is not."""
    try:
        return Path(path).expanduser().absolute()
    except RuntimeError as error:
        raise InvalidParameterError(f"lora_path={shown(path)}: {error}; write the whole path") from None


class AdapterDigests:
    """The digests of folders, each computed once for as long as its files stay what they are. From any thread."""

    def __init__(self, max_rank: int) -> None:
        """max_rank: of the adapters that the engine takes."""
        self._max_rank = max_rank
        self._known: OrderedDict[tuple[Any, ...], str] = OrderedDict()
        self._numbers: OrderedDict[int, Adapter] = OrderedDict()
        """What this program's numbers stand for, those used last at the end."""
        self._paths: OrderedDict[str, None] = OrderedDict()
        """Folders that were read, as callers wrote them."""
        self._lock = threading.Lock()

    def has_read(self, path: str) -> bool:
        """Whether a folder was read before, so that it takes no longer than a look at its files, unless they have changed."""
        with self._lock:
            return path in self._paths

    def adapter_of(self, path: str, number: int | None = None) -> Adapter:
        """Read a folder. Raises InvalidParameterError where there is no adapter that the engine takes.

        number: what stands for it from now on; None: nothing.
        """
        adapter = self._read(path)
        with self._lock:
            self._paths[path] = None
            self._paths.move_to_end(path)
            while len(self._paths) > MAX_DIGESTS:
                self._paths.popitem(last=False)
            if number is not None:
                self._numbers[number] = adapter
                self._numbers.move_to_end(number)
                while len(self._numbers) > MAX_DIGESTS:
                    self._numbers.popitem(last=False)
        return adapter

    def of_number(self, number: int) -> Adapter | None:
        """What a number of this program stands for; None: nothing that is remembered."""
        with self._lock:
            return self._numbers.get(number)

    def forget_number(self, number: int) -> None:
        with self._lock:
            self._numbers.pop(number, None)

    def numbers_of(self, digests: Iterable[str]) -> set[int]:
        """Those that stand for one of these adapters."""
        wanted = set(digests)
        with self._lock:
            return {number for number, adapter in self._numbers.items() if adapter.digest in wanted}

    def _read(self, path: str) -> Adapter:
        folder = folder_of(path)
        check_files(folder)
        key = (str(folder), *(_stamp(folder / name) for name in (CONFIG_FILE, WEIGHTS_FILE)))
        with self._lock:
            digest = self._known.get(key)
            if digest is not None:
                self._known.move_to_end(key)
        if digest is None:
            config = read_config(folder)
            check_rank(AdapterSettings.from_json(config, str(folder)), str(folder), self._max_rank)
            with open(folder / WEIGHTS_FILE, "rb") as weights:
                digest = digest_of(config, weights)
            with self._lock:
                self._known[key] = digest
                while len(self._known) > MAX_DIGESTS:
                    self._known.popitem(last=False)
        return Adapter(digest, str(folder))


def check_rank(settings: AdapterSettings, path: str, max_rank: int) -> None:
    """Raises InvalidParameterError."""
    if settings.max_rank > max_rank:
        raise InvalidParameterError(
            f"{path}: the adapter has rank {settings.max_rank}, and this engine takes up to max_lora_rank={max_rank}; build it "
            f"with max_lora_rank={settings.max_rank} or more"
        )


def check_files(folder: Path) -> None:
    """Raises InvalidParameterError unless both files are there and of a size that is read."""
    if not folder.is_dir():
        raise InvalidParameterError(
            f"lora_path={str(folder)!r:.300} is no folder on the machine of the engine; download the adapter first"
        )
    for name, most in ((CONFIG_FILE, MAX_CONFIG_BYTES), (WEIGHTS_FILE, MAX_WEIGHTS_BYTES)):
        file = folder / name
        if not file.is_file():
            other = folder / "adapter_model.bin"
            hint = "; save it with safe_serialization=True" if name == WEIGHTS_FILE and other.is_file() else ""
            raise InvalidParameterError(f"the adapter folder {str(folder)!r:.300} has no {name}{hint}")
        if (size := file.stat().st_size) > most:
            raise InvalidParameterError(f"{file} has {size} bytes; at most {most} are read")


def read_config(folder: Path) -> bytes:
    with open(folder / CONFIG_FILE, "rb") as file:
        return file.read(MAX_CONFIG_BYTES)


def digest_of(config: bytes, weights: BinaryIO) -> str:
    """Of an adapter: equal for equal content, wherever it lies."""
    digest = hashlib.sha256(b"actorllm-adapter-1\0" + hashlib.sha256(config).digest())
    while piece := weights.read(PIECE_BYTES):
        digest.update(piece)
    return digest.hexdigest()


def is_digest(text: str) -> bool:
    """Whether it may be the digest of an adapter."""
    return re.fullmatch(r"[0-9a-f]{64}", text) is not None


def _stamp(file: Path) -> tuple[int, ...]:
    stat = os.stat(file)
    return stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns
