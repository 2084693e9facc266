"""Chat and per-prompt parameters, defaults of the model, several samples, log probabilities, token prompts."""

import sys

from vllm import LLM, SamplingParams, TokensPrompt


def main() -> None:
    llm = LLM(model=sys.argv[1], max_model_len=512, enforce_eager=True, seed=0)
    sampling_params = llm.get_default_sampling_params()
    sampling_params.max_tokens = 12
    (output,) = llm.generate("Once upon a time", sampling_params, use_tqdm=False)
    print(output.outputs[0].text, output.outputs[0].finish_reason, len(output.prompt_token_ids))

    params = [
        SamplingParams(n=2, temperature=1.0, seed=1, max_tokens=8),
        SamplingParams(temperature=0.0, logprobs=2, prompt_logprobs=1, max_tokens=4),
        SamplingParams(
            temperature=0.7, presence_penalty=0.2, frequency_penalty=0.1, repetition_penalty=1.1, stop=["."]
        ),
    ]
    outputs = llm.generate([TokensPrompt(prompt_token_ids=[5, 6, 7]), "The cat sat", "A boy"], params)
    assert [len(output.outputs) for output in outputs] == [2, 1, 1]
    chosen = outputs[1].outputs[0]
    for token_id, logprobs in zip(chosen.token_ids, chosen.logprobs, strict=True):
        print(token_id, logprobs[token_id].logprob, logprobs[token_id].rank, logprobs[token_id].decoded_token)
    assert outputs[1].prompt_logprobs[0] is None
    assert len(outputs[1].prompt_logprobs) == len(outputs[1].prompt_token_ids)

    conversation = [{"role": "system", "content": "You tell stories."}, {"role": "user", "content": "Hello"}]
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
    (output,) = llm.chat(conversation, SamplingParams(max_tokens=8), chat_template=template, use_tqdm=False)
    print(output.outputs[0].text)


if __name__ == "__main__":
    main()
