"""Named records of the software a run had: which kernels are fused, how fast the host launches, how EP is tuned.

Releases of published runs are Megatron-Bridge's (year.month); "titan" is this trainer. A release that is not listed is
taken for the nearest by date.
"""

import re
from dataclasses import dataclass

REFERENCE = (2026, 4)
"""Release whose microseconds per launch `host_us` is; `host_drift` is by how much a month earlier was slower"""


@dataclass(frozen=True, kw_only=True)
class Software:
    """One software stack. What is a switch of a run rather than of a release (graphs, fused MLP) is in the Job."""

    name: str
    year: int
    month: int
    fused_permute: bool = True
    """Permute and unpermute are one kernel each, not an index, a gather and a scatter"""
    fused_router: bool = True
    quantize_in_norm: bool = False
    """Norms write the quantized input of the next GEMM"""
    fused_swizzle: bool = True
    """Scales are laid out for the GEMM as they are made, not by a kernel per expert"""
    grouped_launch: bool = False
    """Experts' GEMMs are one launch each, not one per expert"""
    bound_cpus: bool = True
    """Processes are pinned to the cores next to their GPU"""
    launch_overlap: bool = True
    """Long launch sequences are issued ahead, beside the GPU's work"""
    ep_tuning: float = 1.0
    """Share of the tabulated bandwidth that the transport was tuned to"""
    fp8_dispatch: bool = False
    reduce_overlap: bool = True
    """Data-parallel reductions run beside backward"""
    graphs_cover_shared: bool = True
    """Router graphs hold the shared expert too"""
    recompute: frozenset[str] = frozenset()
    """What backward always recomputes"""

    @property
    def months_before(self) -> int:
        """Months from this release to the reference; negative: later."""
        return (REFERENCE[0] - self.year) * 12 + REFERENCE[1] - self.month


RELEASES = {
    software.name: software
    for software in (
        Software(name="core r0.9", year=2024, month=10, fused_permute=False, fused_router=False, fused_swizzle=False),
        # arXiv 2412.19437, 3.2.3: all norms and MLA up-projections are recomputed.
        Software(
            name="DeepSeek 2024-12",
            year=2024,
            month=12,
            fp8_dispatch=True,
            grouped_launch=True,
            recompute=frozenset({"norms", "mla_up_proj"}),
        ),
        Software(name="25.09", year=2025, month=9, fused_router=False, reduce_overlap=False),
        Software(name="25.11", year=2025, month=11),
        Software(name="26.02", year=2026, month=2),
        Software(name="26.04", year=2026, month=4, quantize_in_norm=True),
        Software(name="26.06", year=2026, month=6, quantize_in_norm=True),
        Software(name="titan", year=2026, month=4, grouped_launch=True),
    )
}


def of_release(release: str) -> tuple[Software, str]:
    """(software, what was assumed): the record of `release`, or the one nearest by date."""
    plain = release.strip()
    for name, software in RELEASES.items():
        if plain == name or re.fullmatch(rf"{re.escape(name)}\.\d+", plain):
            return software, ""
    date = re.search(r"(?:20)?(\d\d)[.-](\d\d)", plain)
    if date is None:
        return RELEASES["26.04"], f"release {release!r} is not known: taken for 26.04"
    months = (2000 + int(date[1])) * 12 + int(date[2])
    nearest = min(RELEASES.values(), key=lambda s: (abs(s.year * 12 + s.month - months), s.name == "titan"))
    return nearest, f"release {release!r} is not known: taken for {nearest.name}"
