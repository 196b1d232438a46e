"""One iteration of training written out in plain torch and numpy, against which the project's own is compared.

Nothing of `grpo` or `training` computes anything here. Each episode has a forward pass of its own by the library's
model, with all logits; the optimizers are written out. It is slow and short, so that it can be checked by reading it.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from geo_sokoban_pipeline.config.grpo import GrpoOptions, OptimizerOptions
from geo_sokoban_pipeline.config.policy import WarmStartOptions
from geo_sokoban_pipeline.grpo.groups import Episodes
from geo_sokoban_pipeline.policies.policy import Policy
from geo_sokoban_pipeline.seeding import python_generator
from geo_sokoban_pipeline.training.batch import TrainSample
from geo_sokoban_pipeline.trajectories.types import Trajectory
from grpo.papers import PAPER
from policies.library import library_inputs, sample_log_probs

# Options that the warm start and GRPO's optimizer have both.
SHARED_NAMES = (
    "learning_rate",
    "betas",
    "weight_decay",
    "matrices",
    "decay_fraction",
    "clip",
)


@dataclass
class Moments:
    """What an optimizer remembers of each parameter, by name; `steps` have been taken."""

    first: dict[str, Tensor]
    second: dict[str, Tensor]
    steps: int = 0

    @classmethod
    def empty(cls) -> Moments:
        """Nothing yet."""
        return cls({}, {})


def train(
    policy: Policy,
    episodes: Sequence[Trajectory],
    grpo: GrpoOptions,
    optimizer: OptimizerOptions,
    *,
    temperature: float = 1.0,
    iteration: int = 0,
    seed: int = 0,
    reference: Policy | None = None,
    moments: Moments | None = None,
) -> dict[str, float]:
    """Train the policy in place on the episodes marked `trained`; returns the metrics of the update."""
    trained = [episode for episode in episodes if episode.trained]
    moments = moments or Moments.empty()
    rate = scheduled_rate(optimizer, iteration)
    masks = {e.trajectory_id: trained_tokens(e, episodes, grpo) for e in trained}
    rollout = {e.trajectory_id: torch.tensor(e.rollout_log_probs)[masks[e.trajectory_id]] for e in trained}
    old, kl_to = dict(rollout), {}
    with torch.no_grad():
        for e in trained:
            name = e.trajectory_id
            if grpo.old_log_probs == "recompute":
                old[name] = log_probs_and_entropy(policy, e, masks[name], temperature)[0]
            if grpo.kl_coefficient > 0 or grpo.advantage == "distillation":
                assert reference is not None
                kl_to[name] = log_probs_and_entropy(reference, e, masks[name], temperature)[0]

    limit = grpo.advantage_clip or math.inf
    names = old if grpo.advantage == "distillation" else ()
    distilled = {name: torch.clip(kl_to[name] - old[name], -limit, limit) for name in names}

    groups: dict[int, list[Trajectory]] = {}
    for e in trained:
        groups.setdefault(e.group_index, []).append(e)
    rows: list[dict[str, float]] = []
    for number in range(grpo.passes):
        order = list(groups.values())
        if number:
            generator: random.Random = python_generator(seed, "pass", iteration, number)
            generator.shuffle(order)
        for minibatch in minibatches(order, grpo.groups_per_step):
            tokens = sum(int(masks[e.trajectory_id].sum()) for e in minibatch)
            denominator = {
                "sample_mean": len(minibatch),
                "token_mean": tokens,
                "constant": grpo.constant_denominator,
            }[grpo.reduction]
            row: Counter[str] = Counter()
            policy.model.zero_grad()
            for e in minibatch:
                name = e.trajectory_id
                new, entropy = log_probs_and_entropy(policy, e, masks[name], temperature)
                advantage = distilled[name] if distilled else torch.tensor(token_advantages(e))[masks[name]]
                to = kl_to[name] if grpo.kl_coefficient > 0 else None
                turns = turn_numbers(e)[masks[name]]
                parts = token_terms(new, old[name], rollout[name], to, advantage, turns, entropy, grpo)
                # Tokens of an episode add up, or count as one sample by their mean.
                weight = 1 / denominator / (len(new) if grpo.reduction == "sample_mean" else 1)
                for part, values in parts.items():
                    row[part] += float(values.detach().sum()) * weight
                if grpo.importance != "none":
                    gap, weights = importance(old[name], rollout[name], turns, grpo)
                    off_policy = {"tis": gap, "tis_clipfrac": gap != weights, "tis_abs": (gap - 1).abs()}
                    for part, values in off_policy.items():
                        row[part] += float(values.float().sum()) / tokens
                (parts["loss"].sum() * weight).backward()
            row["grad_norm"] = move(policy.model, optimizer, rate, moments)
            row["global_batch_size"] = len(minibatch)
            rows.append(row)
    means = {f"train/{name}": float(np.mean([row[name] for row in rows])) for name in rows[0]}
    if distilled:
        means["train/reverse_kl"] = -float(torch.cat([*distilled.values()]).mean())
    # Later steps have moved the weights: the first one compares trainer and engine.
    means["train/train_rollout_logprob_abs_diff"] = rows[0]["train_rollout_logprob_abs_diff"]
    return means | {"train/steps": float(len(rows)), "train/skipped": 0.0, "train/lr-pg_0": rate}


def imitate(policy: Policy, steps: Sequence[Sequence[TrainSample]], warm: WarmStartOptions) -> None:
    """SFT of the policy in place: in each step the mean negative log-likelihood of the demonstrated tokens."""
    options = OptimizerOptions(
        **{name: getattr(warm, name) for name in SHARED_NAMES},
        warmup_iterations=warm.warmup_steps,
        schedule_iterations=warm.steps,
    )
    moments = Moments.empty()
    for number, demonstrations in enumerate(steps):
        policy.model.zero_grad()
        tokens = sum(len(sample.targets) for sample in demonstrations)
        for sample in demonstrations:
            (-sample_log_probs(policy, sample).sum() / tokens).backward()
        move(policy.model, options, scheduled_rate(options, number, 0.05), moments)


def token_terms(
    new: Tensor,
    old: Tensor,
    rollout: Tensor,
    kl_to: Tensor | None,
    advantage: Tensor,
    turns: Tensor,
    entropy: Tensor,
    grpo: GrpoOptions,
) -> dict[str, Tensor]:
    """Loss of each trained token of an episode, and what it is made of."""
    policy_loss, metrics = policy_terms(new, old, advantage, turns, grpo)
    if grpo.importance != "none":
        policy_loss = policy_loss * importance(old, rollout, turns, grpo)[1]
    terms = {
        "loss": policy_loss - grpo.entropy_coefficient * entropy,
        "pg_loss": policy_loss,
        **metrics,
        "ppo_kl": (new - old).abs(),
        "ppo_kl_signed": old - new,
        "train_rollout_logprob_abs_diff": (new - rollout).abs(),
        "entropy_loss": entropy,
    }
    # KL to the reference policy.
    if kl_to is not None:
        difference = new - kl_to
        k3 = torch.exp(-difference) - 1 + difference
        kinds = {"k1": difference, "k2": difference**2 / 2, "k3": k3, "low_var_kl": torch.clip(k3, -10, 10)}
        terms["kl_loss"] = kinds[grpo.kl_kind]
        terms["loss"] = terms["loss"] + grpo.kl_coefficient * terms["kl_loss"]
    return terms


def policy_terms(
    new: Tensor, old: Tensor, advantage: Tensor, turns: Tensor, grpo: GrpoOptions
) -> tuple[Tensor, dict[str, Tensor]]:
    """Policy loss of each trained token of an episode, by the formulas of the papers, and the loss's metrics."""
    args = grpo.loss_args
    change = new - old
    ratio = torch.exp(change)
    if grpo.loss == "gspo":  # one ratio a sequence, whose gradient goes to each of its tokens
        means = over_sequences(change.detach(), turns, args["per"], torch.mean)
        ratio = torch.exp(means) * torch.exp(new - new.detach())
    if grpo.loss in ("ppo", "gspo"):
        plain = -ratio * advantage
        limited = -torch.clip(ratio, 1 - args["clip_low"], 1 + args["clip_high"]) * advantage
        loss = torch.maximum(plain, limited)
        metrics = {"pg_clipfrac": (limited > plain).float()}
        if grpo.loss == "gspo":
            return loss, metrics
        metrics["dual_clipfrac"] = torch.zeros_like(loss)
        if (most := args["dual_clip"]) is not None:
            metrics["dual_clipfrac"] = ((advantage < 0) & (loss > -most * advantage)).float()
            loss = torch.where(advantage < 0, torch.minimum(loss, -most * advantage), loss)
        return loss, metrics
    if grpo.loss == "cispo":
        weight = torch.clip(ratio.detach(), args["low"], args["high"])
        return -weight * advantage * new, {"pg_clipfrac": (weight != ratio).float()}
    if grpo.loss == "sapo":
        heat = torch.where(advantage > 0, args["positive"], args["negative"])
        return -advantage * torch.sigmoid(heat * (ratio - 1)) * 4 / heat, {}
    assert grpo.loss == "gmpo"
    mean = over_sequences(advantage, turns, args["per"], torch.mean)
    kept = torch.where(mean > 0, torch.clip(change, max=args["clip"]), torch.clip(change, min=-args["clip"]))
    geometric = torch.exp(over_sequences(kept, turns, args["per"], torch.mean))
    return -mean * geometric, {"pg_clipfrac": (kept != change).float()}


def importance(old: Tensor, rollout: Tensor, turns: Tensor, grpo: GrpoOptions) -> tuple[Tensor, Tensor]:
    """Ratio of trainer to engine at the level of the rule, and the weight that it gives, for each token."""
    args, gap = grpo.importance_args, old - rollout
    if args["level"] != "token":
        gap = over_sequences(gap, turns, args["per"], torch.sum if args["level"] == "sequence" else torch.mean)
    ratio = torch.exp(gap)
    if grpo.importance == "truncated":
        return ratio, torch.clip(ratio, max=args["cap"])
    return ratio, torch.where((ratio >= args["low"]) & (ratio <= args["high"]), ratio, 0.0)


def over_sequences(values: Tensor, turns: Tensor, per: str, statistic: Callable[[Tensor], Tensor]) -> Tensor:
    """A statistic of each token's sequence: all tokens of the episode, or those of its turn."""
    if per == "episode":
        return statistic(values).expand_as(values)
    return torch.stack([statistic(values[turns == turn]) for turn in turns])


def turn_numbers(episode: Trajectory) -> Tensor:
    """Number of the response that each token of an episode belongs to."""
    numbers = torch.zeros(len(episode.token_ids), dtype=torch.int64)
    for number, turn in enumerate(responses(episode)):
        numbers[turn.token_start : turn.token_end] = number
    return numbers


def log_probs_and_entropy(
    policy: Policy, episode: Trajectory, mask: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """Log-probs of the trained tokens at the temperature, and the entropy at their places at temperature 1."""
    shown = [episode.images[index] for turn in episode.turns for index in turn.image_indices]
    inputs = library_inputs(policy, episode.token_ids, [policy.reader.read_png(png) for png in shown])
    policy.model.model.rope_deltas = None
    logits = policy.model(**inputs).logits[0, :-1].float()
    logits[:, torch.tensor(policy.banned_ids)] = -torch.inf
    logits, labels = logits[mask[1:]], inputs["input_ids"][0, 1:][mask[1:]]
    scores = torch.log_softmax(logits / temperature, -1)
    plain = torch.log_softmax(logits, -1)
    allowed = torch.isfinite(plain)
    entropy = -(plain.exp() * plain.masked_fill(~allowed, 0.0)).sum(-1)
    return scores.gather(1, labels[:, None])[:, 0], entropy


def trained_tokens(episode: Trajectory, episodes: Sequence[Trajectory], grpo: GrpoOptions) -> Tensor:
    """(L,) bool: sampled tokens, with `mixed_versions: mask` those of the newest weights alone."""
    mask = torch.tensor(episode.loss_mask == 1)
    if grpo.mixed_versions == "mask":
        newest = max(v for e in episodes for v, start, end in e.weight_spans if end > start)
        for version, start, end in episode.weight_spans:
            if version != newest:
                mask[start:end] = False
    return mask


def token_advantages(episode: Trajectory) -> np.ndarray:
    """(L,) float32 advantage of each token: of its turn, or of its episode where turns have none."""
    values = np.zeros(len(episode.token_ids), np.float32)
    for turn in responses(episode):
        given = episode.advantage if turn.advantage is None else turn.advantage
        values[turn.token_start : turn.token_end] = given
    return values


def minibatches(groups: list[list[Trajectory]], groups_per_step: int | None) -> list[list[Trajectory]]:
    """Whole groups of an optimizer step: the nearest number of equal parts, the first ones larger by one."""
    steps = 1 if groups_per_step is None else max(1, math.floor(len(groups) / groups_per_step + 0.5))
    parts = np.array_split(np.arange(len(groups)), steps)
    return [[e for number in part for e in groups[number]] for part in parts]


def scheduled_rate(optimizer: OptimizerOptions, iteration: int, decay_to: float = 0.1) -> float:
    """Learning rate of an iteration: up in a line, flat, down in a line over the last share of the schedule."""
    base, warmup, length = optimizer.learning_rate, optimizer.warmup_iterations, optimizer.schedule_iterations
    if iteration < warmup:
        return base * (iteration + 1) / warmup
    decay_from = max(length * (1 - optimizer.decay_fraction), warmup)
    if optimizer.decay_fraction == 0 or iteration + 1 <= decay_from:
        return base
    progress = min((iteration + 1 - decay_from) / (length - decay_from), 1.0)
    return base + (decay_to * base - base) * progress


def move(model: Any, options: OptimizerOptions, rate: float, moments: Moments) -> float:
    """Clip the gradients, then take a step of AdamW, or of Muon on the matrices in the layers; returns the norm."""
    parameters = {name: p for name, p in model.named_parameters() if p.grad is not None}
    norm = math.sqrt(sum(float(p.grad.double().square().sum()) for p in parameters.values()))
    moments.steps += 1
    with torch.no_grad():
        for name, parameter in parameters.items():
            gradient = parameter.grad * min(1.0, options.clip / (norm + 1e-6))
            inside = any(f".{part}." in name for part in ("layers", "blocks", "merger", "deepstack_merger_list"))
            if options.matrices == "muon" and inside and parameter.ndim == 2:
                _muon(name, parameter, gradient, options, rate * 2.0, moments)
            else:
                _adamw(name, parameter, gradient, options, rate, moments)
    return norm


def _adamw(name: str, parameter: Any, gradient: Tensor, options: OptimizerOptions, rate: float, held: Moments) -> None:
    fast, slow = options.betas
    first = fast * held.first.get(name, torch.zeros_like(gradient)) + (1 - fast) * gradient
    second = slow * held.second.get(name, torch.zeros_like(gradient)) + (1 - slow) * gradient**2
    held.first[name], held.second[name] = first, second
    direction = (first / (1 - fast**held.steps)) / ((second / (1 - slow**held.steps)).sqrt() + options.eps)
    parameter -= rate * options.weight_decay * parameter
    parameter -= rate * direction


def _muon(name: str, parameter: Any, gradient: Tensor, options: OptimizerOptions, rate: float, held: Moments) -> None:
    momentum = 0.95
    average = momentum * held.first.get(name, torch.zeros_like(gradient)) + (1 - momentum) * gradient
    held.first[name] = average
    matrix = (1 - momentum) * gradient + momentum * average
    if matrix.norm() > 0:
        matrix = matrix / matrix.norm()
    for _ in range(5):
        gram = matrix @ matrix.T
        matrix = 3.4445 * matrix - 4.7750 * gram @ matrix + 2.0315 * gram @ gram @ matrix
    parameter -= rate * options.weight_decay * parameter
    parameter -= rate * 0.2 * math.sqrt(max(parameter.shape)) * matrix


def score(episodes: Sequence[Trajectory], grpo: GrpoOptions, reward_args: Mapping[str, Any]) -> None:
    """Set `trained` and the advantages of episodes that all have a reward, with `filter: none`.

    Args:
        reward_args: `aggregate` and `distance_weight` of Sokoban's reward.
    """
    versions = [{v for v, start, end in e.weight_spans if end > start} for e in episodes]
    newest = max(set().union(*versions))
    for e, seen in zip(episodes, versions, strict=True):
        e.trained = {"drop": seen == {newest}, "mask": newest in seen, "keep": True}[grpo.mixed_versions]
    if grpo.advantage == "distillation":  # of tokens, in the update
        return
    table = Episodes(
        group=np.array([e.group_index for e in episodes]),
        reward=np.array([float(e.reward or 0.0) for e in episodes]),
        trained=np.array([e.trained for e in episodes]),
        lengths=[np.array([e.loss_mask.sum()]) for e in episodes],
        turn_rewards=[worth_of_turns(e, reward_args) for e in episodes],
        state_keys=[states(e) for e in episodes],
    )
    rows = [np.array(row) for row in PAPER[grpo.advantage](table, **grpo.advantage_args)]
    if grpo.normalize == "rms":
        pool = np.concatenate([row for row, e in zip(rows, episodes, strict=True) if e.trained])
        rows = [row / np.sqrt(np.mean(pool**2)) for row in rows]
    limit = np.inf if grpo.advantage_clip is None else grpo.advantage_clip
    for e, row in zip(episodes, rows, strict=True):
        values = np.clip(row, -limit, limit).tolist()
        if grpo.advantage not in ("turn_return", "gigpo"):
            e.advantage = values[0]
        else:
            for turn, value in zip(responses(e), values, strict=True):
                turn.advantage = value


def responses(episode: Trajectory) -> list[Any]:
    """The policy's turns."""
    return [turn for turn in episode.turns if turn.role == "assistant"]


def states(episode: Trajectory) -> list[Any]:
    """Text and images before each turn of the policy."""
    users = [turn for turn in episode.turns if turn.role == "user"]
    seen = [(turn.text, *(episode.images[index] for index in turn.image_indices)) for turn in users]
    return seen[: len(responses(episode))]


def worth_of_turns(episode: Trajectory, reward_args: Mapping[str, Any]) -> np.ndarray:
    """Worth of each turn; a turn that the environment never saw is worth 0."""
    seen = [turn for turn in responses(episode) if turn.reward is not None]
    cells = [episode.reward_parts["dist0"], *(turn.info["box_target_distance"] for turn in seen)]
    share = 1 / len(seen) if reward_args["aggregate"] == "mean" and seen else 1.0
    worth = [
        float(turn.reward or 0.0) * share + reward_args["distance_weight"] * (before - after)
        for turn, before, after in zip(seen, cells, cells[1:], strict=False)
    ]
    if worth:
        worth[-1] += episode.reward_parts["final_bonus"]
    return np.array(worth + [0.0] * (len(responses(episode)) - len(seen)))
