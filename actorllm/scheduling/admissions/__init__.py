"""Built-in admission policies, one file each; `scheduling.gate` has their names."""
