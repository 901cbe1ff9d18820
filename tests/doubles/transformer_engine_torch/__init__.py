from .ep import *  # noqa: F403
from .gemm import *  # noqa: F403
from .mxfp8 import *  # noqa: F403
