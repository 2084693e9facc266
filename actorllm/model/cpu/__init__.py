"""The worker on the CPU: runner, fused decoder, paged attention, building blocks."""
