"""The latency laboratory: what a request promises (objectives); later the workloads, the simulator and the reports."""
