"""Loops over steps with carried states: what one is (`loop`)."""
