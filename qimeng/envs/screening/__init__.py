"""What a candidate's text may say before it runs, and tools that watch its memory accesses."""
