"""Whole steps of the engine, compiled for a card and executed without it.

The engine serves a schedule on the CPU, and its calls of compiled programs are recorded.
The same programs, compiled for a card, are then executed call by call, with the device's state
carried from each to the next, and must give the tokens that the CPU gave.
"""
