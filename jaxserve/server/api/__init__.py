"""The endpoints, one module for each API, and the modules that they share.

An endpoint that cannot answer raises ApiError, InvalidRequest or Overloaded, which the client gets
with its status: the body is malformed, a field or an argument is wrong (the error names it), the
client has no such model or object (404), the server is stopping (503), or the queue is full (429).
The docstring of an endpoint adds the errors of its own.
"""
