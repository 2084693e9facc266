"""Models that run through transformers: its modules, our attention. Decoders over the paged cache, and encoders."""
