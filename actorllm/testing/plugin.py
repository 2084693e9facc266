"""The fixtures as a plugin: `pytest_plugins = ["actorllm.testing.plugin"]` in the conftest.py of an application."""

from actorllm.testing.fixtures import scripted_llm

__all__ = ["scripted_llm"]
