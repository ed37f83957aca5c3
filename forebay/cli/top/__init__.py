"""`forebay top`: servers that run Forebay, read from their /metrics."""
