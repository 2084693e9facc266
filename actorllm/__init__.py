"""actorllm: an LLM inference engine to embed in async Python applications, and a laboratory for latency experiments."""

__version__ = "0.1.0"
