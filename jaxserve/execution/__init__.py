"""The seam: where the host half's plan becomes the device half's arrays, and back."""
