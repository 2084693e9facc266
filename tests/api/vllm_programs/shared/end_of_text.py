"""A request that is made to end, and that ignores the end."""

import sys

from vllm import LLM, SamplingParams


def main(model: str) -> None:
    llm = LLM(model=model, dtype="float32", max_model_len=256)
    end = llm.get_tokenizer().eos_token_id
    for ignores in (False, True):
        params = SamplingParams(temperature=0, max_tokens=4, logit_bias={end: 100.0}, ignore_eos=ignores)
        (output,) = llm.generate("The end", params, use_tqdm=False)
        print(list(output.outputs[0].token_ids), repr(output.outputs[0].text), output.outputs[0].finish_reason)


if __name__ == "__main__":
    main(sys.argv[1])
