"""What of Transformer Engine (TE) this process has to do with: versions and libraries, found without using any of it.

TE is never required. This file, the te_*.py beside it and precision/te_linear.py are the only ones that import it, and
only inside functions, so that the package imports on any machine. `facts` looks once; the backends judge what it found,
as pure functions of `Facts`, so that every refusal can be tried on a machine that has nothing.

TE's own checks are not enough: `is_nccl_ep_available()` asks for NCCL 2.30.4, while the library in TE's wheel refuses
any NCCL older than the 2.32.3 that it was built with, at the first collective; and it compiles its kernels with nvcc
when a run starts, which no check looks for.
"""

import ctypes
import functools
import importlib.util
import os
import shutil
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import torch

PINNED = "2.20.2"  # of TE: what the calls here are written, and tested, against
NCCL_EP_BUILD = (2, 32, 3)  # the NCCL that the pinned wheel's libnccl_ep.so was built with


@dataclass(frozen=True)
class Facts:
    """What is installed and what the device can do; None means absent."""

    version: str | None = None  # of transformer_engine
    extension: str | None = None  # why transformer_engine.pytorch cannot be imported, or "" when it can
    capability: tuple[int, int] | None = None  # of the CUDA device
    cublaslt: int | None = None  # of the runtime, as in 130400 for 13.4.0
    nccl: tuple[int, int, int] | None = None  # of the runtime
    nccl_ep: bool = False  # libnccl_ep.so is there
    nvcc: str | None = None  # the compiler that NCCL EP will call
    nccl_headers: str | None = None  # the folder with nccl.h that it will compile against
    cudnn_frontend: str | None = None  # version of nvidia-cudnn-frontend


@functools.cache
def facts() -> Facts:
    """Look once. Importing TE takes seconds, so nobody asks who does not want TE."""
    version = _version("transformer-engine")
    if version is None:
        return Facts()
    capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
    try:
        import transformer_engine.pytorch  # noqa: F401 - it loads the extension, and the library this is linked to
        import transformer_engine_torch as tex
    # TE asserts that its packages have one version, raises RuntimeError for an old cuDNN and OSError for a CUDA library
    # that is not there.
    except (ImportError, OSError, AssertionError, RuntimeError) as error:
        return Facts(version, f"{type(error).__name__}: {error}", capability)
    return Facts(
        version,
        "",
        capability,
        tex.get_cublasLt_version(),
        _nccl_version(),
        _has_nccl_ep(),
        _nvcc(),
        _nccl_headers(),
        _version("nvidia-cudnn-frontend"),
    )


def problem(found: Facts) -> str | None:
    """Why no backend of TE can run here, or None."""
    if found.version is None:
        return f"Transformer Engine is not installed; install transformer-engine[core-cu13,pytorch]=={PINNED}"
    if release(found.version) < release(PINNED):
        return f"Transformer Engine {found.version} is too old; install {PINNED}"
    if found.extension:
        return (
            f"transformer_engine {found.version} is there, but not its torch extension ({found.extension}); build it: "
            f"pip install --no-build-isolation transformer-engine-torch=={PINNED}"
        )
    if found.capability is None:
        return "Transformer Engine needs a CUDA device, and torch sees none"
    return None


def release(version: str) -> tuple[int, ...]:
    """(2, 20, 2) of "2.20.2+cu13"."""
    return tuple(int(part) for part in version.split("+")[0].split(".")[:3] if part.isdigit())


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _nccl_version() -> tuple[int, int, int] | None:
    """Of the library that this process has loaded (torch loads it), not of the one torch was built with."""
    number = ctypes.c_int(0)
    try:
        if ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(number)) != 0:
            return None
    except (OSError, AttributeError):
        return None
    return number.value // 10000, number.value // 100 % 100, number.value % 100


def _has_nccl_ep() -> bool:
    import transformer_engine

    return transformer_engine._nccl_ep_library_installed()


def _nvcc() -> str | None:
    """Where NCCL EP looks for its compiler, in its order, and at last where pip puts it, where NCCL EP does not look:
    it must be told."""
    home = os.environ.get("CUDA_HOME")
    for path in (
        os.environ.get("NCCL_EP_JIT_NVCC"),
        os.environ.get("NVCC"),
        f"{home}/bin/nvcc" if home else None,
        shutil.which("nvcc"),
        *(f"{folder}/cu13/bin/nvcc" for folder in _nvidia_packages()),
    ):
        if path and (found := shutil.which(path)):
            return found
    return None


def _nvidia_packages() -> list[str]:
    """The folders that pip has unpacked NVIDIA's libraries, headers and compiler to."""
    spec = importlib.util.find_spec("nvidia")
    return list(spec.submodule_search_locations or []) if spec else []


def _nccl_headers() -> str | None:
    """Where TE looks for the headers that NCCL EP compiles against, in its order: beside the loaded library at last."""
    library = next((Path(path) for path in _mapped() if Path(path).name.startswith("libnccl.so")), None)
    for folder in (
        os.environ.get("NCCL_EP_JIT_BUILD_INCLUDE_DIR"),
        f"{os.environ.get('NCCL_HOME', '/usr')}/include",
        *([] if library is None else [str(parent / "include") for parent in library.parents]),
    ):
        if folder and (Path(folder) / "nccl.h").is_file():
            return folder
    return None


def _mapped() -> list[str]:
    """Files that this process has mapped into its memory, its libraries among them."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [line.split(maxsplit=5)[5] for line in lines if len(line.split(maxsplit=5)) == 6]
