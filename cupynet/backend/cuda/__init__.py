"""The GPU backend, the only package that imports CuPy. `launch` calls the CUDA C++ kernels in `kernels/`."""
