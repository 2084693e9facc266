"""A program with flags of its own beside those of the engine, and a default that the command line overrides."""

import sys

from vllm import LLM, EngineArgs, SamplingParams
from vllm.utils.argparse_utils import FlexibleArgumentParser


def main(model: str) -> None:
    parser = FlexibleArgumentParser(description="writes")
    parser.add_argument("--num-prompts", type=int, default=2)
    EngineArgs.add_cli_args(parser)
    parser.set_defaults(max_model_len=128, dtype="float32")
    given = parser.parse_args(
        [
            "--model",
            model,
            "--num_prompts",
            "3",
            "--max-num-batched-tokens",
            "2k",
            "--no-enable-prefix-caching",
            "--seed=5",
        ]
    )
    args = EngineArgs.from_cli_args(given)
    print(given.num_prompts, args.max_model_len, args.max_num_batched_tokens, args.enable_prefix_caching, args.seed)
    llm = LLM(
        model=args.model,
        dtype=args.dtype,
        max_model_len=args.max_model_len,
        max_num_batched_tokens=args.max_num_batched_tokens,
        enable_prefix_caching=args.enable_prefix_caching,
        seed=args.seed,
    )
    prompts = ["Once upon a time"] * given.num_prompts
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=4), use_tqdm=False)
    print(len({output.outputs[0].text for output in outputs}), outputs[0].num_cached_tokens, outputs[0].outputs[0].text)


if __name__ == "__main__":
    main(sys.argv[1])
