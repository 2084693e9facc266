"""The worker's model on a GPU: own Triton kernels, decode steps as whole CUDA graphs, tokens fed back on the device.

Reading order: what is different where there is no GPU (`device`), and the kernels, so that a graph of them can be recorded
(`ops`). Then the table of slots (`state`), `cache`, `decoder`, `sampling`, `graphs` and `runner`. docs/gpu.md has the picture.
"""
