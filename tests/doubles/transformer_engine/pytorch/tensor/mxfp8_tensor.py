"""What a quantizer to MXFP8 is told."""

from transformer_engine.pytorch.constants import DType
from transformer_engine.pytorch.quantized_tensor import Quantizer


class MXFP8Quantizer(Quantizer):
    def __init__(
        self, fp8_dtype, *, rowwise: bool = True, columnwise: bool = True, with_2d_quantization: bool = False
    ) -> None:
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        assert fp8_dtype is DType.kFloat8E4M3 and not with_2d_quantization, "the double knows e4m3 in rows of 32"
        self.dtype = fp8_dtype
