"""The host half of a step: scheduling in Python and NumPy, without JAX."""
