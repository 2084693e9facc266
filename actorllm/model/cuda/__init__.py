"""The worker's model on a GPU: own Triton kernels, decode steps as whole CUDA graphs, tokens fed back on the device.

Reading order: `device` (what is different where there is no GPU), `ops` (the kernels, so that a graph of them can be recorded),
`state` (the table of slots), `cache`, `decoder`, `sampling`, `graphs`, `runner`. docs/gpu.md has the picture.
"""
