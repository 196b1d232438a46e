"""Players that continue from the states of stored episodes: stored policies, by the rollout of a run, or an agent.

A policy continues wherever the options put rollouts: in this process, over ranks, in rollout workers, by servers. Its
continuations are whole groups, one for each state, that are submitted together, so that an engine reads the history of
a state once.
"""

from __future__ import annotations

import json
import logging
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from geo_sokoban_pipeline.config.grpo import ForkPipelineOptions, TrainOptions
from geo_sokoban_pipeline.config.policy import ExpertOptions
from geo_sokoban_pipeline.config.rollout import SamplingOptions
from geo_sokoban_pipeline.envs.metrics import Rows
from geo_sokoban_pipeline.envs.plugins import load_object
from geo_sokoban_pipeline.evaluation.forks import Node, Outcome, Sampler, play_nodes
from geo_sokoban_pipeline.evaluation.summary import play_agent
from geo_sokoban_pipeline.policies.policy import load_as
from geo_sokoban_pipeline.rollout.episode import EpisodeRequest, RolloutSettings
from geo_sokoban_pipeline.rollout.rollout import load_rollout_fn
from geo_sokoban_pipeline.runs.fingerprint import hash_files
from geo_sokoban_pipeline.runs.folders import RunStore, SourceError
from geo_sokoban_pipeline.runs.policy_folder import PolicyFolder, open_policy
from geo_sokoban_pipeline.runs.storage import read_manifest
from geo_sokoban_pipeline.seeding import content_hash, python_generator
from geo_sokoban_pipeline.tasks import task_of
from geo_sokoban_pipeline.training.rollout_workers import open_rollouts
from geo_sokoban_pipeline.training.worker_group import open_worker_group

logger = logging.getLogger(__name__)


class PolicyPlayer:
    """Continues by stored policies, of which one is open at a time; a context manager.

    Args:
        policy_of: the policy of a version; None: that of any other player.
        options: rules of the run, and where its rollouts run.
        seed: root of all seeds.
    """

    def __init__(self, policy_of: Callable[[int | None], PolicyFolder], options: TrainOptions, seed: int) -> None:
        self._policy_of, self._seed = policy_of, seed
        # Nothing is trained, so that each rank needs whole weights, and no part of them.
        self._options = options.model_copy(update={"sharding": "none", "replicas": 1, "backend": "fsdp"})
        self._opened, self._version = ExitStack(), object()  # of no policy

    def __enter__(self) -> PolicyPlayer:
        return self

    def __exit__(self, *raised: object) -> None:
        self._close()

    def play(self, nodes: Sequence[Node], numbers: Sequence[int]) -> list[list[Outcome]]:
        """See `Play`."""
        chosen: defaultdict[Sampler, list[int]] = defaultdict(list)
        for index, node in enumerate(nodes):
            chosen[node.sampler].append(index)
        ends: list[list[Outcome]] = [[] for _ in nodes]
        for (version, sampling), places in chosen.items():
            self._open(version)
            roll_out = partial(self._roll_out, settings=self._settings(sampling))
            found = play_nodes([nodes[place] for place in places], numbers, self._seed, roll_out)
            for place, own in zip(places, found, strict=True):
                ends[place] = own
        return ends

    def _settings(self, sampling: str) -> RolloutSettings:
        options = self._options
        known = json.loads(sampling or "{}")
        given = {name: known[name] for name in SamplingOptions.model_fields if name in known}
        chosen = SamplingOptions.model_validate(given) if given else options.rollout.sampling
        # Failed continuations are counted in the table.
        lenient = options.rollout.model_copy(update={"max_failed_share": 1.0})
        return RolloutSettings(options.env, options.reward, lenient, chosen, 0, options.task, self._engine.version)

    def _open(self, version: int | None) -> None:
        """Open the policy of a version in place of the one before."""
        if version == self._version:
            return
        self._close()
        folder, options = self._policy_of(version), self._options
        policy = load_as(options.sent_policy, folder.path)
        needs_ranks = options.ranks_roll_out or options.placement == "ray"
        ranks = self._opened.enter_context(open_worker_group(policy, options)) if needs_ranks else None
        fitting = options if ranks is None else options.with_processes(ranks.size)
        rolling = self._opened.enter_context(open_rollouts(policy, fitting, ranks))
        self._engine, self._version = rolling.engine, version
        number = int(folder.manifest.get("policy_version", 0))
        rolling.engine.update_weights(None, number)
        if ranks is not None and options.ranks_roll_out:
            ranks.update_weights(number)
        function = rolling.function or load_rollout_fn(options.rollout)
        self._roll_out = lambda requests, settings: function(rolling.engine, policy, requests, settings)

    def _close(self) -> None:
        self._opened.close()
        self._version = object()  # that of no policy


class AgentPlayer:
    """Continues by an agent of the evaluation; a context manager.

    Args:
        options: rules of the run.
        seed: root of all seeds.
    """

    def __init__(self, agent: ExpertOptions, options: TrainOptions, seed: int) -> None:
        self._agent, self._options, self._seed = agent, options, seed
        self._build_env = load_object(options.env.factory, default_name="build_env")
        self._reward = load_object(options.reward.function, default_name="reward")

    def __enter__(self) -> AgentPlayer:
        return self

    def __exit__(self, *raised: object) -> None:
        """Nothing is open."""

    def play(self, nodes: Sequence[Node], numbers: Sequence[int]) -> list[list[Outcome]]:
        """See `Play`."""
        return [[self._end_of(node, one) for one in node.requests(0, self._seed, numbers)] for node in nodes]

    def _end_of(self, node: Node, request: EpisodeRequest) -> Outcome:
        generator = python_generator(request.seed, "agent")
        try:
            finished = play_agent(
                self._agent, request, self._build_env, self._reward, self._options, generator, node.texts
            )
        except Exception:  # an environment or reward of one's own may raise anything; the failure is counted
            logger.warning("a continuation of %s failed", node.parent, exc_info=True)
            return Outcome(None, None)
        return Outcome.of(finished.ret, finished.metrics)


def open_player(
    options: ForkPipelineOptions,
    rules: TrainOptions,
    training: Rows,
    versions: Mapping[int, Path],
    needed: set[int],
    policy_of: Callable[[], PolicyFolder],
    seed: int,
) -> tuple[PolicyPlayer | AgentPlayer, str, str]:
    """The player that the options name.

    Args:
        rules: of the run.
        training: training prompts, from which agents count frequent answers.
        versions: folders of the run's stored policies.
        needed: versions that have sampled the episodes.
        policy_of: the policy that the source names.

    Returns:
        The player, its name, and the hash of what its choices follow from.

    Raises:
        SourceError: there is none of this name.
    """
    source = options.source
    run = f"{source.run}/{source.run_id}"
    if options.player == "sampler":

        def sampler_of(version: int | None) -> PolicyFolder:
            if version is None or version not in versions:
                raise SourceError(
                    f"policy version {version} of {run} is stored no longer; stored are "
                    f"{', '.join(map(str, sorted(versions)))}. Choose other iterations, keep more checkpoints "
                    "(loop.keep_last), or let another player continue."
                )
            return open_policy(versions[version])

        for version in sorted(needed - versions.keys()):
            sampler_of(version)  # before anything is replaced
        known = {version: read_manifest(path, verify=False) or {} for version, path in versions.items()}
        digests = [f"{version} {hash_files(manifest['files'])}" for version, manifest in known.items()]
        return PolicyPlayer(sampler_of, rules, seed), "sampler", content_hash(*digests)
    if options.player == "checkpoint":
        folder = policy_of()
        own = f"{run}@{source.checkpoint}" if RunStore.is_own(source) else str(source.checkpoint)
        return PolicyPlayer(lambda version: folder, rules, seed), own, hash_files(folder.manifest["files"])
    agents = task_of(rules.task).evaluated_in(rules.env.factory).baselines(rules, training)
    if options.player not in agents:
        raise SourceError(
            f"player={options.player}: must be sampler, checkpoint, or a baseline of the evaluation "
            f"({', '.join(agents) or 'there is none'})."
        )
    agent = agents[options.player]
    return AgentPlayer(agent, rules, seed), options.player, agent.model_dump_json()
