"""What is found of Transformer Engine's surroundings: its compiler, headers and NCCL, on a disk made up for it."""

import titan_moe.runtime  # noqa: F401 - loads NCCL, with torch

import pytest
import torch

from titan_moe.moe import te


@pytest.fixture
def disk(tmp_path, monkeypatch):
    """`disk(path)`: an executable file below a folder in which nothing else is, nor on PATH or in the environment."""
    for name in ("NCCL_EP_JIT_NVCC", "NVCC", "CUDA_HOME", "NCCL_EP_JIT_BUILD_INCLUDE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("NCCL_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(te, "_nvidia_packages", lambda: [str(tmp_path / "nvidia")])
    monkeypatch.setattr(te, "_mapped", lambda: ["/lib/libc.so.6", f"{tmp_path}/nvidia/nccl/lib/libnccl.so.2"])

    def put(path: str) -> str:
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch(mode=0o755)
        return str(file)

    return put


def test_nvcc_is_looked_for_where_nccl_ep_does_and_where_pip_puts_it(disk, monkeypatch):
    """Each place, from the last to the first, takes precedence over the ones before it."""
    assert te._nvcc() is None
    for path, variable in (
        ("nvidia/cu13/bin/nvcc", None),
        ("bin/nvcc", None),
        ("cuda/bin/nvcc", "CUDA_HOME"),
        ("a/nvcc", "NVCC"),
        ("b/nvcc", "NCCL_EP_JIT_NVCC"),
    ):
        file = disk(path)
        if variable is not None:
            monkeypatch.setenv(variable, file.removesuffix("/bin/nvcc"))
        assert te._nvcc() == file


def test_nccl_headers_are_found_beside_the_loaded_library(disk, monkeypatch):
    assert te._nccl_headers() is None
    for path in ("nvidia/nccl/include/nccl.h", "home/include/nccl.h", "own/nccl.h"):
        folder = disk(path).removesuffix("/nccl.h")
        if path.startswith("own"):
            monkeypatch.setenv("NCCL_EP_JIT_BUILD_INCLUDE_DIR", folder)
        assert te._nccl_headers() == folder


@pytest.mark.skipif(not torch.distributed.is_nccl_available(), reason="torch was built without NCCL")
def test_the_loaded_nccl_is_torchs():
    assert te._nccl_version() == torch.cuda.nccl.version()
    assert any("libnccl.so" in path for path in te._mapped())
