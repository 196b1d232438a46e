"""Rollout engines turn token ids and images into sampled responses."""
