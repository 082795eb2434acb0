"""The host half: decides what each step computes, in Python and numpy, never JAX."""
