"""Coders that are language models: a chat, a prompt, a reply that becomes a patch.

Importing this loads no model and no client.
"""
