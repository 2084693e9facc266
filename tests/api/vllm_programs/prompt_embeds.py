"""Prompts given as embeddings: those of a chat's own tokens give what the tokens give."""

import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from vllm import LLM, SamplingParams

TEXTS = ["Once upon a time there was a little fox", "The sun was warm and"]


def main() -> None:
    model_name = sys.argv[1]
    tokenizer = AutoTokenizer.from_pretrained(model_name)
    embedding_layer = AutoModelForCausalLM.from_pretrained(model_name, dtype=torch.float32).get_input_embeddings()
    llm = LLM(model=model_name, dtype="float32", max_model_len=512, enable_prompt_embeds=True, enforce_eager=True)
    params = SamplingParams(temperature=0.0, max_tokens=16)

    prompts = []
    for text in TEXTS:
        token_ids = tokenizer(text, return_tensors="pt").input_ids
        prompts.append({"prompt_embeds": embedding_layer(token_ids).squeeze(0).detach()})
    (single,) = llm.generate(prompts[0], params)
    outputs = llm.generate([*prompts, *TEXTS], params)
    texts = [output.outputs[0].text for output in outputs]
    print(texts)
    assert single.outputs[0].text == texts[0]
    assert texts[:2] == texts[2:]
    assert [output.prompt for output in outputs] == [None, None, *TEXTS]

    llm_tokenizer = llm.get_tokenizer()
    assert [llm_tokenizer.encode(text) for text in TEXTS] == [list(output.prompt_token_ids) for output in outputs[2:]]
    print("same text:", len(texts) // 2)


if __name__ == "__main__":
    main()
