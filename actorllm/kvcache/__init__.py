"""The paged KV cache, as bookkeeping: which block belongs to which request. Pure and synchronous; the worker has the bytes."""
