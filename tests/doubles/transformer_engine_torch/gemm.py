"""The functions of TE's extension that grouped GEMM needs."""


def get_cublasLt_version() -> int:
    return 131000
