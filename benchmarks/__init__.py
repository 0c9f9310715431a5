"""How fast, and still right."""
