"""Recurrent layers on the CPU: what they keep of each slot, and how they mix tokens."""
