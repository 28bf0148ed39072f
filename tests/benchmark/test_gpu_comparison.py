"""The table of `comparisons.gpu`, with figures that need no GPU."""

import types
from pathlib import Path

import pytest

from comparisons import gpu

H100 = "NVIDIA H100 80GB HBM3"
L16_FLOPS = 123e9  # of a forward pass


class Process:
    """A contender that takes 0.2 s for a step, if the batch is at most 64."""

    def __init__(self, batch: int):
        self.batch = batch
        self.job = types.SimpleNamespace(kill=lambda: None, wait=lambda: None)
        self.log = types.SimpleNamespace(close=lambda: None)

    @property
    def ready(self) -> dict:
        if self.batch > 64:
            raise gpu.Ended("Traceback\njax.errors.JaxRuntimeError: RESOURCE_EXHAUSTED: 90 GiB")
        return dict(flops=L16_FLOPS, device=H100, device_mib=7000.0)

    def run(self, what: str, count: int) -> dict:
        return dict(wall=0.2, cpu=0.1, peak_mib=1.0)


def row(name: str, contender: str = "vit_jax", batch: int = 64) -> gpu.Row:
    found = types.SimpleNamespace(name=contender, start=lambda _, batch, cache: Process(batch))
    return gpu.Row("L/16", batch, name, found)


def test_a_batch_is_halved_until_it_fits():
    found = row("einsum", batch=256)
    gpu.measure(found, 10, "")
    assert (found.batch, found.problem, len(found.runs)) == (64, "", 1)
    assert found.images_per_sec == pytest.approx(64 / 0.2)


def test_the_table_has_mfu_memory_and_ratios_and_says_what_is_missing():
    ours, peer, late = row("einsum"), row(gpu.BIG_VISION, "big_vision"), row("cudnn")
    for found in (ours, peer):
        gpu.measure(found, 10, "")
    peer.runs[0]["wall"] = 0.4
    late.problem = "not in time"
    text = gpu.table([ours, peer, late])
    share = 3 * L16_FLOPS * 320 / 989e12  # the data sheet's peak without sparsity
    assert f"| einsum | 64 | 320 | {share:.1%} | 7,000 | 1 |" in text
    assert f"| big_vision | 64 | 160 | {share / 2:.1%} |" in text
    assert "| cudnn | 64 | not in time |" in text
    assert "Against big_vision: 2.00; target 1.5" in text
    assert f"MFU: {share:.1%}; target 45%" in text


def test_rows_and_the_report_leave_out_peers_that_are_not_named(tmp_path: Path):
    args = types.SimpleNamespace(cases="L/16:8", big_vision=None, timm="python", out="")
    names = [found.name for found in gpu.rows(args)]
    assert names[:3] == ["einsum", "cudnn", gpu.COMPILED] and gpu.BIG_VISION not in names
    args.out = str(tmp_path / "gpu.md")
    gpu.write(gpu.rows(args), args)
    text = (tmp_path / "gpu.md").read_text()
    assert "big_vision is left out; to add it: git clone " in text and "timm is left" not in text
    assert (tmp_path / "gpu.json").exists()


@pytest.mark.parametrize(
    ("text", "expired", "problem"),
    [
        ("x\ntorch.OutOfMemoryError: CUDA out of memory. Tried", False, "out of memory"),
        ("x\nValueError: a | b\nsee above", False, "ValueError: a / b"),
        ("no more", True, "not in time"),
    ],
)
def test_why_a_process_ended(text, expired, problem):
    assert gpu.problem_of(gpu.Ended(text), expired) == problem
