"""Kernels for CPU: LLVM IR that Python builds and LLVM compiles for the host."""
