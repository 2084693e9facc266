"""Ranks that a launcher has started, each in its own process: rank 0 schedules, and tells the others what to compute."""
