"""Pointwise operators, reductions and normalizations: a program owns a block of rows."""
