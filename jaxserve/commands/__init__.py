"""The `jaxserve` command: one file for each of its subcommands."""
