"""Which request ends a step, a worker or a scheduler: the search for it by halves."""
