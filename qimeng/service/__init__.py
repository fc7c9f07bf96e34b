"""Evaluation as a service: a server that judges strangers' kernels, and a client."""
