"""Launchers: what runs one task on every worker."""
