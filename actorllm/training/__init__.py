"""Engines as parts of trainers. Nothing else imports it."""
