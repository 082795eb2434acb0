"""The start of an engine: sources, plan, weights and programs."""
