"""Drafts of a worker: the drafters, and what they are told of each row. Nothing here is torch."""
