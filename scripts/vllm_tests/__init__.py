"""Runs vLLM's own tests of its server against ours."""
