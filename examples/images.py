"""Ask a model such as LLaVA about an image: `python examples/images.py MODEL IMAGE [question]`. Needs actorllm[media]."""

from __future__ import annotations

import sys

from PIL import Image

from actorllm import LLM, SamplingParams


def main(model: str, path: str, question: str = "What is in this image?", **options: object) -> str:
    """The model's answer."""
    with LLM(model, **options) as llm, Image.open(path) as image:  # type: ignore[arg-type]
        content = [{"type": "image", "image": image}, {"type": "text", "text": question}]
        output = llm.chat(
            [{"role": "user", "content": content}], SamplingParams(temperature=0, max_tokens=64), use_tqdm=False
        )
        return output[0].outputs[0].text


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    print(main(*sys.argv[1:4]))
