"""Callbacks: code that runs at events of training."""
