"""Translates the settings into the arguments of each part."""
