"""Training data for planners: generated specs, and the trees explored on them."""
