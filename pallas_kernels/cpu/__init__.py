"""The kernels for CPU: LLVM IR, written in Python and compiled for the host."""
