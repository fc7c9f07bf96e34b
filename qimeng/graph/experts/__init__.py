"""Python loops over experts: captured as a computation of fixed sizes, in which all experts compute all rows."""
