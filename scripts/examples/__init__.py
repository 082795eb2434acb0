"""Small programs, one for each way to use jaxserve. Each runs on the bundled model."""
