"""The application around the endpoints: connections, limits, log lines, the process."""
