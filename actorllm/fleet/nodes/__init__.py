"""Replicas on other machines: frames over a stream, the relay beside a scheduler, the program that starts replicas for others."""
