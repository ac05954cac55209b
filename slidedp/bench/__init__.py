"""Measured speed on real hardware: random weights, random tokens, real optimizer steps."""
