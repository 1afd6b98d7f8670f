"""The GPU: the only package that imports CuPy, and only when it is used.

`device` has arrays and streams; the operations are in `backend` or in files of the same names as in reference/, their
CUDA C++ in `kernels/`, and `launch` calls it. `cublas` multiplies matrices; `conv_pool` fuses a convolution and a
max-pool; `graph_capture` records a step as one launch. `transfer` fills batches, from images kept on the GPU or on the
host. `gpus` lists GPUs and limits their memory, `failures` diagnoses their errors.
"""
