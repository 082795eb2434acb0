"""Kernels for NVIDIA GPUs, in Pallas-Triton and Pallas-Mosaic-GPU, and their block sizes.

Functions that call kernels have two common options. `config` holds block sizes, and None reads the
tuning table. `interpret` runs a kernel on any device, slowly, as plain JAX operations.
"""
