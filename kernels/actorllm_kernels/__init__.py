"""Kernels of actorllm and, in `reference`, the plain statement of what each one computes.

Depends on torch (and Triton, where a kernel is compiled) only, never on actorllm.
"""
