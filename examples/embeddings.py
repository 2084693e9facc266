"""Find what answers a question: vectors of documents, and how alike the question they are.

    python examples/embeddings.py MODEL "Who eats?"

MODEL is the folder of an encoder, such as one of sentence-transformers (default: the bundled storyteller, which was trained to
write and knows little of meaning). All documents are submitted at once and packed into steps together.
"""

from __future__ import annotations

import sys

import anyio
import numpy as np

from actorllm import AsyncLLM, EmbeddingRequestOutput

DOCUMENTS = [
    "The cat sleeps on the warm roof all day.",
    "A hungry man sits down for dinner.",
    "Trains to the coast leave every hour.",
    "Share prices fell sharply on Tuesday.",
]


async def main(model: str, question: str) -> None:
    async with AsyncLLM(model, runner="pooling") as llm:
        vectors: list[EmbeddingRequestOutput] = []

        async def embed(document: str) -> None:
            vectors.append(await llm.embed(document))

        async with anyio.create_task_group() as tasks:
            for document in DOCUMENTS:
                tasks.start_soon(embed, document)
        print(f"{len(vectors)} vectors of {vectors[0].outputs.hidden_size} numbers")
        length = np.linalg.norm(vectors[0].outputs.embedding)
        print(f"of length {length:.3f}, after {max(v.metrics.first_token_latency for v in vectors if v.metrics):.3f} s")

        scores = await llm.score(question, DOCUMENTS)  # one query and several documents
        ranked = sorted(zip(scores, DOCUMENTS, strict=True), key=lambda pair: -pair[0].outputs.score)
        for score, document in ranked:
            print(f"{score.outputs.score:6.3f}  {document}")


if __name__ == "__main__":
    arguments = sys.argv[1:]
    anyio.run(
        main,
        arguments[0] if arguments else "storyteller",
        arguments[1] if len(arguments) > 1 else "Who is about to eat?",
    )
