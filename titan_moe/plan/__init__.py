"""The planner: will a run fit, how fast will it be, and what limits it. Imports neither torch nor torchtitan."""
