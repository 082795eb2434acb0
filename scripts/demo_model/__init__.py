"""The bundled model: its tasks, its training, and the checkpoint's files."""
