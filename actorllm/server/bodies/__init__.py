"""Bodies of HTTP requests: read, bounded, and parsed where no stream waits for it.

Reading order: `limits` (how much of what a body may hold), `packing` (a large body on its way between processes), `frames`
and `parse_process` (the program that parses large ones, which imports nothing else of this package, so that it starts
quickly), `owned_process` (a child that answers questions), `reader` (what an endpoint calls).
"""
