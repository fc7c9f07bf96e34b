"""The template coder: readable Triton templates, one schedule a region, no model and no network."""
