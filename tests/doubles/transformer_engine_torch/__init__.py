from .ep import *  # noqa: F403
from .gemm import *  # noqa: F403
from .quantize import *  # noqa: F403
