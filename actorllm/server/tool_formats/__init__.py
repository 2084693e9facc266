"""Ways of writing tool calls beside those of `server.tool_parsers`: a module for each kind, imported when it is asked for.

`FORMATS` has their names, which are vLLM's. Called by `server.tool_parsers.parser_named`.
"""

_HERE = "actorllm.server.tool_formats"

FORMATS = {
    "granite": f"{_HERE}.json_calls:GraniteParser",
    "granite4": "actorllm.server.tool_parsers:HermesParser",
    "hunyuan_a13b": f"{_HERE}.json_calls:JambaParser",
    "internlm": f"{_HERE}.json_calls:InternLMParser",
    "jamba": f"{_HERE}.json_calls:JambaParser",
    "phi4_mini_json": f"{_HERE}.json_calls:Phi4Parser",
    "deepseek_v3": f"{_HERE}.sections:DeepSeekV3Parser",
    "deepseek_v31": f"{_HERE}.sections:DeepSeekV31Parser",
    "kimi_k2": f"{_HERE}.sections:KimiK2Parser",
    "deepseek_v32": f"{_HERE}.tagged:DeepSeekV32Parser",
    "glm45": f"{_HERE}.tagged:GLM45Parser",
    "glm47": f"{_HERE}.tagged:GLM45Parser",
    "minimax_m2": f"{_HERE}.tagged:MiniMaxM2Parser",
    "qwen3_coder": f"{_HERE}.tagged:Qwen3CoderParser",
    "qwen3_xml": f"{_HERE}.tagged:Qwen3CoderParser",
    "seed_oss": f"{_HERE}.tagged:SeedOSSParser",
    "openai": f"{_HERE}.harmony:HarmonyParser",
}
"""'module:Class' by name."""
