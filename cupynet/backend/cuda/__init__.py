"""The GPU backend. Only it and the NCCL communicator import CuPy. `launch.py` runs the CUDA kernels in `kernels/`."""
