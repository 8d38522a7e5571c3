"""Peaks by device name, MFU and durations."""

import pytest

from megatron_zpp.metrics.lines import format_duration
from megatron_zpp.metrics.throughput import describe_mfu, mfu, peak_tflops

PEAKS = """
312 NVIDIA A100-SXM4-80GB
312 NVIDIA A100 80GB PCIe
989 NVIDIA H100 80GB HBM3
756 NVIDIA H100 PCIe
835 NVIDIA H100 NVL
989 NVIDIA H200
989 NVIDIA GH200 480GB
2250 NVIDIA B200
125 Tesla V100-SXM2-16GB
112 Tesla V100-PCIE-32GB
362 NVIDIA L40S
121 NVIDIA L4
165.2 NVIDIA GeForce RTX 4090
"""
NO_PEAK = ("NVIDIA H200 MIG 1g.18gb", "NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA GeForce GTX 1080", "cpu")


def test_peak_by_device_name() -> None:
    known = [line.split(maxsplit=1) for line in PEAKS.split("\n") if line]
    assert [(peak_tflops(name), name) for _, name in known] == [(float(peak), name) for peak, name in known]
    assert [peak_tflops(name) for name in NO_PEAK] == 4 * [None]


def test_mfu_is_the_share_of_the_peak() -> None:
    # 10,000 tokens/s at 6e9 FLOPs are 60 TFLOP/s.
    assert mfu(10_000, 6e9, peak=240.0) == pytest.approx(0.25)
    assert mfu(10_000, 6e9, peak=None) is None


def test_convention_names_peak_or_remedy() -> None:
    assert "312 TFLOP/s per device (NVIDIA A100" in describe_mfu("NVIDIA A100", 312.0)
    assert "(--peak-tflops)" in describe_mfu("cpu", 1.0, given=True)
    assert "give --peak-tflops" in describe_mfu("cpu", None)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0:00:00"), (59.6, "0:01:00"), (3723, "1:02:03"), (86399, "23:59:59"), (180123, "2d 02:02:03")],
)
def test_durations(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text
