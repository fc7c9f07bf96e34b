"""What planners train on: specs drawn from a seed, and the trees that were explored on them."""
