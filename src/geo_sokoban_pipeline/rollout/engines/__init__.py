"""Rollout engines: what turns token ids and images into sampled responses."""
