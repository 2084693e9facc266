"""The built-in policies, one file each, as long as the idea."""
