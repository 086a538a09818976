"""Hardware: what a roofline needs to know of a device; presets, each with the public page that its figures are from.

Peaks are those of dense 16-bit and 8-bit matrix products, without sparsity. ``note`` tells what the page does not
state and how the figure follows from what it does. Power is the vendor's limit (TDP, board power): an upper bound of
what a device draws. Prices are none of it: vendors state none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from outpace.core.errors import BadInput
from outpace.core.names import normalised, unknown

MEASURED = "measured"
"""The name of this machine, whose costs are those of outpace's own cost tables."""


@dataclass(frozen=True, slots=True)
class Hardware:
    """One device. ``peak``: 16-bit operations per second, ``peak8``: 8-bit ones; ``bandwidth`` and ``memory`` of its
    main memory in bytes (per second); ``link``: bytes per second that it sends to a neighbor; ``link_seconds``: what
    each message takes before its first byte; ``watts``: None where its vendor names no limit."""

    name: str
    kind: Literal["gpu", "cpu", "phone"]
    peak: float
    peak8: float
    bandwidth: float
    memory: float
    link: float
    watts: float | None
    source: str
    note: str = ""
    link_seconds: float = 5e-6

    def peak_at(self, bits: int) -> float:
        """Operations per second with weights of ``bits``: those of 4 bits are multiplied in 16 bits, and half as many
        of 32 bits are assumed as of 16."""
        return {8: self.peak8, 32: self.peak / 2}.get(bits, self.peak)

    def public(self) -> dict[str, object]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


T, G = 1e12, 1e9
_NVIDIA = "https://www.nvidia.com/en-us/data-center"

_PRESETS = (
    Hardware(
        "a100", "gpu", 312 * T, 624 * T, 2039 * G, 80 * G, 300 * G, 400.0, f"{_NVIDIA}/a100/",
        "A100 80 GB SXM; NVLink 600 GB/s both ways together",
    ),
    Hardware(
        "h100", "gpu", 989 * T, 1979 * T, 3350 * G, 80 * G, 450 * G, 700.0, f"{_NVIDIA}/h100/",
        "H100 SXM; the page states peaks with sparsity, here half of them; NVLink 900 GB/s both ways together",
    ),
    Hardware(
        "h200", "gpu", 989 * T, 1979 * T, 4800 * G, 141 * G, 450 * G, 700.0, f"{_NVIDIA}/h200/",
        "H200 SXM; the page states peaks with sparsity, here half of them; NVLink 900 GB/s both ways together",
    ),
    Hardware(
        "b200", "gpu", 2250 * T, 4500 * T, 8000 * G, 180 * G, 900 * G, 1000.0, f"{_NVIDIA}/dgx-b200/",
        "an eighth of a DGX B200, which states 64 TB/s, 1,440 GB and 72 PFLOPS FP8 with sparsity; power of one GPU "
        "from the Blackwell data sheet",
    ),
    Hardware(
        "l4", "gpu", 121 * T, 242.5 * T, 300 * G, 24 * G, 32 * G, 72.0, f"{_NVIDIA}/l4/",
        "the page states peaks with sparsity, here half of them; PCIe Gen4 x16",
    ),
    Hardware(
        "l40s", "gpu", 362 * T, 733 * T, 864 * G, 48 * G, 32 * G, 350.0, f"{_NVIDIA}/l40s/", "PCIe Gen4 x16"
    ),
    Hardware(
        "t4", "gpu", 65 * T, 130 * T, 320 * G, 16 * G, 16 * G, 70.0, f"{_NVIDIA}/tesla-t4/", "PCIe Gen3 x16"
    ),
    Hardware(
        "rtx-4090", "gpu", 165.2 * T, 660.6 * T, 1008 * G, 24 * G, 32 * G, 450.0,
        "https://images.nvidia.com/aem-dam/Solutions/geforce/ada/nvidia-ada-gpu-architecture.pdf",
        "16 bits with sums in 32 bits; PCIe Gen4 x16",
    ),
    Hardware(
        "mi300x", "gpu", 1307.4 * T, 2614.9 * T, 5300 * G, 192 * G, 448 * G, 750.0,
        "https://www.amd.com/en/products/accelerators/instinct/mi300/mi300x.html",
        "seven Infinity Fabric links, 896 GB/s both ways together",
    ),
    Hardware(
        "xeon-8480", "cpu", 114.7 * T, 229.4 * T, 307.2 * G, 512 * G, 48 * G, 350.0,
        "https://www.intel.com/content/www/us/en/products/sku/231746/specifications.html",
        "Xeon Platinum 8480+: 56 cores at 2.0 GHz, 8 channels of DDR5-4800; peak of AMX, 1,024 16-bit operations a "
        "cycle and core, at the base clock; memory as it is commonly fitted; one UPI link of 24 lanes each way at "
        "16 GT/s; the page does not state the lanes",
    ),
    Hardware(
        "epyc-9654", "cpu", 14.7 * T, 29.5 * T, 460.8 * G, 768 * G, 64 * G, 360.0,
        "https://www.amd.com/en/products/processors/server/epyc/4th-generation-9004-and-8004-series/amd-epyc-9654.html",
        "96 cores at 2.4 GHz, 12 channels of DDR5-4800; peak of AVX-512 BF16, 64 operations a cycle and core, at the "
        "base clock; memory as it is commonly fitted; one Infinity Fabric link to the other socket, 16 lanes each way "
        "at 32 Gbit/s, which the page does not state",
    ),
    Hardware(
        "apple-m1-max", "cpu", 10.4 * T, 10.4 * T, 400 * G, 64 * G, 5 * G, None,
        "https://www.apple.com/newsroom/2021/10/"
        "introducing-m1-pro-and-m1-max-the-most-powerful-chips-apple-has-ever-built/",
        "its GPU, in 32 bits, for all formats; Thunderbolt 4 to a neighbor",
    ),
    Hardware(
        "apple-m1-ultra", "cpu", 21 * T, 21 * T, 800 * G, 128 * G, 5 * G, None,
        "https://www.apple.com/newsroom/2022/03/"
        "apple-unveils-m1-ultra-the-worlds-most-powerful-chip-for-a-personal-computer/",
        "its GPU, in 32 bits, for all formats; Thunderbolt 4 to a neighbor",
    ),
    Hardware(
        "raspberry-pi-5", "cpu", 0.307 * T, 0.614 * T, 17.1 * G, 8 * G, 0.125 * G, 12.0,
        "https://www.raspberrypi.com/products/raspberry-pi-5/",
        "4 Cortex-A76 at 2.4 GHz, two 128-bit units each (32 16-bit operations a cycle), LPDDR4X-4267 of 32 bits; "
        "gigabit Ethernet; watts under load are an assumption",
    ),
    Hardware(
        "snapdragon-x-elite", "cpu", 4.6 * T, 45 * T, 135 * G, 64 * G, 5 * G, None,
        "https://www.qualcomm.com/products/mobile/snapdragon/laptops-and-tablets/snapdragon-x-elite",
        "8 bits on its NPU (45 TOPS); 16 bits on its GPU (4.6 TFLOPS, in 32 bits)",
    ),
    Hardware(
        "snapdragon-8-gen-3", "phone", 17 * T, 34 * T, 76.8 * G, 12 * G, 0.0375 * G, 5.0,
        "https://www.qualcomm.com/products/mobile/snapdragon/smartphones/snapdragon-8-series-mobile-platforms/"
        "snapdragon-8-gen-3-mobile-platform",
        "LPDDR5X at 4,800 MHz on 64 bits; its vendor states no peak of the NPU: 34 8-bit TOPS and half of it in 16 "
        "bits are assumptions, and so are 5 W; to a neighbor 300 Mbit/s",
    ),
    Hardware(
        "apple-a17-pro", "phone", 17.5 * T, 35 * T, 51.2 * G, 8 * G, 0.0375 * G, 5.0,
        "https://www.apple.com/newsroom/2023/09/apple-unveils-iphone-15-pro-and-iphone-15-pro-max/",
        "35 TOPS of its Neural Engine, here of 8 bits, and half of it in 16 bits; memory bandwidth (LPDDR5-6400 on 64 "
        "bits) and 5 W are assumptions; to a neighbor 300 Mbit/s",
    ),
)  # fmt: skip
PRESETS: Mapping[str, Hardware] = {one.name: one for one in _PRESETS}


def find_hardware(name: str, *, measurable: bool = False) -> Hardware:
    """A preset. Raises BadInput for an unknown name, with all presets. ``measurable``: whether the caller takes this
    machine too, as :data:`MEASURED`."""
    for one in _PRESETS:
        if normalised(one.name) == normalised(name):
            return one
    hint = str(unknown("hardware", name, list(PRESETS)))
    if "did you mean" in hint:
        hint += f" (presets: {', '.join(PRESETS)})"
    raise BadInput(f"{hint}; or '{MEASURED}' for this machine" if measurable else hint)
