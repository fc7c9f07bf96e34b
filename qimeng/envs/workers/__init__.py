"""Processes in which candidates run, what goes to them and comes back, and what they are watched for."""
