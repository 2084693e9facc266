"""Retrieval: the nearest of some texts by their vectors, and an answer that goes on from it."""

import math
import sys

from vllm import LLM, SamplingParams
from vllm.config import PoolerConfig

TEXTS = ["The dog barked at the moon.", "The king ate a big red apple.", "Rain fell on the river all night."]


def cosine(a: list[float], b: list[float]) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True)) / math.sqrt(sum(x * x for x in a) * sum(y * y for y in b))


def main(model: str) -> None:
    embedder = LLM(
        model=model,
        dtype="float32",
        max_model_len=256,
        runner="pooling",
        convert="embed",
        pooler_config=PoolerConfig(seq_pooling_type="MEAN"),
    )
    index = [output.outputs.embedding for output in embedder.embed(TEXTS, use_tqdm=False)]
    writer = LLM(model=model, dtype="float32", max_model_len=256)
    for question in ("Who barked?", "What did the king eat?", "Where did the rain fall?"):
        (asked,) = embedder.embed(question, use_tqdm=False)
        scores = [cosine(asked.outputs.embedding, vector) for vector in index]
        order = sorted(range(len(TEXTS)), key=lambda i: -scores[i])
        prompt = f"{TEXTS[order[0]]} {question}"
        (answer,) = writer.generate(prompt, SamplingParams(temperature=0, max_tokens=6, stop=["."]), use_tqdm=False)
        print(order, [round(score, 2) for score in scores], answer.outputs[0].text)


if __name__ == "__main__":
    main(sys.argv[1])
