"""What a row looks like: column spans, bit views, row order, pages. Nothing here communicates."""
