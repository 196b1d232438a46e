"""The GPU check proves itself on the CPU: a thin model plays, trains and is counted."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "scripts" / "gpu_check"
SMALL = ("--thin", "--episodes=4", "--turns=2", "--tokens=3", "--updates=2", "--peak-tflops=1")


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The script's modules can be imported."""
    monkeypatch.syspath_prepend(str(SCRIPT))


@pytest.mark.slow
def test_a_thin_model_on_the_cpu(tmp_path):
    before = (ROOT / "docs" / "gpu.md").read_text(encoding="utf-8")
    output = tmp_path / "gpu.md"
    process = subprocess.run(
        [sys.executable, str(SCRIPT), *SMALL, f"--output={output}"],
        check=False,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert process.returncode == 0, process.stderr[-2000:]
    page = output.read_text(encoding="utf-8")
    found = dict(line.strip("| ").split(" | ", 1) for line in page.splitlines() if line.startswith("| "))
    assert found["rollout"].startswith("4 episodes, 2 responses of 3 tokens")
    assert "24 of them trained" in found["an update"]
    assert found["model FLOP utilisation"].endswith("of 1.0·10¹² a second (dense bfloat16)")
    assert float(found["gradient norm of the last update"]) > 0
    assert "GB" in found["peak memory"]
    assert (ROOT / "docs" / "gpu.md").read_text(encoding="utf-8") == before


def test_without_a_gpu_nothing_is_done(parts):
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    process = subprocess.run([sys.executable, str(SCRIPT)], check=False, capture_output=True, text=True, timeout=300)
    assert process.returncode == 1
    assert "--thin" in process.stderr


def test_operations_are_those_that_torch_counts(parts):
    """Against torch's own counter, over the library's forward pass of one episode with an image."""
    import torch
    from model import SIZES, VOCABULARY, Load, build_policy, forward_flops
    from torch.utils.flop_counter import FlopCounterMode

    policy = build_policy(SIZES["thin"], "cpu", seed=0)
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
    expected = forward_flops(policy, Load([90], 90, [256]))
    # The patch embedding is left out here; attention over the causal half is counted whole there.
    assert counter.get_total_flops() == pytest.approx(expected, rel=0.03)


def test_peaks(parts):
    from page import peak_of, utilisation

    assert peak_of("NVIDIA H200") == 989.5
    assert peak_of("NVIDIA H100 PCIe") == 756.5
    assert peak_of("some device") is None
    assert "not stated" in utilisation(1.0, None)
    assert utilisation(100.0, 989.5).startswith("10.1%")
