"""What outlives a request: responses in memory, files and batches on disk."""
