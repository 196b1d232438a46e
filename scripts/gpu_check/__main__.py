"""One rollout and ten updates of Qwen3-VL-2B's architecture with random weights: tokens per second, model FLOP
utilisation, peak memory.

    python scripts/gpu_check                  on a GPU; writes docs/gpu.md
    python scripts/gpu_check --thin           two layers, for any machine; writes nothing without --output

Nothing is downloaded: weights are random, the tokenizer is the project's own, levels are generated. What is timed is
what a run of Sokoban does: the transformers engine on 384 by 384 boards, and the trainer's optimizer step.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(Path(__file__).resolve().parent), str(ROOT / "src")]


def main(words: Sequence[str] | None = None) -> int:
    """Measure and report; 0, or 1 where there is no GPU and none was done without."""
    import torch
    from measuring import Work, measure
    from model import SIZES, build_policy
    from page import describe

    options = _parse(words)
    if not torch.cuda.is_available() and not options.thin:
        print("No GPU here. --thin measures a thin model on this machine's CPU.", file=sys.stderr)  # noqa: T201
        return 1
    device = "cuda" if torch.cuda.is_available() else "cpu"
    name = "thin" if options.thin else "2B"
    work = Work(options.episodes, options.turns, options.tokens, options.updates, options.batch_tokens)
    policy = build_policy(SIZES[name], device, seed=0)
    page = describe(name, policy, work, measure(policy, work), peak=options.peak_tflops)
    print(page)  # noqa: T201
    output = options.output or (ROOT / "docs" / "gpu.md" if device == "cuda" and not options.thin else None)
    if output is not None:
        output.write_text(page + "\n", encoding="utf-8")
    return 0


def _parse(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="gpu_check", description="Time a rollout and updates at full size.")
    parser.add_argument("--thin", action="store_true", help="two layers in place of Qwen3-VL-2B's sizes")
    parser.add_argument("--episodes", type=int, default=16, help="episodes of the rollout")
    parser.add_argument("--turns", type=int, default=4, help="responses of an episode")
    parser.add_argument("--tokens", type=int, default=128, help="tokens of a response")
    parser.add_argument("--updates", type=int, default=10, help="optimizer steps")
    parser.add_argument("--batch-tokens", type=int, default=8192, help="padded tokens of a micro-batch")
    parser.add_argument(
        "--peak-tflops", type=float, help="peak of the device in bfloat16, without sparsity, in 10^12/s"
    )
    parser.add_argument("--output", type=Path, help="file for the page")
    return parser.parse_args(words)


if __name__ == "__main__":
    raise SystemExit(main())
