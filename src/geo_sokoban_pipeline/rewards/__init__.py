"""Rewards: pure functions of a finished episode that return a number and its parts."""

from geo_sokoban_pipeline.rewards.math_answer import Grade, Grader, GradingPool, grade_answer
from geo_sokoban_pipeline.rewards.sokoban import sokoban_reward

__all__ = ["Grade", "Grader", "GradingPool", "grade_answer", "sokoban_reward"]
