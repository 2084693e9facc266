"""Which processes an engine has: who starts, watches, restarts and stops them."""
