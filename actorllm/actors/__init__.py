"""The runtime of actors, and the three of an engine: frontend, scheduler and worker, each with what it alone owns.

Reading order: loops and threads (`engine_thread`), what an actor holds of a peer (`link`), the life cycle (`actor`), the wiring
as data (`topology`). Last comes the main program of a spawned process (`child`). What starts, watches and restarts them is in
`supervision`; how other programs join is in `attach`.
"""
