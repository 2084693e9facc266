"""vLLM's paths for programs that split the work. `render` says what the engine would be asked, `inference` takes and gives tokens,
and `several` answers more than one conversation. `refused` has paths that make sound and pictures, which no model here does.
"""
