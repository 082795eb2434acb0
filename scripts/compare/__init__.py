"""This engine and others on one workload; the workers run with other engines' Python."""
