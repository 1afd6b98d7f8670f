"""Synchronizers: what keeps replicas together."""
