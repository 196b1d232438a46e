"""A rollout and ten updates at full size with random weights: tokens per second, model FLOP utilisation, and measured
against planned memory.

    python scripts/gpu_check                  on a GPU
    python scripts/gpu_check --thin           two layers, for any machine

Qwen3-VL-2B trains on sequences of 4,096 tokens with checkpointing on and off, and by Megatron-Core; Qwen3-VL-8B with
offload. Nothing is downloaded: weights are random, the tokenizer is the project's own, levels are generated. The
rollout is one of Sokoban on 384 by 384 boards by the transformers engine; an update is the trainer's optimizer step.

Every case is a process of its own, and its figures are a line of the file of figures as soon as it ends: a case that
runs out of memory, or hangs, loses itself alone. `--only` runs some of them; the page has all lines of the file.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(Path(__file__).resolve().parent), str(ROOT / "src"), str(ROOT)]
CASES = ("rollout", "checkpointing", "plain", "megatron", "offload")


def main(words: Sequence[str] | None = None) -> int:
    """Measure and report; 0, or 1 where a case has failed, or there is no GPU and none was done without."""
    words = sys.argv[1:] if words is None else words
    options = _parse(words)
    if options.case is not None:
        from measuring import measure

        record = measure(options.case, options)
        with options.figures.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
        return 0
    import torch

    if not torch.cuda.is_available() and not options.thin:
        print("No GPU here. --thin measures a thin model on this machine's CPU.", file=sys.stderr)  # noqa: T201
        return 1
    from page import describe_records

    options.figures.parent.mkdir(parents=True, exist_ok=True)
    known = len(_read(options.figures))
    for case in options.only:
        problem = _run(case, words, options)
        records = _read(options.figures)
        if problem is not None and len(records) == known:
            records.append({"case": case, "error": problem})
            options.figures.write_text("".join(json.dumps(one) + "\n" for one in records), encoding="utf-8")
        known = len(records)
        page = describe_records(records, options.peak_tflops)
        if options.output is not None:
            options.output.write_text(page + "\n", encoding="utf-8")
    print(page)  # noqa: T201
    return int(any("error" in one for one in records))


def _run(case: str, words: Sequence[str], options: argparse.Namespace) -> str | None:
    """Measure a case in a process of its own; why it gave nothing, or None."""
    command = [sys.executable, str(Path(__file__).parent), *words, "--case", case, "--figures", str(options.figures)]
    try:
        code = subprocess.run(command, timeout=options.limit, check=False).returncode
    except subprocess.TimeoutExpired:
        return f"ended after --limit={options.limit} s"
    return None if code == 0 else f"ended by signal {-code}" if code < 0 else f"ended with {code}"


def _read(figures: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in figures.read_text("utf-8").splitlines()] if figures.is_file() else []


def _parse(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="gpu_check", description="Time a rollout and updates at full size.")
    parser.add_argument("--thin", action="store_true", help="two layers in place of Qwen3-VL's sizes")
    parser.add_argument("--only", nargs="+", choices=CASES, default=CASES, help="cases")
    parser.add_argument("--large", default="8B", help="model of the case with offload")
    parser.add_argument("--episodes", type=int, default=16, help="episodes of the rollout")
    parser.add_argument("--turns", type=int, default=4, help="responses of an episode")
    parser.add_argument("--tokens", type=int, default=128, help="tokens of a response")
    parser.add_argument("--updates", type=int, default=10, help="optimizer steps")
    parser.add_argument("--sequences", type=int, default=8, help="sequences of an optimizer step")
    parser.add_argument("--length", type=int, default=4096, help="tokens of a sequence")
    parser.add_argument("--batch-tokens", type=int, default=8192, help="padded tokens of a micro-batch")
    parser.add_argument("--limit", type=float, default=600, help="seconds of a case")
    parser.add_argument(
        "--peak-tflops", type=float, help="peak of the device in bfloat16, without sparsity, in 10^12/s"
    )
    parser.add_argument("--figures", type=Path, default=Path("gpu_check.jsonl"), help="file of the figures, kept")
    parser.add_argument("--output", type=Path, help="file for the page too")
    parser.add_argument("--case", choices=CASES, help=argparse.SUPPRESS)
    return parser.parse_args(words)


if __name__ == "__main__":
    raise SystemExit(main())
