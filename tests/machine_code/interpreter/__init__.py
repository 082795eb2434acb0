"""The inner modules of the interpreter; `launch.py` beside this folder is its door."""
