"""Training samples: text, prepared arrays, and their order."""
