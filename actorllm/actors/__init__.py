"""The runtime of actors, and the three of an engine: frontend, scheduler and worker, each with what it alone owns.

Reading order: engine_thread (loops and threads) → link (what an actor holds of a peer) → actor (the life cycle) →
topology (the wiring as data) → child (the main of a spawned process). What starts, watches and restarts them is in
`supervision`; how other programs join is in `attach`.
"""
