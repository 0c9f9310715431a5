"""The bundled sample: a small trained V4 checkpoint in the official layout."""
