"""The HTTP server: OpenAI's endpoints, and Anthropic's, over AsyncLLM."""
