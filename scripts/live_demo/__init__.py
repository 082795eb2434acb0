"""The live demo: requests of a real trace served at once, on a terminal."""
