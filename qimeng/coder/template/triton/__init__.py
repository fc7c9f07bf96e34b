"""Expressions of a loop nest as Triton text."""
