"""Programs that join an engine that another program has started: both sides, and the validation of their messages."""
