"""Coders: who turns an action into a patch. `TemplateCoder` is the embedded default."""
