"""A load generator for OpenAI-compatible servers, and scenes that it plays."""
