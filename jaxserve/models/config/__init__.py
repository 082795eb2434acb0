"""What config.json says of a model, read strictly: no weight, no JAX."""
