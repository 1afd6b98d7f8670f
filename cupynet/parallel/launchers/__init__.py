"""Launchers start workers and run a function on each of them."""
