"""TitanMoE: a minimal, hackable pre-trainer for DeepSeek-V3-class mixture-of-experts models on torchtitan.

Importing the package, its configuration and its model sizes needs neither torch nor torchtitan.
"""

__version__ = "0.1.0"
