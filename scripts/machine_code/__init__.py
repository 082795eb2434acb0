"""Interpreter of GPU machine code (PTX) on a CPU, and readers of the programs that XLA compiles."""
