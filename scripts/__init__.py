"""Programs that measure, tune and show this project. scripts/README.md lists their commands."""
