"""Fused operations of decode steps. An operation is one registered torch operator, with a slow twin
in torch operations, which runs on a CPU, and one Triton kernel, which runs on a GPU.

A file `NAME.py` has the operators and their twins, `NAME_triton.py` the kernels and the functions
that launch them. Only the latter need Triton, which comes with torch for CUDA; they are imported
when an operator first runs on a GPU. Knows neither models nor requests.
"""
