"""Sources of models: a folder, a GGUF file, a converted folder, the hub."""
