"""The engine's equivalences: cached = uncached = alone = in any batch = a plain forward pass of the library."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from geo_sokoban_pipeline.envs.sokoban import Board
from geo_sokoban_pipeline.envs.sokoban.render import render_observation
from geo_sokoban_pipeline.options.rollout import EnvOptions, RewardOptions, RolloutOptions, SamplingOptions
from geo_sokoban_pipeline.rollout.conversation import EpisodeTask
from geo_sokoban_pipeline.rollout.engines import transformers as engine_module
from geo_sokoban_pipeline.rollout.engines.base import Request
from geo_sokoban_pipeline.rollout.engines.transformers import TransformersEngine
from geo_sokoban_pipeline.rollout.episode import PlaySettings, play_episodes
from geo_sokoban_pipeline.schemas import validate_trajectories
from geo_sokoban_pipeline.trajectories import trajectories_to_table
from policies.library import library_log_probs

# float32 sums in another order; measured differences are below 1e-5.
TOLERANCE = 1e-4
SAMPLED = SamplingOptions()
KINDS = {
    "sampled": SAMPLED,
    "cool": SamplingOptions(temperature=0.6),
    "cut": SamplingOptions(top_p=0.8, top_k=30),
    "greedy": SamplingOptions(greedy=True),
}


@pytest.fixture(scope="session")
def talker(tiny_policy):
    """The tiny policy with a bias to end its replies, so that they differ in length and episodes in turns."""
    policy = copy.deepcopy(tiny_policy)
    bias = torch.zeros(policy.model.config.text_config.vocab_size)
    bias[policy.codec.end_id] = 4.0
    policy.model.lm_head.bias = torch.nn.Parameter(bias, requires_grad=False)
    return policy


@pytest.fixture(scope="session")
def tasks(sokoban_rows):
    """Twelve episodes: four levels, three samples each."""
    rows = [row for row in sokoban_rows(8) if row["split"] == "train"]
    return [EpisodeTask(f"g{g}/s{s}", rows[g], g, s, 100 * g + s) for g in range(4) for s in range(3)]


def play(policy, tasks, sampling=SAMPLED, turns=5, **engine):
    args = {"max_actions_per_turn": 1, "cell_px": 16, "observation_style": "brief"}
    rollout = RolloutOptions(max_turns=turns, max_tokens_per_turn=9)
    chosen = PlaySettings(EnvOptions(args=args), RewardOptions(), rollout, sampling, 0, "sokoban")
    return play_episodes(TransformersEngine(policy, **engine), policy, tasks, chosen)


def assert_equal_episodes(left, right):
    for ours, theirs in zip(left, right, strict=True):
        assert ours.token_ids.tolist() == theirs.token_ids.tolist(), ours.trajectory_id
        assert ours.status == theirs.status
        np.testing.assert_allclose(ours.rollout_log_probs, theirs.rollout_log_probs, atol=TOLERANCE)


@pytest.fixture(scope="session")
def reference(talker, tasks):
    return {name: play(talker, tasks, sampling) for name, sampling in KINDS.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_log_probs_equal_a_plain_forward_pass(talker, reference, kind):
    sampling = KINDS[kind]
    for episode in reference[kind]:
        expected = library_log_probs(talker, episode, 1.0 if sampling.greedy else sampling.temperature)
        np.testing.assert_allclose(episode.rollout_log_probs, expected, atol=TOLERANCE)


def test_the_episodes_compared_are_ragged(reference, talker):
    """Without this the equivalences below would prove little."""
    episodes = reference["sampled"]
    replies = {turn.token_end - turn.token_start for e in episodes for turn in e.turns if turn.role == "assistant"}
    assert len(replies) > 5
    assert len({len(episode.turns) for episode in episodes}) > 2
    assert {episode.finish_reason for episode in episodes} == {"stop", "length"}
    banned = set(talker.banned_ids.tolist())
    assert not any(banned & set(e.token_ids[e.loss_mask == 1].tolist()) for name in KINDS for e in reference[name])


def test_episodes_keep_the_contract(talker, reference):
    for kind in KINDS:
        validate_trajectories(trajectories_to_table(reference[kind], talker.table_context))


@pytest.mark.parametrize("kind", ["sampled", "greedy"])
@pytest.mark.parametrize(
    "engine",
    [
        {"reuse_cache": False},
        {"max_conversations": 12},
        {"max_conversations": 5},
        {"max_conversations": 1},
        {"prefill_tokens": 40},
        {"prefill_tokens": 1, "max_conversations": 7, "reuse_cache": False},
    ],
    ids=str,
)
def test_the_same_episodes_under_any_setting(talker, tasks, reference, kind, engine):
    """Tokens are equal exactly: rounding could only matter for a draw within 1e-6 of a border, or a near tie."""
    assert_equal_episodes(play(talker, tasks, KINDS[kind], **engine), reference[kind])


def test_an_episode_is_the_same_in_any_company(talker, tasks, reference):
    for order in ([7], [3, 11, 0], list(range(11, -1, -1))):
        some = play(talker, [tasks[index] for index in order])
        assert_equal_episodes(some, [reference["sampled"][index] for index in order])


def test_runs_repeat_bit_for_bit(talker, tasks, reference):
    for again, first in zip(play(talker, tasks), reference["sampled"], strict=True):
        assert again.token_ids.tobytes() == first.token_ids.tobytes()
        assert again.rollout_log_probs.tobytes() == first.rollout_log_probs.tobytes()


# Requests made by hand: conversations that arrive, pause and leave at random.


@dataclass(frozen=True)
class Plan:
    """A conversation: its seed, its level, and tokens per reply."""

    seed: int
    level: int
    limits: tuple[int, ...]


BOARDS = [Board.from_text(f"#####\n#{row}#\n#   #\n#####\n#####\n#####") for row in ("@$.", ".$@", "$@.", "@ *")]


def say(policy, text, level):
    """Ids and pictures of a user turn about a board, or of the first one."""
    image = policy.reader.read(render_observation(BOARDS[level % len(BOARDS)], 16))
    message = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": text}]}
    if text == "Go":
        return policy.codec.encode_prompt([message], [image.grid]), image
    return policy.codec.encode_observation(message, [image.grid], separator=True), image


class Talk:
    """A conversation that follows a plan."""

    def __init__(self, identity, plan, policy, sampling=SAMPLED):
        self.id, self.plan, self.policy, self.sampling = identity, plan, policy, sampling
        ids, image = say(policy, "Go", plan.level)
        self.ids, self.images, self.sampled, self.turn = ids, [image], 0, 0
        self.results = []

    @property
    def over(self):
        return self.turn == len(self.plan.limits)

    def request(self):
        limit = self.plan.limits[self.turn]
        return Request(self.id, self.ids, tuple(self.images), self.sampling, limit, self.plan.seed, self.sampled)

    def hear(self, result):
        self.results.append((result.token_ids.tolist(), result.finish_reason))
        self.log_probs = result.log_probs
        self.turn, self.sampled = self.turn + 1, self.sampled + len(result.token_ids)
        delta, image = say(self.policy, "Next?", self.plan.level + self.turn)
        self.ids = np.concatenate([self.ids, result.token_ids, delta])
        self.images.append(image)


alone: dict[Plan, list] = {}


def play_alone(policy, plan):
    if plan not in alone:
        engine, talk = TransformersEngine(policy, max_conversations=1), Talk(0, plan, policy)
        while not talk.over:
            engine.submit([talk.request()])
            talk.hear(engine.poll()[0])
        alone[plan] = talk.results
    return alone[plan]


plans = st.builds(Plan, st.integers(0, 3), st.integers(0, 1), st.sampled_from([(1,), (4, 2), (2, 1, 5), (6, 6, 3)]))


@given(
    plans=st.lists(plans, min_size=2, max_size=5),
    rows=st.integers(2, 6),
    choices=st.lists(st.lists(st.booleans(), min_size=5, max_size=5), min_size=12, max_size=12),
)
@settings(max_examples=12, deadline=None)
def test_random_company_changes_nothing(talker, plans, rows, choices):
    """Conversations enter, pause, and are released at random; each ends as it does on its own."""
    engine = TransformersEngine(talker, max_conversations=rows)
    talks = [Talk(number, plan, talker) for number, plan in enumerate(plans)]
    asked: set[int] = set()
    for chosen in [*choices, *[[True] * 5] * 20]:
        held = {talk.id for talk in talks if talk.turn > 0 and not talk.over}
        for talk, speaks in zip(talks, chosen, strict=False):
            # A conversation that pauses keeps its row, so not more may be open than there are rows.
            opens = talk.turn > 0 or len(held | asked) < rows
            if speaks and opens and not talk.over and talk.id not in asked:
                engine.submit([talk.request()])
                asked.add(talk.id)
        for result in engine.poll():
            asked.discard(result.id)
            talks[result.id].hear(result)
        engine.release([talk.id for talk in talks if talk.over])
    assert all(talk.over for talk in talks)
    for talk in talks:
        assert talk.results == play_alone(talker, talk.plan)


def test_finished_rows_leave_the_batch(talker, monkeypatch):
    engine, sizes = TransformersEngine(talker), []
    run = engine._run
    monkeypatch.setattr(engine, "_run", lambda ids, *rest: sizes.append(ids.shape) or run(ids, *rest))
    # Longer limits in lower rows and higher ones alike, so that rows must move.
    talks = [Talk(number, Plan(3, number, (limit,)), talker) for number, limit in enumerate([1, 4, 2, 6, 1])]
    engine.submit([talk.request() for talk in talks])
    lengths = {result.id: len(result.token_ids) for result in engine.poll()}
    decoding = [rows for rows, width in sizes if width == 1]
    assert decoding == [sum(length > step for length in lengths.values()) for step in range(1, max(lengths.values()))]


def test_a_shared_prompt_is_prefilled_once(talker, monkeypatch):
    engine, passes = TransformersEngine(talker), []
    run = engine._pass
    monkeypatch.setattr(engine, "_pass", lambda talks, mask: passes.append(len(talks)) or run(talks, mask))
    talks = [Talk(number, Plan(number, number // 4, (5, 3)), talker) for number in range(8)]
    for _ in range(2):
        engine.submit([talk.request() for talk in talks])
        for result in engine.poll():
            talks[result.id].hear(result)
    assert passes == [2, 8], "two prompts for eight conversations, then each its own observation"
    for talk in talks:
        assert talk.results == play_alone(talker, talk.plan)


def test_only_new_tokens_are_prefilled(talker, monkeypatch):
    engine, widths = TransformersEngine(talker), []
    run = engine._run
    monkeypatch.setattr(engine, "_run", lambda ids, *rest: widths.append(ids.shape[1]) or run(ids, *rest))
    talk = Talk(0, Plan(1, 0, (3, 3, 3)), talker)
    while not talk.over:
        engine.submit([talk.request()])
        talk.hear(engine.poll()[0])
    prompt, delta = len(say(talker, "Go", 0)[0]), len(say(talker, "Next?", 1)[0])
    # The last sampled token was never fed: it comes with the observation.
    assert [width for width in widths if width > 1] == [prompt, delta + 1, delta + 1]


@pytest.mark.parametrize("reuse", [True, False])
def test_a_picture_is_encoded_once_per_weight_version(talker, tasks, monkeypatch, reuse):
    seen: list[str] = []
    encode = engine_module.encode_images
    monkeypatch.setattr(
        engine_module, "encode_images", lambda v, images, p: seen.extend(i.key for i in images) or encode(v, images, p)
    )
    engine = TransformersEngine(talker, reuse_cache=reuse)
    talks = [Talk(number, Plan(number, number % 3, (4, 4, 4)), talker) for number in range(6)]

    def finish():
        for talk in talks:
            talk.__init__(talk.id, talk.plan, talker)
        for _ in range(3):
            engine.submit([talk.request() for talk in talks])
            for result in engine.poll():
                talks[result.id].hear(result)
        engine.release(range(6))

    finish()
    distinct = {image.key for talk in talks for image in talk.images[:-1]}
    assert sorted(seen) == sorted(distinct)
    finish()
    assert len(seen) == len(distinct)
    engine.update_weights(None, 1)
    finish()
    assert sorted(seen) == sorted([*distinct, *distinct])


@pytest.mark.parametrize("given_tensors", [True, False])
def test_new_weights_forget_everything_old(tiny_policy, given_tensors):
    policy = copy.deepcopy(tiny_policy)
    engine = TransformersEngine(policy)
    talk = Talk(0, Plan(5, 0, (4, 4)), policy)
    engine.submit([talk.request()])
    (first,) = engine.poll()
    talk.hear(first)
    changed = {name: tensor.detach() * 1.3 for name, tensor in policy.model.named_parameters()}
    if given_tensors:
        engine.update_weights(changed.items(), version=7)
    else:
        with torch.no_grad():
            for name, tensor in policy.model.named_parameters():
                tensor.copy_(changed[name])
        engine.update_weights(None, version=7)
    request = talk.request()
    engine.submit([request])
    (second,) = engine.poll()
    fresh = TransformersEngine(policy)
    fresh.submit([request])
    (expected,) = fresh.poll()
    assert (first.weight_version, second.weight_version) == (0, 7)
    assert second.token_ids.tolist() == expected.token_ids.tolist()
    np.testing.assert_allclose(second.log_probs, expected.log_probs, atol=TOLERANCE)


def test_unknown_weights_are_refused(tiny_policy):
    with pytest.raises(KeyError, match="nonsense"):
        TransformersEngine(tiny_policy).update_weights([("nonsense", torch.zeros(1))], 1)


def test_aborted_requests_are_answered(talker):
    engine = TransformersEngine(talker)
    talks = [Talk(number, Plan(number, 0, (3,)), talker) for number in range(3)]
    engine.submit([talk.request() for talk in talks])
    engine.abort([1, 99])
    first = engine.poll()
    assert [(result.id, result.finish_reason, len(result.token_ids)) for result in first] == [(1, "abort", 0)]
    assert sorted(result.id for result in engine.poll()) == [0, 2]
    assert engine.poll() == []


def test_rows_are_free_again_after_release(talker):
    engine = TransformersEngine(talker, max_conversations=1)
    first, second = (Talk(number, Plan(number, number, (3, 3)), talker) for number in range(2))
    engine.submit([first.request(), second.request()])
    first.hear(engine.poll()[0])
    with pytest.raises(RuntimeError, match=r"1 requests wait, but all rows \(rollout.max_conversations=1\)"):
        engine.poll()
    engine.release([0, 42])
    second.hear(engine.poll()[0])
    assert second.results == play_alone(talker, second.plan)[:1]


def test_one_request_a_conversation(talker):
    engine, talk = TransformersEngine(talker), Talk(0, Plan(0, 0, (3,)), talker)
    engine.submit([talk.request()])
    with pytest.raises(ValueError, match="conversation 0 already waits"):
        engine.submit([talk.request()])


def test_another_conversation_under_a_known_id_starts_anew(talker):
    """An interrupted rollout leaves conversations behind; the next one uses their ids again, with equal prompt ids."""
    engine = TransformersEngine(talker)
    old, new = Talk(0, Plan(1, 0, (5, 5)), talker), Talk(0, Plan(2, 1, (5, 5)), talker)
    assert old.ids.tolist() == new.ids.tolist()
    engine.submit([old.request()])
    engine.poll()
    while not new.over:
        engine.submit([new.request()])
        new.hear(engine.poll()[0])
    assert new.results == play_alone(talker, new.plan)


def test_the_models_own_limit_ends_a_reply(tiny_policy):
    policy = copy.deepcopy(tiny_policy)
    talk = Talk(0, Plan(0, 0, (1,)), policy)
    policy.model.config.text_config.max_position_embeddings = len(talk.ids) + 6
    engine = TransformersEngine(policy)
    engine.submit([replace(talk.request(), max_new_tokens=None)])
    (result,) = engine.poll()
    assert (result.finish_reason, len(result.token_ids)) == ("length", 6)


def test_closing_forgets_requests(talker):
    engine, talk = TransformersEngine(talker), Talk(0, Plan(0, 0, (3,)), talker)
    engine.submit([talk.request()])
    engine.close()
    assert engine.poll() == []
