"""Supervision: starts, watches, restarts and stops the processes of an engine."""
