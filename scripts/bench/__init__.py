"""Benchmarks of this project alone, each a program."""
