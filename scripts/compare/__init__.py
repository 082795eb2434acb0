"""The parts of ``compare_engines.py``; the workers run with other engines' Python."""
