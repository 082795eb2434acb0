"""Tools: from a request's declarations to a grammar, and from drawn text to calls."""
