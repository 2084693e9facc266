"""The paged KV cache, as bookkeeping: which block belongs to whom. Pure and synchronous; the bytes are the worker's."""
