"""Planted faults: which mistakes of RL code the solve rate shows, and which only the audit or the truth.

Each fault is a change of a few words in a copy of the checkout; nothing in the package can switch it on. The copy
trains the default run's GRPO from a stored warm start, and the same recipe without the fault is trained beside it.
Then the checkout audits what the faulty run has stored, and the gradient of its update, on stored groups of
`credit_sokoban`, is compared with the one under the true advantages.

    kedro run --pipelines=train_sokoban && kedro run --pipelines=credit_sokoban
    python -m benchmarks.planted_faults --data data --scratch ../faults --docs docs

Runs that the scratch folder holds are not made again. Each takes about six CPU-minutes; `--jobs` run side by side.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.mutants import PACKAGE, copy_checkout
from benchmarks.records import ROOT, write_json

from geo_sokoban_pipeline.formats import DASH, count, in_percent, number
from geo_sokoban_pipeline.reporting.study_docs import replace_section
from geo_sokoban_pipeline.reporting.study_tables import markdown_table

RUN = ("06_models", "train_sokoban", "default")
CREDIT = ("07_model_output", "credit_sokoban", "default")


@dataclass(frozen=True)
class Fault:
    """A change of the code.

    Attributes:
        meaning: in words.
        file: module that is changed.
        old, new: text that it has once, and what replaces it; empty: a right run.
        recipe: further options of train_sokoban, which make the fault matter.
    """

    meaning: str
    file: str = ""
    old: str = ""
    new: str = ""
    recipe: str = ""


KL = "grpo.kl_coefficient=0.05"
COOL = "rollout.sampling.temperature=0.7"
FAULTS = {
    "right": Fault("none"),
    "right, KL": Fault("none", recipe=KL),
    "right, temperature 0.7": Fault("none", recipe=COOL),
    "wrong group": Fault(
        "an episode is compared with those of other prompts (groups are tiled, not repeated)",
        "grpo/scoring.py",
        "group=np.array([episode.group_index for episode in graded], np.int64),",
        "group=np.arange(len(graded)) % len({episode.group_index for episode in graded}),",
    ),
    "mask one token early": Fault(
        "the last token of a prompt is trained, and that of a response is not",
        "training/batch.py",
        "targets = np.flatnonzero(trained).astype(np.int64)",
        "targets = np.flatnonzero(np.roll(trained, -1)).astype(np.int64)",
    ),
    "mask one token late": Fault(
        "the first token after a response is trained, and that of a response is not",
        "training/batch.py",
        "targets = np.flatnonzero(trained).astype(np.int64)",
        "targets = (np.flatnonzero(trained[:-1]) + 1).astype(np.int64)",
    ),
    "missing detach": Fault(
        "the ratio is that of the new log-probs to themselves, with both gradients",
        "grpo/sequences.py",
        "return self.log_probs - self.old_log_probs",
        "return self.log_probs - self.log_probs",
    ),
    "KL of the wrong sign": Fault(
        "the policy is pushed away from the reference",
        "grpo/loss.py",
        "loss = loss + options.kl_coefficient * kl_mean",
        "loss = loss - options.kl_coefficient * kl_mean",
        KL,
    ),
    "temperature ignored": Fault(
        "the trainer computes log-probs at temperature 1",
        "training/backends/torch.py",
        "        return cls(\n            temperature,",
        "        return cls(\n            1.0,",
        COOL,
    ),
    "padded tokens counted": Fault(
        "the mean over tokens divides by the padded size of the step",
        "grpo/loss.py",
        "return cls(len(samples), sum(len(sample.targets) for sample in samples))",
        "return cls(len(samples), len(samples) * max(len(sample.targets) for sample in samples))",
    ),
    "retokenised responses": Fault(
        "stored ids are those of the response's text",
        "rollout/episode.py",
        "        self.ledger.append(result.token_ids, result.log_probs, trainable=True)\n"
        "        text = self._decode(result)",
        "        text = self._decode(result)\n"
        "        ends = result.token_ids[-1:][result.token_ids[-1:] == self._policy.codec.end_id]\n"
        "        ids = np.concatenate([self._policy.codec.encode_text(text), ends])\n"
        "        result = replace(result, token_ids=ids, log_probs=np.resize(result.log_probs, len(ids)))\n"
        "        self.ledger.append(result.token_ids, result.log_probs, trainable=True)",
    ),
}


def main() -> int:
    """Run, audit, compare; returns 0."""
    parser = argparse.ArgumentParser(prog="planted_faults", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--data", type=Path, required=True, help="data root of the default run and its credit")
    parser.add_argument(
        "--scratch", type=Path, required=True, help="folder of copies and runs, outside of the checkout"
    )
    parser.add_argument("--jobs", type=int, default=2, help="runs side by side (2)")
    parser.add_argument("--only", nargs="+", choices=FAULTS, default=list(FAULTS))
    parser.add_argument(
        "--docs", type=Path, required=True, help="folder of the docs, whose results and table it writes"
    )
    options = parser.parse_args()
    data, scratch = options.data.resolve(), options.scratch.resolve()
    with ThreadPoolExecutor(options.jobs) as pool:
        found = dict(zip(options.only, pool.map(lambda name: examine(name, data, scratch), options.only), strict=True))
    true = gradient(ROOT, data, scratch / "true.npy", is_true=True)
    for name, row in found.items():
        if not FAULTS[name].recipe:
            own = np.load(scratch / name / "gradient.npy")
            norm = float(np.linalg.norm(own) * np.linalg.norm(true))
            row["cosine"] = float(own @ true) / norm if norm else None
    out = options.docs / "results" / "planted_faults.json"
    rows = json.loads(out.read_text("utf-8")) if out.exists() else {}
    rows |= {name: {"meaning": FAULTS[name].meaning, **row} for name, row in found.items()}
    write_json(out, rows)
    page = options.docs / "credit.md"
    page.write_text(replace_section(page.read_text("utf-8"), "faults", render_faults(rows), page), "utf-8")
    return 0


def render_faults(found: Mapping[str, Mapping[str, Any]]) -> str:
    """The table of the docs: each fault beside the right run of its recipe."""

    def solved(row: Mapping[str, Any]) -> str:
        if "solved" not in row:
            return "stopped"
        share, low, high = row["solved"]
        return f"{in_percent(share)} [{in_percent(low, 0)}, {in_percent(high, 0)}]"

    right = {row["recipe"]: row for row in found.values() if row["meaning"] == "none"}
    lines = [
        [
            f"{name}: {row['meaning']}",
            solved(row),
            solved(right[row["recipe"]]),
            f"{row['gap']:.1g}" if "gap" in row else DASH,
            ", ".join(f"{check}: {count(many)}" for check, many in row.get("findings", {}).items()) or "none",
            "no gradient" if row.get("cosine", 0) is None else number(row.get("cosine")),
        ]
        for name, row in found.items()
        if row["meaning"] != "none"
    ]
    return markdown_table(("fault", "solved, %", "without it", "gap", "findings of the audit", "cosine"), lines)


def examine(name: str, data: Path, scratch: Path) -> dict[str, Any]:
    """Train with a fault, and look at what it has stored with the right code."""
    fault, folder = FAULTS[name], scratch / name
    tree, root = folder / "tree", folder / "data"
    if not tree.exists():
        copy_checkout(tree)
        if fault.file:
            path = tree / PACKAGE / fault.file
            text = path.read_text(encoding="utf-8")
            if text.count(fault.old) != 1:
                raise ValueError(f"{name}: {fault.file} has its text {text.count(fault.old)} times, not once")
            path.write_text(text.replace(fault.old, fault.new), encoding="utf-8")
    if not root.joinpath(*RUN).exists():
        for part in ("01_raw", "02_intermediate", "05_model_input"):
            shutil.copytree(data / part, root / part)
        for part in ("base_policy", "policy"):
            shutil.copytree(data.joinpath(*RUN, part), root.joinpath(*RUN, part))
        shutil.copy2(data.joinpath(*RUN, "data.json"), root.joinpath(*RUN, "data.json"))
    changes = ["train_sokoban.processes=1", "tracking.enabled=false"]
    changes += [f"train_sokoban.{fault.recipe}"] if fault.recipe else []
    if not fault.recipe and not (folder / "gradient.npy").exists():
        gradient(tree, data, folder / "gradient.npy")
    summary = root / "08_reporting" / "train_sokoban" / "default" / "eval_summary.json"
    row: dict[str, Any] = {"recipe": fault.recipe}
    if not summary.exists():
        ended = kedro(tree, root, "train_sokoban", changes)
        if ended.returncode:
            return row | {"stopped": last_error(ended.stdout)}
    evaluated = json.loads(summary.read_text(encoding="utf-8"))
    final = next(one for one in evaluated["rows"] if (one["policy"], one["mode"]) == ("final", "sampled"))
    row |= {"solved": [final[name] for name in ("solve_rate", "low", "high")], "gap": log_prob_gap(root)}
    audit = root / "08_reporting/audit_sokoban/default/audit.json"
    if not audit.exists() and (ended := kedro(ROOT, root, "audit_sokoban", [])).returncode and not audit.exists():
        raise RuntimeError(ended.stdout[-2000:])
    checks = json.loads(audit.read_text(encoding="utf-8"))["checks"]
    row["findings"] = {one["check"]: len(one["findings"]) for one in checks if one["findings"]}
    return row


def kedro(tree: Path, root: Path, pipeline: str, changes: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """A command in a copy of the checkout."""
    words = [str(ROOT / ".venv/bin/python"), "-m", "kedro", "run", f"--pipelines={pipeline}"]
    words += ["--params", ",".join(changes)] if changes else []
    return subprocess.run(
        words,
        cwd=tree,
        env=environment(tree, root),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )


def environment(tree: Path, root: Path) -> Mapping[str, str]:
    """Variables of a command that imports the package from a copy."""
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(tree / "src"), str(ROOT)]),
        "GEO_SOKOBAN_DATA_ROOT": str(root),
        "OMP_NUM_THREADS": "1",
    }


def last_error(output: str) -> str:
    """The last line of an output that names an error."""
    lines = [line for line in output.splitlines() if "Error" in line or "ERROR" in line]
    return (lines or output.splitlines() or [""])[-1][-300:]


def log_prob_gap(root: Path) -> float:
    """The run's own metric of the gap between trainer and engine: mean |difference| of a token, in nats."""
    files = sorted((root / "07_model_output" / "train_sokoban" / "default" / "metrics").rglob("*.json"))
    gaps = [json.loads(file.read_text(encoding="utf-8")).get("train/train_rollout_logprob_abs_diff") for file in files]
    return float(np.mean([gap for gap in gaps if gap is not None]))


def gradient(tree: Path, data: Path, out: Path, *, is_true: bool = False) -> Any:
    """Gradient of an update on the first groups of the credit, by the code of a copy; of the true advantages."""
    code = f"from benchmarks.planted_faults import write_gradient; write_gradient({str(out)!r}, {is_true})"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment(tree, data), check=True)
    return np.load(out)


def write_gradient(out: str, is_true: bool) -> None:
    """Write the flat gradient of the package that is imported, as it trains stored groups of the credit."""
    import pyarrow.parquet as pq
    from benchmarks.setup import default_options

    from geo_sokoban_pipeline.grpo.loss import GrpoObjective, StepSize
    from geo_sokoban_pipeline.grpo.scoring import apply_scores, assistant_turns, score_groups
    from geo_sokoban_pipeline.policies.policy import load_policy
    from geo_sokoban_pipeline.tasks import task_of
    from geo_sokoban_pipeline.training.backends.torch import GradientPass, PassSetting
    from geo_sokoban_pipeline.training.batch import build_sample
    from geo_sokoban_pipeline.trajectories.parquet import read_trajectories
    from geo_sokoban_pipeline.trajectories.types import table_to_trajectories

    root = Path(os.environ["GEO_SOKOBAN_DATA_ROOT"])
    options = default_options({})
    folder = min(root.joinpath(*CREDIT, "trajectories").iterdir())
    episodes = [
        one for file in sorted(folder.glob("*.parquet")) for one in table_to_trajectories(read_trajectories(file))
    ]
    apply_scores(episodes, score_groups(episodes, options.grpo, task_of("sokoban"), options.reward.args))
    if is_true:
        tables = [pq.ParquetFile(file).read() for file in root.joinpath(*CREDIT, "turn_values").rglob("*.parquet")]
        gains = {(row["trajectory_id"], row["turn"]): row["advantage"] for table in tables for row in table.to_pylist()}
        for episode in episodes:
            for turn in assistant_turns(episode):
                turn.advantage = gains[episode.trajectory_id, episode.turns.index(turn)]
            episode.trained = True
    policy = load_policy(max(root.joinpath(*RUN, "checkpoints").iterdir()))
    samples = [build_sample(episode, policy) for episode in episodes if episode.trained]
    objective = GrpoObjective(options.grpo.model_copy(update={"entropy_coefficient": 0.0}))
    passes = GradientPass(policy, PassSetting.of(options.optimizer, options.rollout.sampling.temperature))
    passes.accumulate(samples, objective, StepSize.of(samples))
    flat = [
        np.zeros(one.numel()) if one.grad is None else one.grad.double().numpy().ravel()
        for one in policy.model.parameters()
        if one.requires_grad
    ]
    np.save(out, -np.concatenate(flat))


if __name__ == "__main__":
    raise SystemExit(main())
