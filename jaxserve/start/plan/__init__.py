"""The plan of a start: dtype, stored form, context length, memory, steps."""
