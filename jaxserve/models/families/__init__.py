"""Families of models, one file each: config.json, traits, tensors and GGUF files."""
