"""What a scheduler tells of itself: counters, history, snapshots, recordings. No decision reads it."""
