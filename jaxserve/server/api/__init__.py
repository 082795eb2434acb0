"""The endpoints: one file for each API, and what they share."""
