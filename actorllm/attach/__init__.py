"""Programs that join an engine that another program has started: both sides, and what is checked of them."""
