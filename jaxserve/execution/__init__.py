"""The seam between host and device: plans become arrays, and arrays become results."""
