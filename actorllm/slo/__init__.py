"""The latency laboratory: objectives, workloads, the step-time model, the simulator, and the figures of a run."""
