"""A classifier of the rows of the language model's head."""

import sys

from vllm import LLM, PoolingParams

WORDS = ["Ġking", "Ġdog", "Ġtree"]


def main(model: str) -> None:
    llm = LLM(
        model=model,
        dtype="float32",
        max_model_len=256,
        runner="pooling",
        hf_overrides={
            "architectures": ["LlamaForSequenceClassification"],
            "classifier_from_token": WORDS,
            "method": "no_post_processing",
            "num_labels": len(WORDS),
        },
    )
    for output in llm.classify(["On the throne sat the", "In the forest stood a tall"], use_tqdm=False):
        print(output.outputs.num_classes, [round(p, 4) for p in output.outputs.probs])
    params = PoolingParams(use_activation=False)
    for output in llm.classify(["It barked like a"], pooling_params=params, use_tqdm=False):
        print(max(zip(output.outputs.probs, WORDS, strict=True))[1][1:])


if __name__ == "__main__":
    main(sys.argv[1])
