"""Between text and token ids: tokenizing prompts, detokenizing outputs as they come, stop strings."""
