"""A rollout and ten updates at full size with random weights: tokens per second, model FLOP utilisation, and measured
against planned memory.

    python scripts/gpu_check                  on a GPU
    python scripts/gpu_check --thin           two layers, for any machine

Qwen3-VL-2B trains on sequences of 4,096 tokens with checkpointing on and off, and by Megatron-Core; Qwen3-VL-8B with
offload. Nothing is downloaded: weights are random, the tokenizer is the project's own, levels are generated. The
rollout is one of Sokoban on 384 by 384 boards by the transformers engine; an update is the trainer's optimizer step.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from measuring import Played, Work
    from page import Row

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(Path(__file__).resolve().parent), str(ROOT / "src"), str(ROOT)]


def main(words: Sequence[str] | None = None) -> int:
    """Measure and report; 0, or 1 where there is no GPU and none was done without."""
    import torch
    from measuring import Work
    from page import describe

    options = _parse(words)
    if not torch.cuda.is_available() and not options.thin:
        print("No GPU here. --thin measures a thin model on this machine's CPU.", file=sys.stderr)  # noqa: T201
        return 1
    device = "cuda" if torch.cuda.is_available() else "cpu"
    work = Work(
        options.episodes, options.turns, options.tokens, options.updates, options.sequences, options.length,
        options.batch_tokens,
    )  # fmt: skip
    named = torch.cuda.get_device_name() if device == "cuda" else f"CPU, {torch.get_num_threads()} threads of torch"
    page = describe(str(named), work, *_measure(device, work, thin=options.thin), peak=options.peak_tflops)
    print(page)  # noqa: T201
    if options.output is not None:
        options.output.write_text(page + "\n", encoding="utf-8")
    return 0


def _measure(device: str, work: Work, *, thin: bool) -> tuple[Played, list[Row]]:
    """The rollout of the first case's model, and the updates of each case that has room on the device."""
    import torch
    from measuring import Case, plan, play, train
    from model import THIN, build_policy
    from page import Row

    small, large = (THIN, THIN) if thin else ("2B", "8B")
    cases = [Case(small, gradient_checkpointing=True), Case(small, gradient_checkpointing=False)]
    cases.append(Case(small, gradient_checkpointing=True, backend="megatron"))  # one rank, beside the first case
    cases.append(Case(large, gradient_checkpointing=True, offload=True))
    policy, name, played, rows = None, None, None, []
    for case in cases:
        if case.name != name:
            policy = None  # two models at once would not fit
            policy, name = build_policy(case.name, device, seed=0), case.name
        assert policy is not None
        played = played or play(policy, work)
        planned = plan(policy, case, work).total
        room = torch.cuda.get_device_properties(0).total_memory if device == "cuda" else None
        figures = train(policy, case, work) if room is None or planned <= room else None
        parameters = sum(parameter.numel() for parameter in policy.model.parameters())
        rows.append(Row(case, parameters, planned, figures))
    assert played is not None
    return played, rows


def _parse(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="gpu_check", description="Time a rollout and updates at full size.")
    parser.add_argument("--thin", action="store_true", help="two layers in place of Qwen3-VL's sizes")
    parser.add_argument("--episodes", type=int, default=16, help="episodes of the rollout")
    parser.add_argument("--turns", type=int, default=4, help="responses of an episode")
    parser.add_argument("--tokens", type=int, default=128, help="tokens of a response")
    parser.add_argument("--updates", type=int, default=10, help="optimizer steps")
    parser.add_argument("--sequences", type=int, default=8, help="sequences of an optimizer step")
    parser.add_argument("--length", type=int, default=4096, help="tokens of a sequence")
    parser.add_argument("--batch-tokens", type=int, default=8192, help="padded tokens of a micro-batch")
    parser.add_argument(
        "--peak-tflops", type=float, help="peak of the device in bfloat16, without sparsity, in 10^12/s"
    )
    parser.add_argument("--output", type=Path, help="file for the page too")
    return parser.parse_args(words)


if __name__ == "__main__":
    raise SystemExit(main())
