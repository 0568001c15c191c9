"""Layers and activation functions with derivatives written out."""
