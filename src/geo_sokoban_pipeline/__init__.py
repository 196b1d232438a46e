"""GRPO training of vision-language policies as a Kedro project: data, rollouts, training, evaluation, reports."""

__version__ = "0.1.0"
