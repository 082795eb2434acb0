"""Read llama.cpp's GGUF files as the Hugging Face checkpoints that they were converted from."""
