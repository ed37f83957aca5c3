"""How much host memory is worth giving: traces, replay through the real manager, miss-ratio curves, a report."""
