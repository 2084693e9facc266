"""One base and several LoRA adapters in one batch: `python examples/adapters.py MODEL FOLDER [FOLDER ...]`, of peft's folders."""

from __future__ import annotations

import sys
from pathlib import Path

from actorllm import LLM, LoRARequest, SamplingParams

PROMPT = "Once upon a time there was a fox"


def main(model: str, *folders: str, **options: object) -> dict[str, str]:
    """What the model itself and each adapter make of the prompt."""
    requests = [LoRARequest(Path(folder).name, i, folder) for i, folder in enumerate(folders, 1)]
    with LLM(model, enable_lora=True, max_loras=max(1, len(folders)), **options) as llm:  # type: ignore[arg-type]
        outputs = llm.generate(
            [PROMPT] * (1 + len(requests)),
            SamplingParams(temperature=0, max_tokens=32),
            use_tqdm=False,
            lora_request=[None, *requests],
        )
    names = ["base", *(request.lora_name for request in requests)]
    return {name: output.outputs[0].text for name, output in zip(names, outputs, strict=True)}


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    for name, text in main(*sys.argv[1:]).items():
        print(f"{name}: {text}")
