"""The GPU backend, the only package that imports CuPy. `launch` runs the CUDA C++ kernels in `kernels/`."""
