"""Peak rates of one GPU and its links, as vendors publish them, and `custom` accelerators from a TOML file.

Dense rates without sparsity, per GPU, links in one direction. Two traps: a "GB200" or "GB300" has the clocks of the
NVL72 rack and runs about 10 % above the same chip in an 8-GPU server ("B200", "B300"); and a low-precision rate must
never be the denominator of a BF16 run's MFU (`peak_tflops` chooses).

Compared with its sources in November 2026: the vendors' data sheets of A100 80GB SXM, H100 SXM, H200, DGX B200, GB200
NVL72, DGX B300, GB300 NVL72, MI300X and MI355X; H800 from arXiv 2412.19437, 3.1 and DeepEP's README (160 of its 200
GB/s are seen). Usable memory of GB200 and GB300 is what the driver reports.

Imports neither torch nor torchtitan.
"""

import re
import tomllib
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Literal, get_args

Architecture = Literal["ampere", "hopper", "blackwell", "blackwell_ultra", "cdna3", "cdna4"]
Precision = Literal["bf16", "fp8_current", "fp8_block", "mxfp8", "nvfp4"]
MX: tuple[Architecture, ...] = ("blackwell", "blackwell_ultra", "cdna4")
"""Whose tensor cores take a scale for 32 numbers along the contraction"""
PRECISIONS: tuple[Precision, ...] = ("bf16", "fp8_current", "fp8_block", "mxfp8", "nvfp4")


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """One GPU with its links. Rates in dense TFLOPS; memory in GB (1e9 bytes); bandwidths per GPU and direction."""

    name: str
    architecture: Architecture
    """Whose kernel efficiencies hold for it (kernels.py)"""
    bf16_tflops: float
    fp8_tflops: float = 0.0
    """Also MXFP8, where the architecture has it; 0: not supported"""
    fp4_tflops: float = 0.0
    """0: not supported"""
    hbm_gb: float
    hbm_tb_s: float
    nvlink_gb_s: float
    nvlink_domain: int
    """GPUs that reach each other over NVLink (or its equivalent)"""
    nic_gb_s: float
    sms: int = 132
    """Streaming multiprocessors, of which overlapped communication takes some"""
    host_gb_s: float = 50.0
    """Copies between GPU and host memory: PCIe 5 x16, or NVLink-C2C of Grace"""
    sustained: float = 1.0
    """GEMM speed under full load over that of other GPUs with the same peak. Full load is bound by power, and clocks
    follow its cube root: B300 has 1.1 times B200's, GB300 1.4 / 1.2 kW = 1.17 times GB200's"""

    @property
    def precisions(self) -> list[Precision]:
        """Those that it has a rate of."""
        rates = {"bf16": self.bf16_tflops, "nvfp4": self.fp4_tflops}
        rates["mxfp8"] = self.fp8_tflops if self.architecture in MX else 0.0
        return [precision for precision in PRECISIONS if rates.get(precision, self.fp8_tflops)]

    def peak_tflops(self, precision: Precision) -> float:
        """The dense peak that MFU in this precision is a share of."""
        if precision not in self.precisions:
            raise ValueError(f"hardware {self.name}: has no {precision} rate; it has {', '.join(self.precisions)}")
        return {"bf16": self.bf16_tflops, "nvfp4": self.fp4_tflops}.get(precision, self.fp8_tflops)


def _table(*rows: tuple) -> dict[str, Hardware]:
    columns = [field.name for field in fields(Hardware)]
    return {row[0]: Hardware(**dict(zip(columns, row, strict=True))) for row in rows}


HARDWARE = _table(
    # name     architecture       BF16   FP8   FP4    HBM GB  TB/s NVLink domain NIC  SMs  host GB/s, sustained
    ("A100", "ampere", 312, 0, 0, 80, 2.0, 300, 8, 25, 108, 25, 1.0),
    ("H100", "hopper", 989, 1979, 0, 80, 3.35, 450, 8, 50, 132, 50, 1.0),
    ("H200", "hopper", 989, 1979, 0, 141, 4.8, 450, 8, 50, 132, 50, 1.0),
    ("H800", "hopper", 989, 1979, 0, 80, 3.35, 200, 8, 50, 132, 50, 1.0),
    ("B200", "blackwell", 2250, 4500, 9000, 180, 8, 900, 8, 50, 148, 50, 1.0),
    ("GB200", "blackwell", 2500, 5000, 10000, 184, 8, 900, 72, 50, 148, 200, 1.0),
    ("B300", "blackwell_ultra", 2250, 4500, 13500, 270, 8, 900, 8, 100, 148, 50, 1.03),
    ("GB300", "blackwell_ultra", 2500, 5000, 15000, 276, 8, 900, 72, 100, 148, 200, 1.05),
    ("MI300X", "cdna3", 1307, 2615, 0, 192, 5.3, 448, 8, 50, 304, 50, 1.0),
    ("MI355X", "cdna4", 2500, 5000, 10000, 288, 8, 537, 8, 50, 256, 50, 1.0),
)

PROPERTIES = (
    "name, architecture (whose kernels it resembles: ampere, hopper, blackwell, blackwell_ultra, cdna3, cdna4), "
    "bf16_tflops, fp8_tflops, hbm_gb, hbm_tb_s, nvlink_gb_s, nvlink_domain, nic_gb_s"
)
REMEDY = f"or give the path of a TOML file that describes another one: {PROPERTIES}"


def resolve(name: str) -> Hardware:
    """The accelerator called `name`, or described by the TOML file at that path. Raises ValueError for neither."""
    if name.endswith(".toml"):
        return _from_file(Path(name))
    lower = {known.lower(): hardware for known, hardware in HARDWARE.items()}
    found = next((lower[word] for word in name.lower().split() if word in lower), None)  # also "GB200 NVL72"
    if found is None:
        raise ValueError(f'hardware "{name}": is not known; choose one of {", ".join(HARDWARE)}, {REMEDY}')
    return found


def of_device(device_name: str) -> Hardware | None:
    """The accelerator that a driver calls so, such as "NVIDIA H100 80GB HBM3"; None for one that is not in the table,
    also for slower variants of one that is."""
    if re.search(r"\b(PCIe|NVL)\b", device_name):
        return None
    return next((known for name, known in HARDWARE.items() if re.search(rf"\b{name}\b", device_name)), None)


def _from_file(path: Path) -> Hardware:
    try:
        table = tomllib.loads(path.read_text())
    except OSError as error:
        raise ValueError(f'hardware "{path}": {error.strerror or error}; {REMEDY}') from error
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f'hardware "{path}": {error}') from error
    kinds = {field.name: field for field in fields(Hardware)}
    problems = [f"{key}: is not a property" for key in table if key not in kinds]
    problems += [f"{name}: is missing" for name, kind in kinds.items() if kind.default is MISSING and name not in table]
    for key, value in table.items():
        if key not in kinds or key in ("name", "architecture"):
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
            problems.append(f"{key} = {value!r}: must be a number, at least 0")
        elif value == 0 and not key.startswith("fp"):
            problems.append(f"{key} = 0: must be greater than 0")
    architectures = get_args(Architecture)
    if "architecture" in table and table["architecture"] not in architectures:
        problems.append(f"architecture = {table['architecture']!r}: choose one of {', '.join(architectures)}")
    if problems:
        raise ValueError(f'hardware "{path}": {"; ".join(problems)}. It is a TOML file with: {PROPERTIES}')
    return Hardware(**table)
