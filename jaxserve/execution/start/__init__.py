"""Starts of an engine: the programs to compile, and where compiled ones are kept."""
