"""The GPU check proves itself on the CPU: a thin model plays, trains, and is counted and planned, case by case."""

from __future__ import annotations

import os

import pytest
import torch

from forked import ForkedCommand
from geo_sokoban_pipeline.preflight.estimate import Load, forward_flops
from runs import ROOT, finish

SCRIPT = ROOT / "scripts" / "gpu_check"
SMALL = (
    "--thin", "--episodes=2", "--turns=2", "--tokens=3", "--updates=2", "--sequences=3", "--length=180",
    "--batch-tokens=370", "--peak-tflops=1",
)  # fmt: skip


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The script's modules can be imported."""
    monkeypatch.syspath_prepend(str(SCRIPT))  # beside the root, which pytest has on the path


def run(expected: int, *words: str) -> str:
    """Output of `python scripts/gpu_check`."""
    environment = {**os.environ, "PYTHONPATH": str(SCRIPT.parent)}
    return finish(ForkedCommand([SCRIPT.name, *words], ROOT, environment), expected)


@pytest.mark.slow
def test_a_thin_model_on_the_cpu(tmp_path):
    output, figures = tmp_path / "gpu.md", tmp_path / "figures.jsonl"
    assert torch.cuda.is_available() or "--thin" in run(1)  # without a GPU nothing is done
    files = (f"--figures={figures}", f"--output={output}")
    run(0, *SMALL, *files, "--only", "checkpointing", "megatron")
    # A case that is killed is a line too, and costs those before it nothing.
    run(1, *SMALL, *files, "--limit=1", "--only", "offload")
    run(1, *SMALL, *files, "--only", "rollout")  # 1: the page still has a case that failed
    page = output.read_text(encoding="utf-8")
    found = dict(
        line.strip("| ").split(" | ", 1) for line in page.splitlines() if line.startswith("| ") and line[2] != "|"
    )
    assert "2 episodes, 2 responses of 3 tokens" in found["rollout"]
    assert found["an update"].startswith("3 sequences of 180 tokens")
    rows = {what: [cell.strip() for cell in cells.split(" | ")] for what, cells in found.items()}
    assert rows["checkpointing"][:2] == ["on", "on"] and rows["offload"][:2] == ["off", "off"]
    assert rows["backend"] == ["fsdp", "megatron", "fsdp"]
    assert rows["seconds of an update"][2] == "ended after --limit=1.0 s"
    gaps = [float(gap) for gap in rows["log-probs' mean gap to products in float32"][:2]]
    assert 0 < gaps[1] <= 1.5 * gaps[0], "Megatron rounds as the other backend does"
    assert all(cell.endswith("of 1.0·10¹² a second (dense bfloat16)") for cell in rows["model FLOP utilisation"][:2])
    norms = [float(norm) for norm in rows["last gradient norm"][:2]]
    assert all(norm > 0 for norm in norms)
    assert all(float(rate.replace(",", "")) > 0 for rate in rows["tokens per second"][:2])
    for what in ("peak memory, planned", "peak memory, measured", "memory of the host"):
        assert all(float(size.removesuffix(" GB")) > 0 for size in rows[what][:2])
    assert all("attention" in cell for cell in rows["attention"][:2])
    assert "attention" in found["rollout"]


def test_operations_are_those_that_torch_counts(parts):
    """Against torch's own counter, over the library's forward pass of one episode with an image."""
    from model import THIN, VOCABULARY, build_policy
    from torch.utils.flop_counter import FlopCounterMode

    policy = build_policy(THIN, "cpu", seed=0)
    policy.compute = None
    ids = torch.zeros(1, 90, dtype=torch.long)
    ids[0, 10:74] = policy.codec.image_pad_id
    pixels = torch.zeros(256, 3 * 2 * 16 * 16)
    grid = torch.tensor([[1, 16, 16]])
    kinds = torch.zeros(1, 90, dtype=torch.int)
    kinds[0, 10:74] = 1
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        policy.model(
            input_ids=ids, attention_mask=torch.ones_like(ids), pixel_values=pixels, image_grid_thw=grid,
            mm_token_type_ids=kinds,
        )  # fmt: skip
    assert policy.model.config.text_config.vocab_size == VOCABULARY
    expected = forward_flops(policy.model.config, Load([(90, 0)], 90, 256, 1))
    # The patch embedding is left out here; attention over the causal half is counted whole there.
    assert counter.get_total_flops() == pytest.approx(expected, rel=0.03)


def test_peaks(parts):
    from page import peak_of, utilisation

    assert peak_of("NVIDIA H200") == 989.5
    assert peak_of("NVIDIA H100 PCIe") == 756.5
    assert peak_of("some device") is None
    assert "not stated" in utilisation(1.0, None)
    assert utilisation(100.0, 989.5).startswith("10.1%")


def test_a_case_without_room_is_not_run_and_says_so(parts):
    from measuring import Case, Figures, Played, Work, refuse_too_large
    from page import Row, describe

    work = Work(4, 2, 3, 2, 3, 240, 500)
    ran = Figures([2.0, 1.0, 1.0], 720, 360, 3, 1e12, 0.5, 5_000_000_000)
    with pytest.raises(MemoryError, match=r"not run: planned 1000000.0 GB of host memory") as caught:
        refuse_too_large("cpu", 1, 10**15)
    large = Row(Case("8B", True, True), 20, 90_000_000_000, None, str(caught.value))
    cases = [Row(Case("2B", True), 10, 4_000_000_000, ran), large]
    lines = describe("NVIDIA H100", work, Played(1.0, 24), cases).splitlines()
    assert f"| seconds of an update | 1.000 (first 2.000) | {caught.value} |" in lines
    assert "| peak memory, measured | 5.00 GB | – |" in lines
    assert "| peak memory, planned | 4.00 GB | 90.00 GB |" in lines
    assert "| tokens per second | 720 | – |" in lines


def test_the_2b_is_the_published_architecture(parts):
    from model import build_policy

    policy = build_policy("2B", "meta", seed=0)
    assert sum(parameter.numel() for parameter in policy.model.parameters()) == 2_127_532_032
    assert policy.model.config.image_token_id == policy.codec.image_pad_id
    assert policy.model.dtype == torch.float32
