"""Kernels for NVIDIA GPUs, in Pallas-Triton and Pallas-Mosaic-GPU, and their block sizes."""
