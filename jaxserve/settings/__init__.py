"""Settings of an engine and of its machine, and names of other servers' settings."""
