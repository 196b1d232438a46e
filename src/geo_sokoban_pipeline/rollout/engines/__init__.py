"""Rollout engines: what turns token ids and pictures into sampled replies."""
