"""Benchmarks of training on this machine, with PyTorch for comparison, and the cost model of `cupynet plan`."""
