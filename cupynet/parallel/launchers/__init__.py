"""Launchers start the workers and run a function on each of them."""
