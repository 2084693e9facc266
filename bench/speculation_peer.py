"""llama.cpp's prompt lookup, as a side of `bench/speculation.py`: its server in this process, by xllamacpp.

A grammar forces the text: one token at a time, by its id. It is one of llguidance, which says at once what it allows. A grammar
of llama.cpp's own tries the whole vocabulary for each token. The server's own time of the decoding counts, without HTTP and
without the prompt.
"""

from __future__ import annotations

import json
import urllib.request
from typing import Any

from sides import options_of_side, serve


def start() -> tuple[Any, Any]:
    found = options_of_side()
    assert found is not None
    _, options = found
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = options["gguf"]
    settings = {"n_ctx": options["context"], "n_batch": 2048, "n_ubatch": 2048, "n_parallel": 1}
    for name, value in settings.items():
        setattr(params, name, value)
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = options["threads"]
    if options["drafts"]:
        speculative = params.speculative
        speculative.types = [getattr(xllamacpp.common_speculative_type, f"COMMON_SPECULATIVE_TYPE_{options['kind']}")]
        speculative.ngram_simple.size_n, speculative.ngram_simple.size_m = options["lookup"], options["drafts"]
        speculative.draft.n_max = options["drafts"]
    server = xllamacpp.Server(params)

    def do(command: dict[str, Any]) -> dict[str, Any]:
        """The tokens behind a prompt, and milliseconds for each. text: what is forced; None: nothing."""
        text = command["text"]
        body = {
            "prompt": command["prompt"],
            "n_predict": command["tokens"],
            "temperature": 0.0,
            "samplers": ["top_k"],
            "top_k": 1,
            "ignore_eos": True,
            "cache_prompt": False,
            "return_tokens": True,
        }
        if text is not None:
            body["grammar"] = "%llguidance {}\nstart: " + " ".join(f"<[{token}]>" for token in text)
        request = urllib.request.Request(
            f"{server.listening_address}/completion", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request) as answer:
            tree = json.load(answer)
        timings = tree["timings"]
        return {
            "tokens": tree["tokens"],
            "ms": timings["predicted_ms"] / max(1, timings["predicted_n"] - 1),
            "drafts": timings.get("draft_n", 0),
            "accepted": timings.get("draft_n_accepted", 0),
        }

    return {"engine": settings | {name: options[name] for name in ("drafts", "kind")}}, do


if __name__ == "__main__":
    serve(start)
