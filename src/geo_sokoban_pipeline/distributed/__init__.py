"""Ranks: processes that compute one training step together, and their collectives."""
