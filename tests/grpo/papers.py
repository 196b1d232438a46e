"""The papers' equations of each advantage, term by term, from lists of numbers.

Each takes the episodes of an iteration, and gives a list per episode: one number, or one of each of its turns.
"""

from __future__ import annotations

import math
import statistics

import numpy as np


def deviation(values):
    return statistics.stdev(values) if len(set(values)) > 1 else 0.0


def grpo_of_the_paper(episodes, scale):
    rows = []
    for reward, group in zip(episodes.reward, episodes.group, strict=True):
        others = [r for r, g in zip(episodes.reward, episodes.group, strict=True) if g == group]
        rows.append([(reward - statistics.fmean(others)) / (deviation(others) + 1e-6 if scale == "std" else 1)])
    return rows


def rloo_of_the_paper(episodes):
    members = list(enumerate(episodes.group))
    others = [[episodes.reward[j] for j, h in members if h == g and j != i] for i, g in members]
    return [[r - statistics.fmean(o) if o else 0.0] for r, o in zip(episodes.reward, others, strict=True)]


def reinforce_pp_of_the_paper(episodes, baseline):
    values = [row[0] for row in grpo_of_the_paper(episodes, "none")] if baseline else episodes.reward.tolist()
    tokens = []
    for value, lengths, trained in zip(values, episodes.lengths, episodes.trained, strict=True):
        tokens += [value] * (int(lengths.sum()) * trained)
    if len(set(tokens)) < 2:
        return [[0.0]] * len(values)
    mean, variance = statistics.fmean(tokens), statistics.variance(tokens)
    return [[(value - mean) / math.sqrt(variance + 1e-8)] for value in values]


def return_of(rewards, turn, gamma):
    return sum(gamma**later * reward for later, reward in enumerate(rewards[turn:]))


def turn_return_of_the_paper(episodes, gamma, baseline, leave_one_out, scale):
    places = [(i, k) for i, row in enumerate(episodes.turn_rewards) for k in range(len(row))]

    def same_cell(one, other):
        (i, k), (j, q) = one, other
        same_state = baseline == "turn" or episodes.state_keys[i][k] == episodes.state_keys[j][q]
        return episodes.group[i] == episodes.group[j] and same_state and (baseline == "state" or k == q)

    rows = [[0.0] * len(row) for row in episodes.turn_rewards]
    for place in places:
        i, k = place
        cell = [
            return_of(episodes.turn_rewards[j], q, gamma)
            for j, q in places
            if same_cell(place, (j, q)) and not (leave_one_out and i == j)
        ]
        rows[i][k] = return_of(episodes.turn_rewards[i], k, gamma) - statistics.fmean(cell) if cell else 0.0
    if scale == "std":
        pools = {g: [v for j, row in enumerate(rows) if episodes.group[j] == g for v in row] for g in episodes.group}
        return [
            [v / (statistics.stdev(pools[g]) + 1e-6) if np.ptp(pools[g]) > 1e-6 else v for v in row]
            for row, g in zip(rows, episodes.group, strict=True)
        ]
    return rows


def gigpo_of_the_paper(episodes, gamma, omega, scale):
    whole = grpo_of_the_paper(episodes, scale)
    rows = []
    for i, rewards in enumerate(episodes.turn_rewards):
        row = []
        for k in range(len(rewards)):
            state = [
                return_of(others, q, gamma)
                for j, others in enumerate(episodes.turn_rewards)
                for q in range(len(others))
                if episodes.group[i] == episodes.group[j] and episodes.state_keys[i][k] == episodes.state_keys[j][q]
            ]
            step = return_of(rewards, k, gamma) - statistics.fmean(state)
            if scale == "std":
                step /= (statistics.stdev(state) if len(state) > 1 else 0.0) + 1e-6
            row.append(whole[i][0] + omega * step)
        rows.append(row)
    return rows


def vine_of_the_paper(episodes):
    rows = []
    for i, (reward, measured) in enumerate(zip(episodes.reward, episodes.state_values, strict=True)):
        others = [r for j, r in enumerate(episodes.reward) if episodes.group[j] == episodes.group[i] and j != i]
        values = [statistics.fmean(others) if others else reward, *measured[1:], reward]
        row = []
        for k in range(len(measured)):
            before = next(v for v in reversed(values[: k + 1]) if not math.isnan(v))
            after = next(v for v in values[k + 1 :] if not math.isnan(v))
            row.append(after - before)
        rows.append(row)
    return rows


def distillation_of_the_paper(episodes, teacher):
    return [[statistics.fmean(gaps)] for gaps in episodes.teacher_gaps]


PAPER = {
    "grpo": lambda episodes: grpo_of_the_paper(episodes, "std"),
    "dr_grpo": lambda episodes: grpo_of_the_paper(episodes, "none"),
    "rloo": rloo_of_the_paper,
    "reinforce_pp": lambda episodes: reinforce_pp_of_the_paper(episodes, baseline=False),
    "reinforce_pp_baseline": lambda episodes: reinforce_pp_of_the_paper(episodes, baseline=True),
    "turn_return": turn_return_of_the_paper,
    "gigpo": lambda episodes, gamma, omega=1.0, scale="std": gigpo_of_the_paper(episodes, gamma, omega, scale),
    "vine": vine_of_the_paper,
    "distillation": distillation_of_the_paper,
}
