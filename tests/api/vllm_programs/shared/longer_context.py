"""More context than the model was trained for, by YaRN."""

import sys

from vllm import LLM, SamplingParams


def main(model: str) -> None:
    rope = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 1024, "rope_theta": 10000.0}
    llm = LLM(
        model=model,
        dtype="float32",
        hf_overrides={"rope_parameters": rope, "max_position_embeddings": 2048},
        max_model_len=1500,
        max_num_batched_tokens=2048,
    )
    ids = llm.get_tokenizer().encode("The dog ran to the king and the king smiled. " * 120, add_special_tokens=False)
    (output,) = llm.generate(
        {"prompt_token_ids": ids[:1200]}, SamplingParams(temperature=0, max_tokens=6), use_tqdm=False
    )
    print(len(output.prompt_token_ids), output.outputs[0].text)


if __name__ == "__main__":
    main(sys.argv[1])
