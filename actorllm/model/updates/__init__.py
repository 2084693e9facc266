"""Weights that a trainer hands over: tensors in memory that every worker maps (`tensor_files`)."""
