"""What expert parallelism sends and how long somebody waits for it, and what routing made of the rows.

Bytes and seconds come from the log of transfers (in_flight.py), forward and backward, that of every step. "dispatch"
and its backward, which sends gradients the same way back, are told together, and so are "combine" and its. Libraries
that send by themselves (te_ep, deepep, hybridep) do not say how much, so there is nothing to tell of them.

Unique ranks per token and padding are counted from the plans of a logged step, which every dispatcher makes: on the
device, with a few small operations per layer, and read when the step is logged.

Shape letters: T tokens of this rank, K top-k, e experts of this rank.
"""

from collections.abc import Callable, Sequence
from typing import Any

import titan_moe.runtime  # noqa: F401

import torch
from torch import Tensor, nn

from titan_moe import in_flight
from titan_moe.config import Config
from titan_moe.config_check import model_flavor
from titan_moe.moe import layout
from titan_moe.moe.contract import Dispatcher, Plan
from titan_moe.moe.layer import moe_layers
from titan_moe.plan.traffic import unique_places

NAMES = ("dispatch", "combine")
GB = 1e9


class Wire:
    """One per run. Arguments: `counts` says whether the present forward is one whose plans count."""

    def __init__(
        self, config: Config, model_parts: Sequence[nn.Module], device: torch.device, counts: Callable[[], bool]
    ) -> None:
        self.counts, self.device = counts, device
        self.ranks = config.parallelism.expert_parallel_degree
        routing = "natural" if config.moe.force_balance == "none" else config.moe.force_balance
        self.predicted = unique_places(model_flavor(config), routing, self.ranks)
        if self.ranks > 1:
            in_flight.log = []
        self.late = 0  # transfers in the log that the step before the last began
        self._clear()
        for part in model_parts:
            for moe in moe_layers(part).values():
                assert moe.routed_experts.dispatcher is not None
                self._watch(moe.routed_experts.dispatcher)

    def _clear(self) -> None:
        self.sent = dict.fromkeys(NAMES, 0)  # bytes
        self.seconds = dict.fromkeys(NAMES, 0.0)  # in flight
        self.exposed = 0.0
        self.rows_4 = torch.zeros(4, dtype=torch.int64, device=self.device)  # see `_note_plan` and `_note_rows`

    def _watch(self, dispatcher: Dispatcher) -> None:
        plan, start_dispatch = dispatcher.plan, dispatcher.start_dispatch

        def noting_plan(ids_TK: Tensor, weights_TK: Tensor | None = None) -> Plan:
            made = plan(ids_TK, weights_TK)
            if self.counts():
                self._note_plan(dispatcher, ids_TK, made)
            return made

        def noting_rows(x_TD: Tensor, weights_TK: Tensor, made: Plan) -> Any:
            moving = start_dispatch(x_TD, weights_TK, made)
            if self.counts():  # only now: HybridEP's plan is complete when it has been sent
                self._note_rows(made)
            return moving

        dispatcher.plan, dispatcher.start_dispatch = noting_plan, noting_rows  # type: ignore[method-assign]

    def _note_plan(self, dispatcher: Dispatcher, ids_TK: Tensor, plan: Plan) -> None:
        """Unique ranks of all tokens, and tokens."""
        kept_N = None if plan.kept_TK is None else plan.kept_TK.reshape(-1)
        goes_TS = layout.destinations(ids_TK // dispatcher.local_experts, dispatcher.ranks, kept_N)
        self.rows_4[0] += goes_TS.sum()
        self.rows_4[1] += plan.tokens

    def _note_rows(self, plan: Plan) -> None:
        """Rows of the slabs of this rank, with padding, and the copies that this rank sent. Over all ranks as many
        copies arrive as are sent."""
        self.rows_4[2] += plan.padded_counts_e.sum()
        self.rows_4[3] += plan.counts_E.sum() - plan.dropped

    def step(self) -> None:
        """A step begins: adds up the transfers of the step before the last, which are over on the device too."""
        if in_flight.log is not None:
            self._read(self.late)
            self.late = len(in_flight.log)

    def _read(self, until: int) -> None:
        log = in_flight.log
        assert log is not None
        for name, total in in_flight.summary(log[:until]).items():
            kind = name.removesuffix(" backward")
            if kind in NAMES:
                self.sent[kind] += total.sent
                self.seconds[kind] += total.in_flight
                self.exposed += total.exposed
        del log[:until]
        self.late = 0

    def take(self, steps: int) -> list[float]:
        """This rank's numbers for `statistics`, of one of the `steps` steps since the last call."""
        if in_flight.log is not None:
            self._read(len(in_flight.log))
        numbers = [*self.sent.values(), *self.seconds.values(), self.exposed]
        taken = [number / max(steps, 1) for number in numbers] + self.rows_4.tolist()
        self._clear()
        return taken

    def statistics(self, numbers_RN: Tensor) -> dict[str, float]:
        """What is told, of the numbers of all ranks. R ranks."""
        means = numbers_RN.mean(0).tolist()
        sent, seconds, exposed = dict(zip(NAMES, means)), dict(zip(NAMES, means[2:])), means[4]
        unique, tokens, padded, valid = means[5:]
        found = {"comm/padded_over_valid": padded / valid} if valid else {}
        if self.ranks > 1 and tokens:
            found |= {"comm/unique_ranks": unique / tokens, "comm/unique_ranks_predicted": self.predicted}
        if total := sum(seconds.values()):
            found |= {
                "comm/exposed_s": exposed,
                "comm/in_flight_s": total,
                "comm/hidden": max(0.0, 1 - exposed / total),
            }
            found |= {f"comm/{name}_bytes": sent[name] for name in NAMES}
            found |= {f"comm/{name}_gb_s": sent[name] / seconds[name] / GB for name in NAMES if seconds[name]}
        return found
