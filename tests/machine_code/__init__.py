"""Cases of GPU kernels and whole steps, executed as machine code by `scripts.machine_code`."""
