"""What stands in for a GPU in tests: CUDA's words for a C++ compiler (include/, host.py)."""
