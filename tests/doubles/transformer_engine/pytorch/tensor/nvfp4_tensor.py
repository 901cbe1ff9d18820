"""What a quantizer to NVFP4 is told."""

from transformer_engine.pytorch.constants import DType
from transformer_engine.pytorch.quantized_tensor import Quantizer


class NVFP4Quantizer(Quantizer):
    def __init__(
        self,
        fp4_dtype=DType.kFloat4E2M1,
        rowwise: bool = True,
        columnwise: bool = True,
        with_amax_reduction: bool = False,
        amax_reduction_group=None,
        with_rht: bool = False,
        with_post_rht_amax: bool = False,
        with_2d_quantization: bool = False,
        stochastic_rounding: bool = False,
        row_scaled_nvfp4: bool = False,
        nvfp4_use_4over6: bool = False,
        nvfp4_e4m3_max: int = 448,
        nvfp4_4over6_err_mode: str = "MAE",
        with_random_sign_mask: bool = True,
    ) -> None:
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        assert fp4_dtype is DType.kFloat4E2M1 and not (with_amax_reduction or row_scaled_nvfp4 or nvfp4_use_4over6)
        assert with_random_sign_mask and with_rht == with_post_rht_amax, "Pre-RHT amax is not supported yet."
        assert not (with_rht and with_2d_quantization), "squares are for weights, which are not transformed"
        self.dtype, self.with_rht = fp4_dtype, with_rht
        self.with_2d_quantization, self.stochastic_rounding = with_2d_quantization, stochastic_rounding
