"""Modules that several packages use. They import no other package."""
