"""A run of vLLM's own tests of its server against ours."""
