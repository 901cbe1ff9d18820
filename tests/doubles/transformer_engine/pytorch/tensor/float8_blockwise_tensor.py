"""What a quantizer to FP8 with a scale per 1 x 128 or 128 x 128 numbers is told."""

from transformer_engine.pytorch.constants import DType
from transformer_engine.pytorch.quantized_tensor import Quantizer


class Float8BlockQuantizer(Quantizer):
    def __init__(
        self,
        fp8_dtype,
        *,
        rowwise: bool,
        columnwise: bool,
        amax_epsilon: float = 0.0,
        force_pow_2_scales: bool = True,
        block_scaling_dim: int = 2,
    ) -> None:
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        assert fp8_dtype is DType.kFloat8E4M3 and force_pow_2_scales and not amax_epsilon, "TE's recipe"
        assert block_scaling_dim in (1, 2), "Only 1D or 2D blocks are supported"
        self.dtype, self.block_scaling_dim = fp8_dtype, block_scaling_dim
