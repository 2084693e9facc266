"""The parameters that the model's folder asks for."""

import sys

from vllm import LLM


def main(model: str) -> None:
    llm = LLM(model=model, dtype="float32", max_model_len=256)
    params = llm.get_default_sampling_params()
    params.max_tokens, params.temperature = 5, 0.0
    print(llm.generate("The", params, use_tqdm=False)[0].outputs[0].text)


if __name__ == "__main__":
    main(sys.argv[1])
