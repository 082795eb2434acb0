"""A simulator: the real scheduler under a virtual clock."""
