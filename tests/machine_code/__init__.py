"""GPU machine code (PTX) executed on a CPU: kernels, and whole programs as XLA compiles them."""
