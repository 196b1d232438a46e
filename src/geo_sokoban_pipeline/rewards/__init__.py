"""Rewards: pure functions from what an episode did to a number and the parts it is made of."""

from geo_sokoban_pipeline.rewards.math_answer import Grade, Grader, grade_answer
from geo_sokoban_pipeline.rewards.sokoban import sokoban_reward

__all__ = ["Grade", "Grader", "grade_answer", "sokoban_reward"]
