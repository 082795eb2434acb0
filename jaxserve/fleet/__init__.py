"""Replicas of a server on Ray Serve, behind one address."""
