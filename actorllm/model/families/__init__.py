"""The families with a fused forward: each file turns a config.json into the shape of a decoder."""
