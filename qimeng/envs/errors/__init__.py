"""How far a result is from the reference, and whether that is too far."""
