"""How rows move between their owners. Nothing here knows a model."""
