"""This engine and others on one workload. The workers run with other engines' Python."""
