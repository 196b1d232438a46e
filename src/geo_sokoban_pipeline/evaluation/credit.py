"""Credit: how far the advantages of an estimator are from the true ones, and in which way.

The same prompts are rolled out by many groups, so the expectation of an estimate can be seen; the truth is the gain of
value that forks have measured (`evaluation.forks`). After the best single scale factor an estimate is the true
advantage plus three parts, which differ in what they do to training:

- an offset that depends on the state before the turn alone: wrong as an advantage, but the expected gradient of the
  log-probs of all actions in a state is 0, so it changes only the noise of the gradient;
- a part that depends on the action: a bias of the gradient, also where it is a scale that differs between states,
  which weighs these otherwise than the expected reward does;
- noise: what differs between visits of the same state with the same action.

Squares of expectations are taken from pairs of visits in different groups, and the sampling variance of the truth is
subtracted, so no part contains another's noise. Prompts are the unit of evidence: intervals are percentiles over
prompts that are drawn with replacement.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
from numpy.typing import NDArray

from geo_sokoban_pipeline.config.credit import CEILING, name_estimators
from geo_sokoban_pipeline.config.grpo import GrpoOptions, TrainOptions
from geo_sokoban_pipeline.envs.base import Task
from geo_sokoban_pipeline.evaluation.forks import ForkedTurn, history_of
from geo_sokoban_pipeline.grpo.estimators import load_estimator
from geo_sokoban_pipeline.grpo.groups import Floats
from geo_sokoban_pipeline.grpo.scoring import assistant_turns, score_groups, state_values
from geo_sokoban_pipeline.seeding import derive_seed
from geo_sokoban_pipeline.tasks import task_of
from geo_sokoban_pipeline.trajectories.types import Trajectory

_RESAMPLES = 1000
_CLEAR = 0.05  # true advantages below this, or below two standard errors, have no sign that an estimate could miss
Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Turns:
    """Turns of resampled groups, and their true advantages; (N,) each.

    Attributes:
        prompt, group, place: number of the prompt, of the group among all groups, and of the response in its episode.
        state, result: of the states before the turn and after its response; equal numbers are equal histories.
        action: equal numbers are equal responses to equal histories.
        value: of the state before the turn; NaN: not measured.
        gain: value after the response less the value before it; NaN: not measured.
        before, after: sampling variance of the two values.
        is_whole: whether the turn belongs to the groups of which every turn is measured.
    """

    prompt: Ints
    group: Ints
    place: Ints
    state: Ints
    result: Ints
    action: Ints
    value: Floats
    gain: Floats
    before: Floats
    after: Floats
    is_whole: NDArray[np.bool_]


@dataclass(frozen=True)
class Measure:
    """A number with its 95 % interval over prompts."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Credit:
    """An estimator against the truth.

    The three parts are root mean squares over turns, in units of reward, after division by `scale`.

    Attributes:
        scale: best single factor from true advantages to expected estimates, within states.
        offset: of the part that depends on the state alone.
        bias: of the part that depends on the action; its interval begins at 0 where it may be none.
        bias_within: the same where each prompt has the best scale of its own: without the weights of prompts.
        noise: of the rest.
        correlation: with the true advantages of all turns of whole groups.
        sign_errors: share of the turns with a clear true advantage and an estimate other than 0.
        zeros: share of the turns of whole groups whose estimate is 0.
        cosine: of its policy gradient to that of the true advantages, over the whole groups; NaN: one of them is 0.
        by_turn: of each number of a response: `turn`, `visits`, `mean` estimate, its own scale, and the three parts.
    """

    scale: Measure
    offset: Measure
    bias: Measure
    bias_within: Measure
    noise: Measure
    correlation: Measure
    sign_errors: Measure
    zeros: Measure
    cosine: float
    by_turn: list[dict[str, Any]]

    def to_dict(self) -> dict[str, Any]:
        """As JSON values; null where a number does not exist."""
        plain: dict[str, Any] = orjson.loads(orjson.dumps(self))  # it writes null for NaN
        return plain


def choose_turns(turns: list[ForkedTurn], visits: int, whole: int) -> list[ForkedTurn]:
    """The turns of a prompt's episodes that are measured: all of one iteration, and those that many groups have taken.

    Args:
        visits: groups that must have given the same response in the same state.
        whole: the iteration.
    """
    groups: defaultdict[tuple[str, bytes], set[tuple[int, int]]] = defaultdict(set)
    for one in turns:
        groups[_action_of(one.episode, one.turn)].add((one.episode.iteration, one.episode.group_index))
    return [
        one
        for one in turns
        if one.episode.iteration == whole or len(groups[_action_of(one.episode, one.turn)]) >= visits
    ]


def _action_of(episode: Trajectory, number: int) -> tuple[str, bytes]:
    """Key of a response and all that led to it."""
    turn = episode.turns[number]
    return history_of(episode, number), episode.token_ids[turn.token_start : turn.token_end].tobytes()


def describe_turns(episodes: Sequence[Trajectory], values: pa.Table) -> Turns:
    """The turns of resampled groups in their order, with what forks have measured of them.

    Args:
        episodes: with a reward, of all repetitions; those of the first iteration are the whole groups.
        values: rows of `TURN_VALUES`; those that are left out have no value.

    Raises:
        ValueError: a value is of another state than that of the episode.
    """
    known = {(row["trajectory_id"], row["turn"]): row for row in values.to_pylist() if row["advantage"] is not None}
    first = min(episode.iteration for episode in episodes)
    rows = []
    for episode in episodes:
        numbers = [number for number, turn in enumerate(episode.turns) if turn.role == "assistant"]
        for place, number in enumerate(numbers):
            measured = known.get((episode.trajectory_id, number))
            state, _ = action = _action_of(episode, number)
            if measured is not None and measured["history"] != state:
                raise ValueError(
                    f"{episode.trajectory_id}, turn {number}: the value was measured in another state than the stored "
                    "one; run the whole command again."
                )
            is_last = place + 1 == len(numbers) or (measured is not None and measured["is_reseeded"])
            result = action if is_last else history_of(episode, numbers[place + 1])
            keys = (episode.task_id, episode.label), (episode.iteration, episode.group_index), state, result, action
            rows.append((*keys, place, *_measured(measured), episode.iteration == first))
    columns = list(zip(*rows, strict=True))
    states = _codes([*columns[2], *columns[3]])
    return Turns(
        prompt=_codes(columns[0]),
        group=_codes(columns[1]),
        place=np.array(columns[5], np.int64),
        state=states[: len(rows)],
        result=states[len(rows) :],
        action=_codes(columns[4]),
        value=np.array(columns[6], np.float64),
        gain=np.array(columns[7], np.float64),
        before=np.array(columns[8], np.float64),
        after=np.array(columns[9], np.float64),
        is_whole=np.array(columns[10], bool),
    )


def _measured(row: Mapping[str, Any] | None) -> tuple[float, float, float, float]:
    """Value, gain, and sampling variances of the values before and after."""
    if row is None:
        return (np.nan,) * 4
    before, after = ((row[f"variance{end}"] or 0.0) / max(1, row[f"continuations{end}"]) for end in ("", "_after"))
    return row["value"], row["advantage"], before, after


def _codes(keys: Sequence[Hashable]) -> Ints:
    """The same number for equal keys, counted in the order in which they come."""
    numbers: dict[Hashable, int] = {}
    return np.array([numbers.setdefault(key, len(numbers)) for key in keys], np.int64)


def compare_estimators(
    episodes: Sequence[Trajectory],
    turns: Turns,
    settings: TrainOptions,
    further: Mapping[str, Mapping[str, Any]],
    measure_cosines: Callable[[Mapping[str, Floats]], Mapping[str, float]],
    seed: int,
) -> dict[str, Any]:
    """The table: counts of what was measured, and each estimator against it, or why it cannot be computed.

    Args:
        further: see `name_estimators`.
        measure_cosines: cosines of gradients by the estimators' names.
        seed: of the resamples.
    """
    task, args = task_of(settings.task), settings.reward.args
    estimates: dict[str, Floats] = {}
    left_out: dict[str, str] = {}
    for name, options in name_estimators(settings.grpo, further).items():
        try:
            estimates[name] = estimate_turns(episodes, options, task, args)
        except ValueError as error:
            left_out[name] = str(error)
    cosines = measure_cosines(estimates)
    rows = {name: measure_credit(own, turns, seed, cosines[name]) for name, own in estimates.items()}
    rewards = [episode.reward for episode in episodes for turn in episode.turns if turn.role == "assistant"]
    ceiling = np.array(rewards, np.float64) - turns.value
    rows[CEILING] = measure_credit(ceiling, turns, seed, shared=np.nan_to_num(turns.before))
    measured, whole = np.isfinite(turns.gain), turns.is_whole & np.isfinite(turns.gain)
    noise = (turns.before + turns.after)[whole]
    return {
        "prompts": int(turns.prompt.max() + 1),
        "groups": int(turns.group.max() + 1),
        "episodes": len(episodes),
        "turns": len(turns.gain),
        "measured_turns": int(measured.sum()),
        "measured_states": len(np.unique(turns.state[measured])),
        "whole_prompts": len(np.unique(turns.prompt[whole])),
        "whole_turns": int(whole.sum()),
        "true_spread": float(np.sqrt(max(0.0, turns.gain[whole].var() - noise.mean()))),
        "estimators": {name: row.to_dict() for name, row in rows.items()},
        "left_out": left_out,
    }


def estimate_turns(
    episodes: Sequence[Trajectory], options: GrpoOptions, task: Task, reward_args: Mapping[str, Any]
) -> Floats:
    """(N,) advantages of the turns of resampled groups as a trainer uses them, 0 where it does not train.

    Args:
        episodes: with a reward; the episodes of an iteration are estimated together, as in the loop.
    """
    estimator = load_estimator("advantage", options)
    if estimator.per_token:
        raise ValueError("its advantages are those of tokens, by a further model that has scored no episode here")
    if estimator.forks is not None and not any(np.isfinite(state_values(episode)).any() for episode in episodes):
        raise ValueError("it needs values of states, which only rollouts with this grpo.advantage measure")
    found: dict[int, list[float]] = {}
    for iteration in dict.fromkeys(episode.iteration for episode in episodes):
        places = [place for place, episode in enumerate(episodes) if episode.iteration == iteration]
        scores = score_groups([episodes[place] for place in places], options, task, reward_args)
        for place, score in zip(places, scores.episodes, strict=True):
            assert score is not None  # failed episodes are left out
            values = score.turn_advantages
            if values is None:
                values = np.full(len(assistant_turns(episodes[place])), score.advantage)
            found[place] = (values * score.trained).tolist()
    return np.array([value for place in range(len(episodes)) for value in found[place]], np.float64)


def measure_credit(
    estimates: Floats, turns: Turns, seed: int, cosine: float = math.nan, shared: Floats | None = None
) -> Credit:
    """The parts of an estimate, from all visits of measured states, and its relation to the truth of whole groups.

    Args:
        estimates: (N,), of the same turns; NaN: there is none.
        seed: of the resamples.
        cosine: see `Credit`.
        shared: (N,) sampling variance of the value of the state, where the estimate contains it; None: it does not.
    """
    sums = _sums(estimates, turns, np.zeros(len(estimates)) if shared is None else shared)  # (prompts, places, names)
    prompts = sums.shape[0]
    generator = np.random.default_rng(derive_seed(seed, "credit"))
    weights = generator.multinomial(prompts, np.full(prompts, 1 / prompts), size=_RESAMPLES)
    drawn_sums = np.einsum("rp,ptn->rtn", weights, sums)
    with np.errstate(divide="ignore", invalid="ignore"):
        whole, drawn = (_derive(one.sum(axis=-2)) for one in (sums.sum(axis=0), drawn_sums))
        each = _derive(sums.sum(axis=0), whole["scale"]), _derive(drawn_sums, drawn["scale"][:, None])
        own = _derive(sums.sum(axis=1))  # of each prompt, with a scale of its own
        within = np.nan_to_num(own["bias"] * own["scale"] ** 2 * sums[..., _NAMES.index("measured")].sum(axis=1))
        for one, drawn_in in ((whole, np.ones(prompts)), (drawn, weights)):
            one["bias_within"] = drawn_in @ within / one["measured"] / one["scale"] ** 2
    measures = {name: _measure(name, whole[name], drawn[name]) for name in (*_OTHERS, *_PARTS, "bias_within")}
    by_turn = [
        {
            "turn": place,
            **{name: float(each[0][name][place]) for name in ("visits", "mean")},
            **{name: _measure(name, each[0][name][place], each[1][name][:, place]) for name in ("scale", *_PARTS)},
        }
        for place in range(sums.shape[1])
        if each[0]["visits"][place] > 0
    ]
    return Credit(**measures, cosine=cosine, by_turn=by_turn)


_OTHERS, _PARTS = ("scale", "correlation", "sign_errors", "zeros"), ("offset", "bias", "noise")
# Sums over turns: of visits of all states, of measured actions, and of the turns of whole groups.
_NAMES = (
    *("visits", "total", "pairs", "state_square", "noise_square"),
    *("measured", "cross", "truth_square", "action_square"),
    *("turns", "e", "ee", "a", "aa", "ea", "clear", "wrong", "zero"),
)


def _sums(estimates: Floats, turns: Turns, shared: Floats) -> Floats:
    """(prompts, places, names) sums from which all measures follow; a state belongs to one prompt and one place."""
    shape = (turns.prompt.max() + 1, turns.place.max() + 1, len(_NAMES))
    sums = np.zeros(shape)

    def add(name: str, values: Any, at: Ints) -> None:
        np.add.at(sums[..., _NAMES.index(name)], (turns.prompt[at], turns.place[at]), values)

    everywhere = np.flatnonzero(np.isfinite(estimates))
    add("visits", 1.0, everywhere)
    add("total", estimates[everywhere], everywhere)
    # The part that depends on the state alone, over all visits of states that several groups have met.
    states = _Cells.of(turns.state, turns.group, everywhere)
    square = states.square(estimates[everywhere])
    seen = np.isfinite(square)
    add("pairs", states.count[seen], states.first[seen])
    add("state_square", (states.count * (square - shared[states.first]))[seen], states.first[seen])
    # Within states: estimates of measured actions that several groups have taken, against their true values. The mean
    # of a state is taken away by products as well: that of the visits would hold the chances by which they were drawn.
    chosen = everywhere[np.isfinite(turns.gain[everywhere])]
    actions = _Cells.of(turns.action, turns.group, chosen)
    chosen = chosen[np.isfinite(actions.square(estimates[chosen]))[actions.of_row]]
    actions, around = (_Cells.of(keys, turns.group, chosen) for keys in (turns.action, turns.state))
    own, gain, error = estimates[chosen], turns.gain[chosen], turns.after[chosen]
    square = actions.square(own)
    repeated = error[actions.place] * actions.pairs  # a pair with one action has one error of the truth
    repeated = np.bincount(around.of_row[actions.place], repeated, len(around.place)) / around.pairs
    add("measured", actions.count, actions.first)
    add("cross", own * gain, chosen)
    add("cross", -around.count * around.product(own, gain), around.first)
    add("truth_square", gain**2 - error, chosen)
    add("truth_square", -around.count * (around.square(gain) - repeated), around.first)
    add("action_square", actions.count * square, actions.first)
    add("action_square", -around.count * around.square(own), around.first)
    add("noise_square", actions.total(own**2) - actions.count * square, actions.first)
    # All turns of whole groups.
    whole = np.flatnonzero(turns.is_whole & np.isfinite(turns.gain))
    estimate, truth, noise = estimates[whole], turns.gain[whole], (turns.before + turns.after)[whole]
    clear = np.abs(truth) > np.maximum(2 * np.sqrt(noise), _CLEAR)
    told = clear & (estimate != 0)
    columns = {
        "turns": np.ones(len(whole)),
        "e": estimate,
        "ee": estimate**2 - shared[whole],
        "a": truth,
        "aa": truth**2 - noise,
        "ea": estimate * truth - shared[whole],
        "clear": told,
        "wrong": told & (estimate * truth < 0),
        "zero": estimate == 0,
    }
    for name, values in columns.items():
        add(name, values, whole)
    return sums


@dataclass(frozen=True, eq=False)
class _Cells:
    """Rows of equal keys, whose groups are independent of each other.

    Attributes:
        of_row: (n,) cell of each row.
        place, first: (cells,) a row of each cell, among the n rows and among all turns.
        count: (cells,) rows.
        part: (n,) number of the row's pair of cell and group; `cell_of`: (parts,) the cell of each.
    """

    of_row: Ints
    place: Ints
    first: Ints
    count: Floats
    part: Ints
    cell_of: Ints

    @classmethod
    def of(cls, keys: Ints, groups: Ints, rows: Ints) -> _Cells:
        """Cells of some turns."""
        _, place, of_row, count = np.unique(keys[rows], return_index=True, return_inverse=True, return_counts=True)
        pairs = of_row * (int(groups.max(initial=0)) + 1) + groups[rows]
        _, at, part = np.unique(pairs, return_index=True, return_inverse=True)
        return cls(of_row, place, rows[place], count.astype(np.float64), part, of_row[at])

    def total(self, values: Floats) -> Floats:
        """(cells,) sums."""
        return np.bincount(self.of_row, values, len(self.place)).astype(np.float64)

    @cached_property
    def pairs(self) -> Floats:
        """(cells,) ordered pairs of rows in different groups."""
        ones = np.ones(len(self.part))
        return self._products(ones, ones)

    def square(self, values: Floats) -> Floats:
        """(cells,) unbiased squares of expected values; NaN for a cell of one group."""
        return self.product(values, values)

    def product(self, values: Floats, others: Floats) -> Floats:
        """(cells,) unbiased products of two expectations: means over pairs of rows in different groups."""
        found = self._products(values, others)
        return np.divide(found, self.pairs, out=np.full(len(found), np.nan), where=self.pairs > 0)

    def _products(self, values: Floats, others: Floats) -> Floats:
        own = np.bincount(self.part, values, len(self.cell_of)) * np.bincount(self.part, others, len(self.cell_of))
        return self.total(values) * self.total(others) - np.bincount(self.cell_of, own, len(self.place))


def _derive(sums: Floats, scale: Any = None) -> dict[str, Any]:
    """Measures of (…, names) sums: parts as squares, divided by the square of the scale."""

    def of(name: str) -> Any:
        return sums[..., _NAMES.index(name)]

    # Where no action changes anything, there is no scale.
    own_scale = of("cross") / np.where(of("truth_square") > 1e-9 * of("measured"), of("truth_square"), np.nan)
    scale = own_scale if scale is None else scale
    rest = of("action_square") - 2 * scale * of("cross") + scale**2 * of("truth_square")
    turns = of("turns")
    spread = of("ee") - of("e") ** 2 / turns, of("aa") - of("a") ** 2 / turns
    return {
        "visits": of("visits"),
        "measured": of("measured"),
        "mean": of("total") / of("visits") / scale,
        "scale": own_scale,
        "offset": of("state_square") / of("pairs") / scale**2,
        "bias": rest / of("measured") / scale**2,
        "noise": of("noise_square") / of("measured") / scale**2,
        "correlation": (of("ea") - of("e") * of("a") / turns) / np.sqrt(spread[0] * spread[1]),
        "sign_errors": of("wrong") / of("clear"),
        "zeros": of("zero") / turns,
    }


def _measure(name: str, value: Any, drawn: Floats) -> Measure:
    """With percentiles of resamples; a part is the root of a square, whose unbiased estimate may be below 0."""
    known = drawn[np.isfinite(drawn)]
    ends = np.percentile(known, [2.5, 97.5]) if len(known) else (np.nan, np.nan)
    found = np.array([value, *ends], np.float64)
    return Measure(*(np.sqrt(np.maximum(0.0, found)) if name in (*_PARTS, "bias_within") else found).tolist())
