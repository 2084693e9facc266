"""Blame: the search for the request that ends a step, a worker or a scheduler, by bisection."""
