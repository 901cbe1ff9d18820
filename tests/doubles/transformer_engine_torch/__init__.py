from .ep import *  # noqa: F403
from .gemm import *  # noqa: F403
from .quantization import *  # noqa: F403
