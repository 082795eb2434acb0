"""`jaxserve bench`: load on a server, and an engine's throughput, latency and starts."""
