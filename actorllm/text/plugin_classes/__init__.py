"""vLLM's base classes of parsers, for plug-in files that derive from them: `actorllm.compat` has their names and places.

What runs such a class is `text.reasoning.plugin_reasoning` and `server.tool_formats.plugin_calls`.
"""
