"""Evaluations and whole tasks on the GPUs of several machines; needs the extra ``cluster`` (Ray)."""
