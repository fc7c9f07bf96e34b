"""The judge on a GPU: references, gates, the judge's own clock, baselines, verdicts."""
