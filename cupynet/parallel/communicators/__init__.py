"""Communicators: collectives and messages between the workers of a run."""
