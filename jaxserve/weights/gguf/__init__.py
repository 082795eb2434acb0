"""llama.cpp's GGUF files, under the names of the checkpoints that they were made from."""
