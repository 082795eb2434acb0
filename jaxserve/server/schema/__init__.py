"""Schemas of requests and answers, their checks, and the errors that refusals become."""
