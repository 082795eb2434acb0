"""Modules that several of the packages use; none of them imports another package."""
