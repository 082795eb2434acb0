"""Things that outlive a request: responses in memory, files and batches on disk."""
