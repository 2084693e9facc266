"""Writes vllm_names.json: the public names of the classes of a vLLM that docs/compatibility.md speaks of, and what
the methods of its engines take.

    python tests/vllm_names.py .../site-packages/vllm

Reads vLLM's source without importing it. Which class is in which table of the page is said here.
"""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Iterator
from pathlib import Path

CLASSES: dict[str, list[tuple[str, str]]] = {
    "SamplingParams": [("sampling_params.py", "SamplingParams")],
    "PoolingParams": [("pooling_params.py", "PoolingParams")],
    "PoolingRequestOutput": [("outputs.py", "PoolingRequestOutput")],
    "BeamSearchParams": [("sampling_params.py", "BeamSearchParams")],
    "RepetitionDetectionParams": [("sampling_params.py", "RepetitionDetectionParams")],
    "BeamSearchSequence": [("entrypoints/generate/beam_search/utils.py", "BeamSearchSequence")],
    "BeamSearchOutput": [("entrypoints/generate/beam_search/utils.py", "BeamSearchOutput")],
    "RequestOutput": [("outputs.py", "RequestOutput")],
    "CompletionOutput": [("outputs.py", "CompletionOutput")],
    "Logprob": [("logprobs.py", "Logprob")],
    "FlatLogprobs": [("logprobs.py", "FlatLogprobs")],
    "RequestMetrics": [("v1/metrics/stats.py", "RequestStateStats")],
    "LLM": [
        ("entrypoints/llm.py", "LLM"),
        ("entrypoints/generate/beam_search/offline.py", "BeamSearchOfflineMixin"),
        ("entrypoints/pooling/offline.py", "PoolingOfflineMixin"),
        ("entrypoints/rl/offline.py", "RLOfflineMixin"),
        ("entrypoints/common/offline.py", "OfflineInferenceMixin"),
    ],
    "LLMEngine": [("v1/engine/llm_engine.py", "LLMEngine")],
    "AsyncLLM": [("v1/engine/async_llm.py", "AsyncLLM"), ("engine/protocol.py", "EngineClient")],
    "EngineArgs": [("engine/arg_utils.py", "EngineArgs"), ("engine/arg_utils.py", "AsyncEngineArgs")],
}
TAKERS = {
    "Request arguments": [
        ("v1/engine/async_llm.py", "AsyncLLM", ("generate", "add_request")),
        ("v1/engine/llm_engine.py", "LLMEngine", ("add_request",)),
        ("entrypoints/llm.py", "LLM", ("generate",)),
    ]
}
NOT_EXTRAS = {"self", "prompt", "prompts", "params", "sampling_params", "request_id", "use_tqdm"}


def class_of(file: Path, name: str) -> ast.ClassDef:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ClassDef) and node.name == name:
            return node
    raise SystemExit(f"{file} has no class {name}")


def members(node: ast.ClassDef) -> Iterator[str]:
    """Fields, methods, properties, and the attributes that the constructor sets."""
    for item in node.body:
        match item:
            case ast.FunctionDef(name="__init__"):
                for inner in ast.walk(item):
                    match inner:
                        case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                            yield name
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield name
            case ast.AnnAssign(target=ast.Name(id=name)):
                yield name


def signatures(node: ast.ClassDef) -> dict[str, dict[str, list[str]]]:
    """What every public method takes: by position, and by name only."""
    return {
        item.name: {
            "positional": [argument.arg for argument in item.args.args if argument.arg not in ("self", "cls")],
            "named": [argument.arg for argument in item.args.kwonlyargs],
        }
        for item in node.body
        if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef) and not item.name.startswith("_")
    }


def fields(node: ast.ClassDef) -> list[str]:
    """In the order of the class, which is that of the constructor's arguments."""
    return [
        item.target.id for item in node.body if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
    ]


def parameters(node: ast.ClassDef, methods: tuple[str, ...]) -> Iterator[str]:
    for item in node.body:
        if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef) and item.name in methods:
            yield from (argument.arg for argument in [*item.args.args, *item.args.kwonlyargs])


def main(root: Path) -> None:
    metadata = next(root.parent.glob("vllm*.dist-info")).name
    names = {
        table: sorted(
            {name for file, cls in classes for name in members(class_of(root / file, cls)) if not name.startswith("_")}
        )
        for table, classes in CLASSES.items()
    }
    for table, takers in TAKERS.items():
        extras = {name for file, cls, methods in takers for name in parameters(class_of(root / file, cls), methods)}
        names[table] = sorted(extras - NOT_EXTRAS)
    engines: dict[str, dict[str, dict[str, list[str]]]] = {"LLM": {}, "LLMEngine": {}, "AsyncLLM": {}}
    for table, found in engines.items():
        for file, cls in reversed(CLASSES[table]):
            found |= signatures(class_of(root / file, cls))
    tree = ast.parse((root / "__init__.py").read_text())
    (exported,) = [
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and "__all__" in ast.unparse(node.targets[0])
    ]
    made = {
        "version": metadata.removesuffix(".dist-info").split("-")[1],
        "exported": exported,
        "names": names,
        "signatures": engines,
        "fields": {"SamplingParams": fields(class_of(root / "sampling_params.py", "SamplingParams"))},
    }
    Path(__file__).with_suffix(".json").write_text(json.dumps(made, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
