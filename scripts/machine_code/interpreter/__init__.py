"""Internal modules of the interpreter. `launch.py` in the folder above is the interface."""
