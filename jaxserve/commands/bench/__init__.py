"""`jaxserve bench`: benchmarks of a server under load, and of an engine."""
