"""What a quantizer to FP8 with one scale is told."""

import torch

from transformer_engine.pytorch.quantized_tensor import Quantizer


class Float8CurrentScalingQuantizer(Quantizer):
    def __init__(
        self,
        fp8_dtype,
        device: torch.device,
        *,
        rowwise: bool = True,
        columnwise: bool = True,
        use_existing_amax: bool = False,
        with_amax_reduction: bool = False,
        amax_reduction_group=None,
        force_pow_2_scales: bool = False,
        amax_epsilon: float = 0.0,
        scale: torch.Tensor | None = None,
        amax: torch.Tensor | None = None,
    ) -> None:
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        assert not (use_existing_amax or with_amax_reduction or amax_epsilon or force_pow_2_scales)
        assert scale is None and amax is None, "accepted, but not used"
        self.dtype = fp8_dtype
