"""KV tiers: which blocks leave the KV cache for host memory or a disk, and which come back from there. Pure."""
