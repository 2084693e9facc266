"""Built-in admission policies, one file each; `scheduling.admission_policy` has their names."""
