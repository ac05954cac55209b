"""Streaming: how units travel between the host and one GPU, and the step that computes on them."""
