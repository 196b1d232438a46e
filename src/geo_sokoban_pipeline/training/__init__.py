"""Training: warm start, GRPO updates and the loop around them."""
