"""vLLM's paths for programs that split the work. `render` says what the engine would be asked, `inference` takes and gives tokens,
and `several` answers more than one conversation. `refused` has paths of media, which no model here takes.
"""
