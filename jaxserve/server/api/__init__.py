"""The endpoints, one module for each API, and the modules that they share."""
