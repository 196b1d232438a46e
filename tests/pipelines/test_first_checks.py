"""What a command knows before any work: it refuses what would fail or teach nothing, and logs what is doubtful."""

from __future__ import annotations

import pytest

from geo_sokoban_pipeline.runs.folders import RunFolders

OWN = {
    "plus.py": "def reward(outcome, args): return 1.0 + outcome.metrics['success']\n",
    "success.py": "def reward(outcome, args):\n    return outcome.env['success']\n",
    "last.py": "def reward(result, args):\n    return result.infos[-1]['turn_reward']\n",
    "text.py": "def reward(outcome, args): return 'good'\n",
    "expert.py": "class Expert:\n    def respond(self, env, generator): return 7\n\n"
    "def build_teacher(name, patience, noise): return Expert()\n",
    "world.py": "def build_env(sample, args):\n    return sample['no such column']\n",
}


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    folder = tmp_path_factory.mktemp("own")
    for name, text in OWN.items():
        (folder / name).write_text(text)
    return folder


T = "train_sokoban"
REWARD = f"{T}.grpo.advantage=dr_grpo,{T}.reward.args={{}},{T}.reward.function=@"


@pytest.mark.parametrize(
    ("pipeline", "params", "said"),
    [
        (
            T,
            f"{T}.grpo.group_size=1,train_sokoban.rollout.max_turns=1,sokoban.min_solution=2",
            # Two failures, one line each.
            f"{T}.grpo.group_size=1: an episode alone in its group has advantage 0, so nothing is ever learnt. Give 2 "
            f"or more. {T}.rollout.max_turns=1: 1 moves at most, and every training level needs 2 or more: none can be "
            "solved.",
        ),
        (
            T,
            f"{T}.reward.function=@/plus.py",
            f"{T}.grpo.advantage=turn_return: a reward of 2 with turns that add up to -0.02: this grpo.advantage needs "
            "a reward made of turn rewards, distance and final bonus, or one that returns its `turns` "
            "(docs/your_own_reward.md); else take an advantage of whole episodes, such as grpo.advantage=grpo.",
        ),
        ("rollout_sokoban", f"{T}.reward.function=@/plus.py", f"{T}.grpo.advantage=turn_return: a reward of 2 with"),
        (T, f"{REWARD}/success.py", "KeyError: 'success', in @/success.py, line 2: return outcome.env['success']"),
        (
            T,
            f"{REWARD}/last.py",
            f"{T}: an episode whose first response is truncated, so that result.infos is empty, fails: IndexError: "
            "list index out of range, in @/last.py, line 2: return result.infos[-1]['turn_reward']. See docs/",
        ),
        (T, f"{REWARD}/text.py", "reward.function=@/text.py: must return a dict with the key 'reward' (float), or a"),
        (T, f"{T}.env.factory=@/world.py", "KeyError: 'no such column', in @/world.py, line 2: return sample["),
        (
            T,
            f"{T}.warm_start.teacher.factory=@/expert.py",
            "respond must return a str, or None to end the episode; it",
        ),
        ("evaluate_sokoban", f"{T}.reward.function=missing.py", f"{T}.reward.function=missing.py: 'missing.py': there"),
        ("control_sokoban", f"{T}.env.args.cell_px=8", f"{T}.env.args.cell_px=8: differs from sokoban.cell_px=16"),
        (T, "sokoban.counts.train=0", "there are no training levels. Raise the count of the split train."),
        (
            "train_geo3k",
            "train_geo3k.grpo.advantage=turn_return",
            "train_geo3k.grpo.advantage=turn_return: a reward of 0 with steps that report no turn_reward in their "
            "info: this grpo.advantage needs a reward made of turn rewards and final bonus, or one that returns its ",
        ),
        (T, f"{T}.grpo.loss=@/bounds.py", f"{T}.grpo.loss=@/bounds.py: '@/bounds.py': there is no file @/bounds.py;"),
        (
            T,
            f"{T}.rollout.engine=sglang,{T}.rollout.server.python=/no/such/python",
            f"{T}.rollout.server.python=/no/such/python: no working interpreter. Make sglang-env.",
        ),
    ],
)
def test_refused_before_any_work(project, own, pipeline, params, said):
    result = project.command(f"--pipelines={pipeline}", f"--params={params.replace('@', str(own))}")
    assert result.exit_code == 1
    assert said.replace("@", str(own)) in " ".join(result.output.split()), result.output
    assert "Traceback" not in result.output
    assert len(result.output.split("Error: ")[-1].splitlines()) <= 3
    assert [path for path in project.root.rglob("*") if path.is_file() and path.suffix != ".lock"] == []


# Each on a finished run of train_sokoban, whose files stay as they are.
OTHER = "sokoban.boxes=2,sokoban.height=8,sokoban.width=8,sokoban.instruction=full"


@pytest.fixture(scope="module")
def stored(finished_run, tmp_path_factory):
    return finished_run.clone(tmp_path_factory.mktemp("stored") / "data")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pipeline", "params", "said"),
    [
        # The target of a source
        (
            "evaluate_sokoban",
            "run_id=seed3",
            "train_sokoban/seed3 has no checkpoint; train it first. Run ids of train_sokoban that are stored: default;",
        ),
        (
            "evaluate_sokoban",
            "evaluate_sokoban.source.checkpoint=77",
            "source.checkpoint=77 of train_sokoban/default: no such checkpoint; stored are",
        ),
        (
            "evaluate_sokoban",
            "evaluate_sokoban.source.checkpoint=lastest",
            "source.checkpoint=lastest of train_sokoban/default: no folder, and not",
        ),
        ("evaluate_sokoban", "evaluate_sokoban.source.checkpoint=lastest", "Give latest, best, final, start"),
        (
            "rollout_sokoban",
            "rollout_sokoban.source.run_id=never,rollout_sokoban.source.checkpoint=final",
            "never/final_policy does not exist; run the pipeline",
        ),
        (
            "update_sokoban",
            "update_sokoban.source.iteration=9",
            "source.iteration=9: train_sokoban/default holds 0 to 2",
        ),
        ("update_sokoban", "run_id=seed3", "train_sokoban/seed3 has no trajectories below"),
        ("control_sokoban", "run_id=seed3", "train_sokoban/seed3/policy does not exist"),
        ("browse_sokoban", "browse_sokoban.source.run_id=seed3", "seed3"),
        (
            "train_sokoban,evaluate_sokoban",
            "run_id=zz",
            "evaluate_sokoban works on train_sokoban/zz, which the same command makes",
        ),
        (
            "train_sokoban,evaluate_sokoban",
            f"run_id=zz,{OTHER}",
            "Type two commands: --pipelines=train_sokoban first, then --pipelines=evaluate_sokoban.",
        ),
        # Settings that the run does not have
        ("regrade_sokoban", f"{T}.rollout.max_turns=1", "would have seen something else"),
        ("regrade_sokoban", f"{T}.env.args.max_steps=1", "would have seen something else"),
        ("control_sokoban", "seed=3", "seed: stored 0, now 3"),
        ("control_sokoban", f"{T}.warm_start.clip=0.5", "warm_start.clip: stored 1.0, now 0.5"),
        ("control_sokoban", f"{T}.loop.iterations=4", "3 of loop.iterations=4 iterations are stored"),
        # Choices of which nothing is left
        ("browse_sokoban", "browse_sokoban.runs=[seed3]", "train_sokoban/seed3 has no stored episodes"),
        ("browse_sokoban", "browse_sokoban.runs=[../x]", "browse_sokoban.runs"),
        *(
            (
                f"{kind}_sokoban",
                f"{kind}_sokoban.first_iteration=2,{kind}_sokoban.last_iteration=1",
                "last_iteration=1 is before",
            )
            for kind in ("browse", "export", "score")
        ),
        (
            "export_sokoban",
            "export_sokoban.min_reward=99,export_sokoban.tables=[chat]",
            "none of 48 stored episodes is chosen by",
        ),
        ("export_sokoban", "export_sokoban.tables=[]", "export_sokoban.tables=[]"),
        ("score_sokoban", "score_sokoban.first_iteration=77", "none of the"),
        ("score_sokoban", "score_sokoban.ids=[nobody]", "ids: there is no episode 'nobody'"),
        ("score_sokoban", "score_sokoban.filter=[[colour,==,red]]", "the index has no column colour"),
        ("score_sokoban", "score_sokoban.filter=[[success,is,true]]", "score_sokoban.filter.0.1"),
        ("score_sokoban", "score_sokoban.source.checkpoint=77", "no such checkpoint; stored are"),
        # Studies
        (
            "study_geo3k",
            "study.name=long",
            "study.name=long: this pipeline has the studies geo3k, losses, geo3k_multi_turn.",
        ),
        (
            "study_sokoban",
            "study.docs=/no/such",
            "there is no /no/such/learning.md. Give the folder of the docs, or null.",
        ),
    ],
)
def test_what_a_stored_run_cannot_give_is_said(stored, offline_hub, pipeline, params, said):
    before = stored.stamps()
    result = stored.command(f"--pipelines={pipeline}", f"--params={params}")
    assert result.exit_code == 1
    assert said in f"{result.output} {result.exception}"
    assert stored.stamps() == before
    name = pipeline.rpartition(",")[2]
    assert not RunFolders.of(stored.root, name, "default").has_committed
