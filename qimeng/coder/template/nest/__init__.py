"""Regions as loop nests: axes, expressions, what is loaded. No kernel text."""
