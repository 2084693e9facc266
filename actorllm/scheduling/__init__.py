"""The scheduler: a synchronous, deterministic state machine. No I/O, no clock, no torch, no logging; `now` is an argument.

The scheduler actor, the inline topology and the simulator drive the same object.
"""
