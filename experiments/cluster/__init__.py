"""Evaluations on several GPUs: how many an hour, and what a cluster costs beside a pool of one machine."""
