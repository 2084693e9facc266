"""What vLLM's command line has beside `--name value`: short options, `-O3`, and fields of an option as `--name.field value`.

`spelled_out` replaces them in the words of a command line, so that every parser here reads them. Standard library only.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from actorllm.errors import ConfigError, shown
from actorllm.types.options import DEFAULTS
from actorllm.types.vllm_options import VLLM_ARGUMENTS

SHORT = {
    "-q": "quantization",
    "-n": "nnodes",
    "-r": "node-rank",
    "-tp": "tensor-parallel-size",
    "-pp": "pipeline-parallel-size",
    "-dcp": "decode-context-parallel-size",
    "-pcp": "prefill-context-parallel-size",
    "-dp": "data-parallel-size",
    "-dpn": "data-parallel-rank",
    "-dpr": "data-parallel-start-rank",
    "-dpl": "data-parallel-size-local",
    "-dpa": "data-parallel-address",
    "-dpp": "data-parallel-rpc-port",
    "-dpb": "data-parallel-backend",
    "-dph": "data-parallel-hybrid-lb",
    "-dpe": "data-parallel-external-lb",
    "-dpm": "data-parallel-multi-port-external-lb",
    "-ep": "enable-expert-parallel",
    "-sc": "speculative-config",
    "-dc": "diffusion-config",
    "-cc": "compilation-config",
    "-ac": "attention-config",
    "-asc": "api-server-count",
}
"""vLLM's short options, by what they are short for."""

LEVELS = ("0", "1", "2", "3")
"""Of optimization, behind a single -O."""


def spelled_out(words: Sequence[str], is_taken: Callable[[str], bool] = lambda word: False) -> list[str]:
    """The same command line with long options only.

    Arguments:
        words: of the command line.
        is_taken: whether the program has a short option of this name itself.

    Raises ConfigError for a field without a value, and for one that adds to what is no list.
    """
    made: list[str] = []
    fields: dict[str, dict[str, Any]] = {}
    rest = iter(words)
    for word in rest:
        name, sign, value = word.partition("=")
        if name in SHORT and not is_taken(name):
            made.append(f"--{SHORT[name]}{sign}{value}")
        elif name.startswith("-O") and "." not in name and not is_taken("-O"):
            made += _optimization(word, rest)
        elif (split := _field_of(name)) is not None:
            option, keys = split
            text = value if sign else next(rest, None)
            if text is None or (not sign and text.startswith("--")):
                raise ConfigError(f"{shown(name)} needs a value: write {name:.80}=VALUE")
            _put(name, fields.setdefault(option, {}), keys, text)
        else:
            made.append(word)
    return made + [text for option, tree in fields.items() for text in (f"--{option}", json.dumps(tree))]


def _optimization(word: str, rest: Iterator[str]) -> list[str]:
    """-O3, -O=3 and -O 3."""
    level = word[2:].removeprefix("=") or next(rest, "")
    if level not in LEVELS:
        return [word, level] if word == "-O" else [word]
    return ["--optimization-level", level]


def _field_of(name: str) -> tuple[str, list[str]] | None:
    """Of --option.field.inner: the option, and the way to the field; None: it is no such word."""
    option, *keys = name.split(".")
    if not keys or not name.startswith("-"):
        return None
    option = SHORT.get(option, option.removeprefix("--")).replace("_", "-")
    argument = option.replace("-", "_")
    return (option, keys) if argument in DEFAULTS or argument in VLLM_ARGUMENTS else None


def _put(name: str, tree: dict[str, Any], keys: list[str], text: str) -> None:
    """Sets a field of a nested mapping. A "+" behind its name adds to a list. name: as it was given."""
    *outer, last = keys
    for key in outer:
        inner = tree.get(key)
        if not isinstance(inner, dict):
            inner = tree[key] = {}
        tree = inner
    if last.endswith("+"):
        known = tree.get(last[:-1], [])
        if not isinstance(known, list):
            raise ConfigError(f"{shown(name)} adds to a list, and {shown(known)} was given before: give a list there")
        tree[last[:-1]] = [*known, *text.split(",")]
        return
    try:
        tree[last] = json.loads(text)
    except (ValueError, RecursionError):
        tree[last] = text
