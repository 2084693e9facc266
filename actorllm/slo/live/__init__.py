"""The ends of the latency laboratory that touch a running engine, a server or the network. `actorllm.slo` is its pure half.

Replays send a workload in real time and give the same `RunTimeline` as a simulation. Calibrations let an engine run and fit a
step-time model to it. Traces are downloaded here. Called by the command line and by experiments.
"""
