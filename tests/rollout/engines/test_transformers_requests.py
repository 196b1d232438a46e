"""The engine request by request: who shares a pass, what is computed once, what is forgotten, what is refused."""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from geo_sokoban_pipeline.policies.weights import WeightSource
from geo_sokoban_pipeline.rollout.engines.transformers import TransformersEngine
from given_weights import source_of
from rollout.engines.talks import Plan, Talk, converse, play_alone, say

# float32 sums in another order; measured differences are below 1e-5.
TOLERANCE = 1e-4

plans = st.builds(Plan, st.integers(0, 3), st.integers(0, 1), st.sampled_from([(1,), (4, 2), (2, 1, 5), (6, 6, 3)]))


@given(plans=st.lists(plans, min_size=2, max_size=5), rows=st.integers(2, 6), draw=st.randoms(use_true_random=False))
@settings(max_examples=12, deadline=None)
def test_random_company_changes_nothing(talker, plans, rows, draw):
    """Conversations enter, pause, and are released at random; each ends as it does on its own."""
    talks = [Talk(number, plan, talker) for number, plan in enumerate(plans)]
    converse(TransformersEngine(talker, max_conversations=rows), talks, draw, rows)
    assert_as_alone(talker, *talks)


def ask(engine, *requests):
    """Results of a poll, by conversation."""
    engine.submit(requests)
    return {result.id: result for result in engine.poll()}


def side_by_side(engine, talks, turns):
    """So many turns of all talks."""
    for _ in range(turns):
        for identity, result in ask(engine, *(talk.request() for talk in talks)).items():
            talks[identity].hear(result)


def assert_as_alone(policy, *talks):
    for talk in talks:
        assert talk.results == play_alone(policy, talk.plan)[: talk.turn]


def test_finished_rows_leave_the_batch(talker, passes):
    engine = TransformersEngine(talker)
    # Longer limits in lower rows and higher ones alike, so that rows must move.
    talks = [Talk(number, Plan(3, number, (limit,)), talker) for number, limit in enumerate([1, 4, 2, 6, 1])]
    lengths = {n: len(result.token_ids) for n, result in ask(engine, *(talk.request() for talk in talks)).items()}
    decoding = [rows for rows, width in passes if width == 1]
    assert decoding == [sum(length > step for length in lengths.values()) for step in range(1, max(lengths.values()))]


def test_a_shared_prompt_is_prefilled_once(talker, passes):
    engine = TransformersEngine(talker)
    talks = [Talk(number, Plan(number, number // 4, (5, 3)), talker) for number in range(8)]
    side_by_side(engine, talks, 2)
    prompts = [rows for rows, width in passes if width > 5]
    assert prompts == [2, 8], "two prompts for eight conversations, then each its own observation"
    assert_as_alone(talker, *talks)


@pytest.mark.parametrize("budget", [1, 60, 100])
def test_no_pass_exceeds_its_tokens(talker, passes, budget):
    engine = TransformersEngine(talker, prefill_tokens=budget)
    talks = [Talk(number, Plan(number, number, (3, 3)), talker) for number in range(6)]
    side_by_side(engine, talks, 2)
    assert all(rows * width <= budget for rows, width in passes if rows > 1)
    assert (max(rows for rows, _ in passes) > 1) == (budget > 1)
    assert_as_alone(talker, *talks)


@pytest.mark.parametrize("reuse", [True, False])
def test_only_new_tokens_are_prefilled(talker, passes, reuse):
    """Without the cache, every turn reads the conversation from its beginning."""
    engine, talk = TransformersEngine(talker, reuse_cache=reuse), Talk(0, Plan(1, 0, (3, 3, 3)), talker)
    lengths = []
    for _ in range(3):
        lengths.append(len(talk.ids))
        side_by_side(engine, [talk], 1)
    delta = len(say(talker, "Next?", 1)[0])
    # The last sampled token was never fed: it comes with the observation.
    assert [width for _, width in passes if width > 1] == ([lengths[0], delta + 1, delta + 1] if reuse else lengths)


@pytest.mark.parametrize("reuse", [True, False])
def test_an_image_is_encoded_once_per_weight_version(talker, monkeypatch, reuse):
    seen: list[str] = []
    encode = talker.network.encode
    monkeypatch.setattr(talker.network, "encode", lambda images: seen.extend(i.key for i in images) or encode(images))
    engine = TransformersEngine(talker, reuse_cache=reuse)
    talks = [Talk(number, Plan(number, number % 3, (4, 4, 4)), talker) for number in range(6)]

    def finish():
        for talk in talks:
            talk.__init__(talk.id, talk.plan, talker)
        side_by_side(engine, talks, 3)
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
    first = ask(engine, talk.request())[0]
    talk.hear(first)
    changed = {name: tensor.detach() * 1.3 for name, tensor in policy.model.named_parameters()}
    if given_tensors:
        engine.update_weights(source_of(changed), version=7)
    else:
        with torch.no_grad():
            for name, tensor in policy.model.named_parameters():
                tensor.copy_(changed[name])
        engine.update_weights(None, version=7)
    request = talk.request()
    second, expected = ask(engine, request)[0], ask(TransformersEngine(policy), request)[0]
    assert (first.weight_version, second.weight_version) == (0, 7)
    assert second.token_ids.tolist() == expected.token_ids.tolist()
    np.testing.assert_allclose(second.log_probs, expected.log_probs, atol=TOLERANCE)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_response_that_was_cut_goes_on_as_if_it_had_not_been(tiny_policy, seed):
    """The draw for a token follows from the seed and from how many tokens were sampled before, wherever the cut is."""

    def sample(request):
        return ask(TransformersEngine(tiny_policy), request)[0].token_ids.tolist()

    asked = Talk(0, Plan(seed, 0, (8,)), tiny_policy).request()
    whole = sample(asked)
    assert len(whole) == 8
    for cut in (1, 3, 7):
        ids = np.concatenate([asked.token_ids, np.array(whole[:cut], np.int32)])
        assert sample(replace(asked, token_ids=ids, sampled=cut, max_new_tokens=8 - cut)) == whole[cut:]


def test_unknown_weights_are_refused(tiny_policy):
    with pytest.raises(KeyError, match="nonsense"):
        TransformersEngine(tiny_policy).update_weights(source_of({"nonsense": torch.zeros(1)}), 1)


def test_a_model_without_weights_gives_none(tiny_policy):
    with pytest.raises(ValueError, match="holds a part of the policy"):
        WeightSource.of_model(copy.deepcopy(tiny_policy.model).to("meta"))


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
    with pytest.raises(RuntimeError, match=r"hold all KV slots \(rollout.max_conversations=1\)"):
        engine.poll()
    engine.release([0, 42])
    second.hear(engine.poll()[0])
    assert_as_alone(talker, second)


def test_another_conversation_under_a_known_id_starts_anew(talker):
    """An interrupted rollout leaves conversations behind; the next one uses their ids again, with equal prompt ids."""
    engine = TransformersEngine(talker)
    old, new = Talk(0, Plan(1, 0, (5, 5)), talker), Talk(0, Plan(2, 1, (5, 5)), talker)
    assert old.ids.tolist() == new.ids.tolist()
    ask(engine, old.request())
    side_by_side(engine, [new], 2)
    assert_as_alone(talker, new)


@pytest.mark.parametrize("ends", [True, False])
def test_the_models_own_limit_or_another_end_of_text_ends_a_response(talker, ends):
    """A real Qwen3-VL knows two ends; servers stop at both."""
    policy = replace(talker, model=copy.deepcopy(talker.model))
    other = policy.codec.encode_text("up")[0].item()
    policy.model.generation_config.eos_token_id = [other, policy.codec.end_id]
    assert policy.end_ids == (policy.codec.end_id, other)
    policy.model.lm_head.bias.data[list(policy.end_ids)] = torch.tensor([-100.0, 100.0 if ends else -100.0])
    request = Talk(0, Plan(0, 0, (1,)), policy).request()
    policy.model.config.text_config.max_position_embeddings = len(request.token_ids) + 6
    result = ask(TransformersEngine(policy), replace(request, max_new_tokens=None))[0]
    if ends:
        assert (result.finish_reason, result.token_ids.tolist()) == ("stop", [other])
    else:
        assert (result.finish_reason, len(result.token_ids)) == ("length", 6)


@pytest.mark.parametrize("room", [0, -3])
def test_a_full_context_is_answered_with_nothing(talker, room, passes):
    talk = Talk(0, Plan(2, 0, (6, 6)), talker)
    engine = TransformersEngine(talker)
    side_by_side(engine, [talk], 1)
    engine.context = len(talk.ids) + room
    result = ask(engine, replace(talk.request(), max_new_tokens=None))[0]
    assert (result.finish_reason, len(result.token_ids), len(result.log_probs)) == ("length", 0, 0)
    assert engine.poll() == []
    # Nothing was read, and nothing that was is lost: with room the conversation continues where it was.
    engine.context = len(talk.ids) + 50
    passes.clear()
    side_by_side(engine, [talk], 1)
    assert passes[0][1] < 30 < len(talk.ids)
    assert_as_alone(talker, talk)


def test_a_request_without_any_new_token_starts_anew(talker):
    """After an empty response, or one that another system took back, the conversation is asked again as it was."""
    engine, talk = TransformersEngine(talker), Talk(0, Plan(7, 1, (3, 3)), talker)
    for _ in range(2):
        result = ask(engine, talk.request())[0]
        assert (result.token_ids.tolist(), result.finish_reason) == play_alone(talker, talk.plan)[0]


def test_other_images_under_a_known_id_start_anew(talker):
    """Equal tokens do not make equal conversations: their images are pads."""
    engine = TransformersEngine(talker)
    old, new = Talk(0, Plan(1, 0, (5, 5)), talker), Talk(0, Plan(1, 1, (5, 5)), talker)
    side_by_side(engine, [old], 1)
    shown = replace(old.request(), images=(new.images[0], old.images[1]))
    result, expected = ask(engine, shown)[0], ask(TransformersEngine(talker), shown)[0]
    assert result.token_ids.tolist() == expected.token_ids.tolist()
    np.testing.assert_allclose(result.log_probs, expected.log_probs, atol=TOLERANCE)


def test_one_request_a_conversation_which_closing_forgets(talker):
    engine, talk = TransformersEngine(talker), Talk(0, Plan(0, 0, (3,)), talker)
    engine.submit([talk.request()])
    with pytest.raises(ValueError, match="conversation 0 already waits"):
        engine.submit([talk.request()])
    engine.close()
    assert engine.poll() == []
