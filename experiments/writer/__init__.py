"""A small language model that writes kernels: trained here, from nothing, on patches that were accepted.

It shows that the LLM coder works with a model that really writes Triton: `examples` (what it learns from, and what is
held out), `resized` (the same steps at other sizes), `symbolic` (numbers as expressions of the shapes), `model`
(tokenizer and weights), `training`, `answering`, `copying` (what it has to be ahead of), `judging` (what its patches
are worth, beside an untrained model and beside copying), `folder` (the files of an experiment).
"""
