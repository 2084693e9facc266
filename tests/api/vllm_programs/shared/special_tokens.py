"""The end of the text as a text."""

import sys

from vllm import LLM, SamplingParams


def main(model: str) -> None:
    llm = LLM(model=model, dtype="float32", max_model_len=256)
    end = llm.get_tokenizer().eos_token_id
    for skips in (True, False):
        params = SamplingParams(
            temperature=0, max_tokens=3, logit_bias={end: 100.0}, ignore_eos=True, skip_special_tokens=skips
        )
        print(repr(llm.generate("The end", params, use_tqdm=False)[0].outputs[0].text))


if __name__ == "__main__":
    main(sys.argv[1])
