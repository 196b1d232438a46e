"""A name means one thing: no two modules and no two public classes of the package share one with different meaning.

A reader who searches for a name finds the one place, or places that all play the role given here.
"""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

import geo_sokoban_pipeline

PACKAGE = Path(geo_sokoban_pipeline.__file__).parent
# Kedro's names, and what a folder's other modules build on.
BY_CONVENTION = {"base", "factory", "nodes", "pipeline"}
# Each task has these files; some have a counterpart for what all tasks share.
OF_EACH_TASK = {"config", "data", "data_steps", "drawing", "env", "evaluation", "expert", "inspection", "report"}
OF_EACH_TASK |= {"sources", "task"}
# Subjects that several layers have a file on: its options (`config`), its checks (`preflight`), its hooks, datasets and
# pipelines, or its reward. `metrics`: of episodes, those that a task uses and those built on them.
SUBJECTS = {"audit", "geo3k", "grpo", "metrics", "own_code", "parameters", "policies", "policy", "rollout", "runs"}
SUBJECTS |= {"servers", "sokoban", "stored", "study"}


def test_modules():
    files = [path for path in PACKAGE.rglob("*.py") if path.stem != "__init__"]
    names = Counter([path.stem for path in files] + [folder.name for folder in {path.parent for path in files}])
    repeated = {name for name, count in names.items() if count > 1}
    assert repeated == BY_CONVENTION | OF_EACH_TASK | SUBJECTS


def test_public_classes():
    seen: dict[str, Path] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if not isinstance(node, ast.ClassDef) or node.name.startswith("_"):
                continue
            # A class may specialise the one of the same name, as a task's defaults do.
            if node.name not in {ast.unparse(base).rpartition(".")[2] for base in node.bases}:
                assert node.name not in seen, f"{node.name} in {path} and in {seen[node.name]}"
                seen[node.name] = path
