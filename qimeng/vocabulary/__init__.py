"""Vocabularies that come with the library: each is a package that registers what it brings, as a user's own would."""
