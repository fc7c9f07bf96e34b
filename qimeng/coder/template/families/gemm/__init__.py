"""Matrix products with what surrounds them."""
