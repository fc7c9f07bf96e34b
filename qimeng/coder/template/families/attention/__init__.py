"""The attention family: a product, what makes weights of it, and a second product."""
