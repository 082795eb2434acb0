"""Configuration of a model from config.json, read strictly, without weights or JAX."""
