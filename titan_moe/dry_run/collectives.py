"""Which collectives ran, in which group, how often, with how many bytes.

The bytes of a collective are those of the larger of what goes in and what comes out: of the gathered tensor for an
all-gather, of the whole one for a reduce-scatter, of the tensor for an all-reduce, a send or a receive, and for an
all-to-all of what is sent or received, this rank's own share included.
"""

from collections import defaultdict
from typing import Any, NamedTuple

from torch import Tensor
from torch._ops import OpOverload
from torch.distributed._tools.fake_collectives import CollectiveOp, collective_ops, sync_ops
from torch.utils._pytree import tree_leaves
from torchtitan.distributed import ParallelDims

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep", "efsdp")
"""The mesh axes that say where a rank is; other groups join some of them"""


class Kind(NamedTuple):
    op: str
    axes: str
    """Of the mesh, that the group is along"""
    ranks: int


NAMES = {
    "_allgather_base_": "all-gather",
    "all_gather_into_tensor": "all-gather",
    "allgather_": "all-gather",
    "_reduce_scatter_base_": "reduce-scatter",
    "reduce_scatter_tensor": "reduce-scatter",
    "reduce_scatter_": "reduce-scatter",
    "allreduce_": "all-reduce",
    "all_reduce": "all-reduce",
    "all_reduce_": "all-reduce",
    "alltoall_base_": "all-to-all",
    "all_to_all_single": "all-to-all",
    "alltoall_": "all-to-all",
    "recv_": "receive",
}


class Collectives:
    """Calls and bytes of all of them together, by kind."""

    def __init__(self, parallel_dims: ParallelDims) -> None:
        self.counts: dict[Kind, tuple[int, int]] = defaultdict(lambda: (0, 0))
        meshes = parallel_dims.get_all_one_dimensional_meshes()
        self._axes: dict[str, str] = {}
        for axis in (axis for axis in AXES if axis in meshes):  # those of the same ranks share a group
            name = meshes[axis].get_group().group_name
            self._axes[name] = f"{self._axes[name]} = {axis}" if name in self._axes else axis

    def count(self, op: OpOverload, arguments: tuple, result: Any) -> None:
        """Note a call of `op` if it is a collective."""
        if op not in collective_ops or op in sync_ops:
            return
        group = CollectiveOp.get_process_group(op, arguments)
        name = op.name().split("::")[1]
        axes = self._axes.get(group.group_name, group.group_desc.removeprefix("mesh_").removesuffix("_mesh"))
        kind = Kind(NAMES.get(name, name.strip("_")), axes, group.size())
        calls, size = self.counts[kind]
        self.counts[kind] = calls + 1, size + max(_bytes(part) for part in (*arguments, result))


def _bytes(part: Any) -> int:
    return sum(leaf.numel() * leaf.element_size() for leaf in tree_leaves(part) if isinstance(leaf, Tensor))
