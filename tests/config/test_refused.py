"""Values that would fail or mislead later are refused in one line, and others are taken as they are given."""

from __future__ import annotations

from typing import Any

import pytest

from geo_sokoban_pipeline.config import ParameterError, validate_parameters
from geo_sokoban_pipeline.parameters import ProjectParameters
from geo_sokoban_pipeline.runs.fingerprint import unflatten
from option_fields import value_at

SET = {"name": "longer", "title": "Longer"}
NO_RUN = "the name of the pipeline that made the run, train_<task>"
TEACHER = {"advantage": "distillation", "advantage_args": {"teacher": "me/teacher"}}
NO_PASSWORD = "tracking: uri=…MLFLOW_TRACKING_PASSWORD; for a database …~/.pgpass"

# Typed parameters and the message; "…" stands for more words.
REFUSED: list[tuple[dict[str, Any], str]] = [
    # A ratio below 0 does not exist.
    (
        {"train_sokoban.grpo.loss_args.clip_low": 1.5},
        "train_sokoban.grpo.loss_args.clip_low=1.5: input should be less than or equal to 1.",
    ),
    ({"train_sokoban.optimizer.betas": [0.9, 1]}, "train_sokoban.optimizer.betas.1=1: input should be less than 1."),
    ({"train_sokoban.warm_start.betas": [-0.1, 0.9]}, "warm_start.betas.0=-0.1: input should be greater than or equal"),
    (
        {"train_sokoban.optimizer.eps": 1e-50},
        "optimizer.eps=1e-50: input should be greater than or equal to 1e-16.",
    ),
    ({"train_sokoban.optimizer.learning_rate": 1e30}, "learning_rate=1e+30: input should be less than or equal to 1."),
    ({"train_sokoban.optimizer.weight_decay": 2}, "weight_decay=2: input should be less than or equal to 1."),
    (
        {"train_sokoban.policy.attention": "sdqa"},
        "train_sokoban.policy.attention=\"sdqa\": input should be 'sdpa' or 'eager'. Did you mean sdpa?",
    ),
    (
        {"train_sokoban.policy.attention": "flash_attention_2"},
        "attention=\"flash_attention_2\": input should be 'sdpa' or",
    ),
    ({"train_sokoban.policy.tiny.hidden": 1}, "tiny.hidden=1: input should be greater than or equal to 8."),
    (
        {"train_sokoban.policy.tiny.kv_heads": 3},
        "train_sokoban.policy.tiny: kv_heads=3 must divide heads=4: each key and value head serves equally many query",
    ),
    (
        {"train_sokoban.policy.tiny.vision_hidden": 60},
        "train_sokoban.policy.tiny: vision_hidden=60 must be a multiple of 4 × vision_heads=16.",
    ),
    ({"train_sokoban.policy.tiny.vision_heads": 3}, "vision_hidden=64 must be a multiple of 4 × vision_heads=12."),
    (
        {"train_sokoban.policy.tiny.layers": 2, "train_sokoban.policy.tiny.deepstack": [0, 0]},
        "deepstack=(0, 0) names a layer twice; name each once.",
    ),
    (
        {"train_sokoban.policy.tiny.min_pixels": 4096, "train_sokoban.policy.tiny.max_pixels": 1024},
        "train_sokoban.policy.tiny: min_pixels=4096 is above max_pixels=1024; lower it.",
    ),
    ({"train_sokoban.rollout.sampling.temperature": 1e-9}, "sampling.temperature=1e-09: input should be greater than"),
    ({"train_sokoban.evaluation.sampling.temperature": 0}, "evaluation.sampling.temperature=0: input should be"),
    ({"train_sokoban.prompts.floor": 1e-320}, "train_sokoban.prompts.floor=1e-320: input should be greater than"),
    (
        {"train_sokoban.loop.iterations": 100_000},
        "loop.iterations=100000: input should be less than or equal to 99999.",
    ),
    ({"train_sokoban.threads": 100_000}, "train_sokoban.threads=100000: input should be less than or equal to 1024."),
    ({"train_sokoban.rollout.server.ports": [0]}, "rollout.server.ports.0=0: input should be greater than or equal"),
    ({"train_sokoban.rollout.server.ports": [70_000]}, "ports.0=70000: input should be less than or equal to 65535."),
    (
        {"train_sokoban.rollout.server.ports": [4001, 4001], "train_sokoban.rollout.server.count": 2},
        "train_sokoban.rollout.server: ports=[4001, 4001] names a port twice; give each server its own.",
    ),
    (
        {
            "train_sokoban.rollout.server.mode": "attach",
            "train_sokoban.rollout.server.urls": ["http://a:1", "http://a:1/"],
        },
        "urls=['http://a:1', 'http://a:1/'] names a server twice; name each once.",
    ),
    (
        {"train_sokoban.rollout.server.mode": "attach", "train_sokoban.rollout.server.urls": ["http://"]},
        "train_sokoban.rollout.server: urls: http:// is no address; it must be http://host:port.",
    ),
    (
        {"train_sokoban.rollout.server.update": "tensors", "train_sokoban.rollout.server.tensor_parallel": 2},
        "update=tensors with tensor_parallel=2: a server takes all weights once for each of its processes",
    ),
    (
        {"train_sokoban.rollout.server.update": "ipc", "train_sokoban.rollout.server.device": "cpu"},
        "train_sokoban.rollout.server: update=ipc with device=cpu: only GPUs share memory so; take update=group.",
    ),
    (
        {
            "train_sokoban.rollout.server.update": "ipc",
            "train_sokoban.rollout.server.mode": "attach",
            "train_sokoban.rollout.server.urls": ["http://127.0.0.1:1", "http://a:1"],
        },
        "update=ipc with urls=['http://a:1']: handles of GPU memory are good on this machine alone; take update=group.",
    ),
    (
        {
            "train_sokoban.rollout.server.colocated": True,
            "train_sokoban.rollout.server.mode": "attach",
            "train_sokoban.rollout.server.urls": ["http://127.0.0.1:1"],
        },
        "colocated=true with mode=attach: it is not known which memory a server of `urls` has given up; launch the",
    ),
    (
        {"train_sokoban.rollout.server.colocated": True, "train_sokoban.rollout.server.router": "sticky"},
        "colocated=true with router=sticky: a router has each server sample a token when it begins, which a server",
    ),
    ({"train_sokoban.rollout.server.faults.tries": 5000}, "faults.tries=5000: input should be less than or equal"),
    ({"train_sokoban.rollout.server.faults.reply_timeout": 1e30}, "reply_timeout=1e+30: input should be less than"),
    ({"seed": 2**64}, "seed=18446744073709551616: input should be less than or equal to 9223372036854775807."),
    ({"sokoban.height": 100}, "sokoban.height=100: input should be less than or equal to 64."),
    (
        {"sokoban.max_solution": 2**40},
        "sokoban.max_solution=1099511627776: input should be less than or equal to 1000.",
    ),
    ({"sokoban.inner_walls": [0, 100]}, "sokoban: inner_walls=[0, 100]: a 6×6 board has 16 inner cells; lower"),
    (
        {"sokoban.boxes": 15},
        "sokoban: boxes=15: a 6×6 board with 1 inner walls has 15 floor cells, and boxes and player need one each; "
        "lower boxes, or raise height or width.",
    ),
    (
        {"sokoban.height": 64, "sokoban.width": 64, "sokoban.cell_px": 128},
        "sokoban: cell_px=128: images of 64×64 cells have 67108864 pixels, above limits.max_pixels=16777216; lower",
    ),
    (
        {"geo3k.problems.picture_scale": 0.01},
        "geo3k.problems.picture_scale=0.01: input should be greater than or equal",
    ),
    ({"geo3k.problems.lengths": [10, 100]}, "geo3k.problems.lengths.1=100: input should be less than or equal to 99."),
    ({"geo3k.problems.lengths": [20, 10]}, "lengths=[20, 10]: [20, 10]: the least length is above the greatest"),
    ({"geo3k.problems.held_out_angles": {"eval": 0}}, "held_out_angles.eval=0: input should be greater than 0."),
    ({"geo3k.hub.dataset": ""}, 'geo3k.hub.dataset="": string should have at least 1 character.'),
    # Runs and their names.
    *(
        ({"run_id": name}, "run_id…name of a folder")
        for name in ("", "../other", "a/b", ".hidden", "-x", "a b", "x" * 101)
    ),
    ({"run_id": 2}, "run_id=2: a text is needed, and YAML reads a number. Quote it"),
    ({"run_id": 1.10}, "run_id=1.1: a text is needed, and YAML reads a number. Quote it"),
    ({"run_id": True}, "run_id=true: a text is needed, and YAML reads true or false. Quote it"),
    ({"run_id": None}, "run_id=null: input should be a valid string"),
    ({"run_id": ["a"]}, 'run_id=["a"]: input should be a valid string'),
    *(
        ({f"{section}.source.run": name}, f"{section}.source.run=…{NO_RUN}")
        for section, names in {
            "evaluate_sokoban": ("", "../../etc", "/etc", "a/b", "Train", "..", ".", "train_sokoban/seed2", 3, None),
            "rollout_geo3k": ("a/b", None),
            "update_sokoban": ("a/b", None),
            "control_sokoban": ("a/b", None),
        }.items()
        for name in names
    ),
    ({"train_sokobann": {}}, "train_sokobann: unknown name. Did you mean train_sokoban?"),
    # Addresses of trackers: no message shows a password.
    ({"tracking.uri": "postgresql://u:swordfish@h/db"}, NO_PASSWORD),
    ({"tracking.uri": "mysql+pymysql://u:sword/fish@h:3306/db"}, NO_PASSWORD),
    ({"tracking.uri": "http://u:swordfish@h:5000"}, NO_PASSWORD),
    ({"tracking.uri": "postgresql://h/db?user=u&password=swordfish"}, NO_PASSWORD),
    ({"tracking.uri": "mssql+pyodbc:///?odbc_connect=UID%3Du%3BPWD%3Dswordfish"}, NO_PASSWORD),
    ({"tracking.url": "http://u:swordfish@h"}, "://***@h"),
    ({"tracking.uri": ["http://u:swordfish@h"]}, "://***@h"),
    # Data and training of geometry.
    ({"geo3k.colour": 1}, "geo3k.colour=1: unknown name"),
    ({"geo3k.sourc": "hub"}, "Did you mean geo3k.source"),
    ({"geo3k.hub.split": "train"}, "geo3k.hub.split"),
    ({"geo3k.instruction": "brief"}, 'geo3k.instruction="brief"…question, boxed, tool_brief, tool…{question} once'),
    ({"geo3k.instruction": "{question}{question}"}, "geo3k.instruction"),
    ({"geo3k.source": "file"}, "source=file needs file.path"),
    ({"geo3k.counts.eval": None}, "counts.eval=null: how many problems to generate"),
    ({"geo3k.counts.eval": -1}, "geo3k.counts.eval=-1"),
    ({"geo3k.shares.train": 0.9}, "shares add up to 1.1"),
    ({"geo3k.exclude_overlaps": "all"}, "geo3k.exclude_overlaps"),
    ({"geo3k.limits.max_aspect": 300}, "geo3k.limits.max_aspect=300"),
    ({"geo3k.problems.difficulty": "hardest"}, "geo3k.problems.difficulty"),
    ({"train_geo3k.task": "sokoban"}, "train_geo3k.task=\"sokoban\": input should be 'geo3k'"),
    (
        {"train_geo3k.warm_start.teacher.name": "direct"},
        "warm_start.teacher.name=\"direct\": input should be 'plausible', 'solver' or 'constant'",
    ),
    ({"train_geo3k_multi_turn.rollout.max_turns": 5}, "env.args.max_turns=3: differs from rollout.max_turns=5"),
    # Estimators: their names, the options beside these, and the new places of former options.
    *(
        ({f"train_sokoban.grpo.{name}": value for name, value in given.items()}, f"train_sokoban.grpo.{message}")
        for given, message in (
            (
                {"advantage": "grop"},
                'advantage="grop": did you mean grpo? known are grpo, dr_grpo, …; or give a dotted path, file.py, or',
            ),
            ({"loss": "grpo"}, 'loss="grpo": did you mean gspo? known are ppo, gspo, '),
            ({"importance": None}, "importance=null: input should be a valid string"),
            ({"loss_args": 5}, "loss_args=5: input should be a valid dictionary"),
            (
                {"loss_args.clip_hihg": 1},
                "loss_args.clip_hihg=1: unknown name. Did you mean …grpo.loss_args.clip_high?",
            ),
            ({"loss_args.cap": 2}, "loss_args.cap=2: unknown name. Known here: clip_high, clip_low, dual_clip."),
            (
                {"loss": "gspo", "loss_args.per": "state"},
                "loss_args.per=\"state\": input should be 'episode' or 'turn'",
            ),
            (
                {"advantage": "gigpo", "advantage_args.gama": 1},
                "…Did you mean train_sokoban.grpo.advantage_args.gamma?",
            ),
            (
                {"advantage": "grpo", "advantage_args.gamma": 1},
                "advantage_args.gamma=1: unknown name. Known here: none.",
            ),
            ({"advantage": "distillation"}, "advantage_args.teacher: this parameter is needed but not given."),
            ({"importance_args.cap": 2}, "importance_args.cap=2: unknown name. Known here: none."),
            ({"overlong": {"length": 9, "buffer": 0}}, "overlong.buffer=0: input should be greater than or equal to 1"),
            (
                {"normalize": "std"},
                'normalize="std": the group\'s standard deviation is part of advantage=grpo, and of',
            ),
            *(
                ({name: value}, f"{name}=…: unknown name. It is train_sokoban.grpo.{place}… now.")
                for name, value, place in (
                    ("credit", "episode", "advantage (turn_return for turn; for episode dr_grpo, or grpo where"),
                    ("gamma", 0.9, "advantage_args.gamma"),
                    ("baseline", "board", "advantage_args.baseline (state for board)"),
                    ("clip_low", 0.1, "loss_args.clip_low"),
                    ("clip_high", 0.1, "loss_args.clip_high"),
                    ("dual_clip", 3, "loss_args.dual_clip"),
                    ("importance_cap", 2, "importance (truncated) with importance_args.cap"),
                )
            ),
        )
    ),
    # Studies and controls.
    (
        {"study.name": "defalt"},
        "study.name=\"defalt\": input should be 'default', 'one_behind', 'from_zero', 'long', 'estimators', "
        "'importance', 'adapters', 'geo3k', 'losses' or 'geo3k_multi_turn'",
    ),
    ({"study.workers": 0}, "study.workers=0: input should be greater than or equal to 1"),
    ({"study_default.seeds": []}, "study_default.seeds=[]"),
    ({"study_default.seeds": [1, 1]}, "seeds and beside names something twice: 1, 1"),
    ({"study_default.chosen_on": [10, 10]}, "chosen_on names something twice: 10, 10"),
    (
        {"study_default.controls": ["teacher", "solver"]},
        "study_default.controls.1=\"solver\": input should be 'teacher'",
    ),
    ({"study_default.controls": ["teacher", "teacher"]}, "controls names something twice"),
    ({"study_default.evaluations": [SET, SET]}, "evaluations names something twice: longer, longer"),
    ({"study_default.evaluations": [{**SET, "name": "8x8/two"}]}, "string should match pattern"),
    ({"study_default.max_minutes": 0}, "study_default.max_minutes=0"),
    *(
        ({"study_default.bars": [{"player": "final", **bar}]}, message)
        for bar, message in (
            ({}, "a criterion needs exactly one of at_least and at_most"),
            ({"at_least": 1, "at_most": 2}, "a criterion needs exactly one of"),
            ({"at_least": 1, "apart": True}, "apart=true needs `over`"),
        )
    ),
    ({"control_sokoban.imitate": "expert"}, "input should be 'teacher' or 'optimal'"),
    ({"control_sokoban.share": 0}, "control_sokoban.share=0: input should be greater than 0"),
    # Settings that cannot train together.
    *(
        ({"train_sokoban": given}, message)
        for given, message in [
            ({"rollout": {"sampling": {"greedy": True}}}, "training needs sampled episodes"),
            ({"evaluation": {"checkpoint": "best"}, "loop": {"keep_best": False}}, "needs loop.keep_best"),
            ({"grpo": {"max_log_prob_difference": 0.1}}, "needs old_log_probs=recompute"),
            ({"grpo": {"importance": "truncated"}}, "importance=truncated needs old_log_probs=recompute"),
            ({"grpo": {"reduction": "constant"}}, "needs constant_denominator"),
            ({"grpo": {**TEACHER, "kl_coefficient": 0.1}}, "distillation with kl_coefficient=0.1"),
            ({"grpo": {**TEACHER, "mixed_versions": "mask"}}, "distillation with mixed_versions=mask"),
            ({"policy": {"source": "folder"}}, "path is empty"),
            (
                {"sharding": "hybrid", "processes": 4, "replicas": 3, "threads": 1},
                "such as processes=4 with replicas=2",
            ),
            ({"sharding": "full", "processes": 4, "replicas": 2, "threads": 1}, "only hybrid takes replicas"),
            ({"placement": "inline", "processes": 2, "threads": 1}, "one process has one rank"),
            *(
                ({"placement": "ray", "rollout": {"engine": "sglang", "server": server}}, message)
                for server, message in (
                    ({"router": "sticky"}, "router=sticky: a server that is brought back may be on another node"),
                    (
                        {"host": "10.0.0.1"},
                        "host=10.0.0.1: a server listens at the address by which Ray knows its node",
                    ),
                    ({"update": "ipc"}, "update=ipc: servers with GPUs of their own may be on another node"),
                    ({"update": "disk"}, "give an update_folder that all nodes can read"),
                    ({"colocated": True, "count": 2}, "share the GPUs of 2 ranks, and there are processes=1"),
                )
            ),
            ({"placement": "ray", "ray": {"min_processes": 2}}, "min_processes=2 with processes=1"),
            (
                {
                    "placement": "ray",
                    "processes": 4,
                    "threads": 1,
                    "sharding": "hybrid",
                    "replicas": 2,
                    "ray": {"min_processes": 1},
                },
                "ranks come in groups of 2",
            ),
            (
                {"rollout": {"over_sampling": 2}, "processes": 2, "threads": 1},
                "give rollout.workers, or take processes=1",
            ),
            (
                {"placement": "inline", "rollout": {"workers": 2}, "threads": 1},
                "placement=inline with rollout.workers=2",
            ),
            ({"rollout": {"workers": 2}}, "rollout.workers=2 needs threads"),
            ({"processes": 2}, "processes=2 needs threads"),
            ({"optimizer": {"reduce_dtype": "bfloat16"}}, "whole gradients would be accumulated in bfloat16"),
            (
                {"optimizer": {"reduce_dtype": "bfloat16", "gradient_sync": "micro_batch"}},
                "sharding=none and policy.compute=None: nothing would be added in it",
            ),
            (
                {"rollout": {"workers": 2, "engine": "sglang", "server": {"router": "sticky"}}, "threads": 1},
                "rollout.workers=2 with rollout.server.router=sticky",
            ),
            ({"rollout": {"partial": True, "over_sampling": 2}}, "an interaction cannot be continued"),
            ({"rollout": {"partial": True, "max_turns": 1}}, "nothing is ever aborted"),
            ({"rollout": {"partial": True, "max_turns": 1, "over_sampling": 2}}, "would never be trained"),
            ({"grpo": {"mixed_versions": "keep", "old_log_probs": "recompute"}}, "needs old_log_probs=rollout"),
        ]
    ),
]


@pytest.mark.parametrize(("typed", "message"), REFUSED, ids=lambda one: "+".join(one) if isinstance(one, dict) else "")
def test_refused(typed: dict[str, Any], message: str) -> None:
    with pytest.raises(ParameterError) as caught:
        validate_parameters(unflatten(typed), ProjectParameters)
    said = str(caught.value)
    assert all(part in said for part in message.split("…")) and "fish" not in said
    assert len(said.splitlines()) == 1


@pytest.mark.parametrize(
    "given",
    [
        *({"run_id": name} for name in ("seed2", "2", "1.10", "a.b-c_d")),
        *(
            {"evaluate_sokoban.source.run": run}
            for run in ("train_sokoban", "rollout_geo3k", "update_geo3k_multi_turn", "control_sokoban")
        ),
        *(
            {"tracking.uri": uri}
            for uri in (
                "sqlite:////data/a@b/mlflow.db",
                "http://h:5000",
                "http://u@h:5000/mlflow",
                "postgresql://u@h:5432/db?sslmode=require&passfile=/p",
                "databricks://profile",
            )
        ),
        {"geo3k.source": "hub", **{f"geo3k.counts.{split}": None for split in ("train", "validation", "eval")}},
    ],
    ids=str,
)
def test_taken_as_it_is_given(given: dict[str, Any]) -> None:
    parameters = validate_parameters(unflatten(given), ProjectParameters)
    assert {path: value_at(parameters, path) for path in given} == given
