"""Endpoints of engines that make vectors: `bodies` are what clients send, `asking` is what the engine is asked for that, and
`vector_shapes` what goes back. `routes` has the paths.
"""
