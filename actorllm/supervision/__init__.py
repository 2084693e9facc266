"""Start, supervision, restart and stop of the processes of an engine."""
