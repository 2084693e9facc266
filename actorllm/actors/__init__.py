"""The processes of an engine as actors: who they are, how they are wired, who starts them and who sees them die.

Reading order: engine_thread (loops and threads) → link (what an actor holds of a peer) → actor (the life cycle) →
topology (the wiring as data) → child (the main of a spawned process) → supervisor (spawns, wires, watches, stops) →
echo (the smallest actor). The engine's own actors are frontend, scheduler and worker. Programs that join a named engine:
rendezvous (names and handshake) → reception (the owner's side) → membership (theirs).
"""
