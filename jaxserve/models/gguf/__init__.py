"""Rules by which GGUF files are read: config.json out of metadata, and names of tensors."""
