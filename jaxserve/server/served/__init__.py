"""The models of a server, and the admission of requests to them."""
