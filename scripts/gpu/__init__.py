"""Reports, tuning and profiles of GPUs, and compilation for one without having it."""
