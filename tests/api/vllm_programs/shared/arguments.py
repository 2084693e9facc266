"""A command line of vLLM's arguments becomes an engine."""

import sys

from vllm import LLM, EngineArgs, SamplingParams
from vllm.utils.argparse_utils import FlexibleArgumentParser


def main(model: str) -> None:
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    given = parser.parse_args(["--model", model, "--max-model-len", "256", "--dtype", "float32"])
    args = EngineArgs.from_cli_args(given)
    print(args.max_model_len, args.dtype, args.model == model)
    llm = LLM(model=args.model, dtype=args.dtype, max_model_len=args.max_model_len)
    print(llm.generate("The", SamplingParams(temperature=0, max_tokens=3), use_tqdm=False)[0].outputs[0].text)


if __name__ == "__main__":
    main(sys.argv[1])
