"""Models that need no download: one with weights (storyteller, and its draft model), and shapes of five for random weights."""
