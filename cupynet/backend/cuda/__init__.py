"""The GPU backend. The only package that imports CuPy, and only when it is used.

`device` has arrays and streams. The operations are in `backend` or in files named as in reference/; `launch` calls
their kernels, CUDA C++ in `kernels/`. `cublas` multiplies matrices, `conv_pool` fuses a convolution and a max-pool, and
`graph_capture` captures a step as a CUDA graph. `transfer` fills batches from images on the GPU or on the host. `gpus`
lists GPUs and limits their memory, `failures` diagnoses their errors.
"""
