"""The scan family: cumulative operators with pointwise operators and reductions around them."""
