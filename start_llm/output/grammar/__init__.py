"""Constrained decoding: build a grammar from a request's output constraint and mask tokens that break it."""
