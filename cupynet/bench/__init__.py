"""Benchmarks: parts of training measured on this machine, PyTorch as the peer, records of GPUs, the cost model."""
