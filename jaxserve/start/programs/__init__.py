"""Compiled programs: compile, store, load."""
