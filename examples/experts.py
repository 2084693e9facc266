"""A mixture of experts with its experts in 4 or 8 bits, and its speed: `python examples/experts.py MODEL [int4|int8]`."""

from __future__ import annotations

import sys
import time

from actorllm import LLM, SamplingParams


def main(model: str, quantization: str | None = None, **options: object) -> tuple[list[int], float]:
    """The tokens of one request, and how many came in a second after the first."""
    with LLM(model, quantization=quantization, **options) as llm:  # type: ignore[arg-type]
        params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
        llm.generate(
            "Once upon a time", SamplingParams(max_tokens=1), use_tqdm=False
        )  # reads the prompt into the cache
        began = time.perf_counter()
        output = llm.generate("Once upon a time", params, use_tqdm=False)[0].outputs[0]
        return list(output.token_ids), len(output.token_ids) / (time.perf_counter() - began)


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    tokens, per_second = main(*sys.argv[1:3])
    print(f"{len(tokens)} tokens, {per_second:.1f} a second")
