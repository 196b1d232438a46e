"""The SGLang engine: servers, what is said to them, and what happens when they fail."""
