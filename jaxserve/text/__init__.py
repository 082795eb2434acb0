"""Text to token ids and back, chat templates, and the forms that an answer may be bound to."""
