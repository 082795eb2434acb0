"""The loop and its front ends: requests in, outputs out."""
