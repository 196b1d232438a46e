"""What a command knows before any work: it refuses what would fail or teach nothing, and logs what is doubtful."""

from __future__ import annotations

import pytest

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
