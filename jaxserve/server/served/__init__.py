"""The models that a server serves, and who is admitted to them."""
