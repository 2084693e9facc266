"""`LLM` under a launcher such as torchrun: every rank makes the same calls, and each returns the same outputs."""
