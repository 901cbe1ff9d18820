"""What a quantizer to MXFP8 is told. The work is group_quantize's."""

from transformer_engine.pytorch.constants import DType


class MXFP8Quantizer:
    def __init__(
        self, fp8_dtype, *, rowwise: bool = True, columnwise: bool = True, with_2d_quantization: bool = False
    ) -> None:
        assert fp8_dtype is DType.kFloat8E4M3, "the kernels to come read e4m3"
        assert not with_2d_quantization and rowwise != columnwise, "the double quantizes in one direction"
        self._columnwise = columnwise
        self.optimize_for_gemm = self.internal = False
