"""KV tiers at work: files of KV blocks in memory and on a disk, the thread that moves blocks, and what asks for it."""
