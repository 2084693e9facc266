"""What planners and monitors read of an engine before they use it."""

import sys

from vllm import LLM, EngineArgs
from vllm.entrypoints.llm import UsageContext
from vllm.v1.engine.async_llm import AsyncEngineArgs


def main(model: str) -> None:
    llm = LLM(model=model, dtype="float32", max_model_len=256, enforce_eager=True)
    config = llm.llm_engine.vllm_config
    of_model, parallel = config.model_config, config.parallel_config
    print(of_model.max_model_len, of_model.get_vocab_size(), of_model.get_hidden_size(), of_model.get_head_size())
    print(
        of_model.get_num_layers(parallel),
        of_model.get_num_kv_heads(parallel),
        of_model.get_num_attention_heads(parallel),
    )
    print(of_model.hf_config.model_type, of_model.hf_text_config.num_hidden_layers, of_model.runner_type)
    print(of_model.is_multimodal_model, of_model.is_encoder_decoder, of_model.get_sliding_window())
    print(of_model.quantization, of_model.trust_remote_code, of_model.max_logprobs, of_model.logprobs_mode)
    print(parallel.tensor_parallel_size, parallel.pipeline_parallel_size, parallel.world_size, parallel.rank)
    print(config.scheduler_config.max_num_seqs, config.scheduler_config.policy, config.cache_config.num_gpu_blocks > 0)
    print(config.lora_config, config.speculative_config, config.kv_transfer_config, config.device_config.device_type)
    per_token = (
        2 * of_model.get_num_layers(parallel) * of_model.get_num_kv_heads(parallel) * of_model.get_head_size() * 4
    )
    print(per_token, config.cache_config.block_size % 16)
    args = AsyncEngineArgs(model=model, max_model_len=128)
    print(isinstance(args, EngineArgs), args.create_model_config().max_model_len, UsageContext.LLM_CLASS.value)


if __name__ == "__main__":
    main(sys.argv[1])
