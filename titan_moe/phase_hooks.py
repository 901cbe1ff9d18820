"""Which calls are which phase: found in a model from outside, so that nothing in it knows of timers.

A module's call is replaced, as torch.compile replaces it: what is inside, hooks included, is the phase's. So a compiled
module is timed around its graph, which stays what it was. Inside a graph nothing can be told apart: with compile a
dense layer, which is compiled as a whole, is one phase, "dense", its attention and norms included.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import titan_moe.runtime  # noqa: F401

from torch import nn
from torch.autograd.graph import Node
from torchtitan.components.checkpointer.utils import canonical_fqn

from titan_moe import in_flight
from titan_moe.fsdp_traffic import GlooReduce, Reductions, param_groups
from titan_moe.moe.layer import FusedMoE
from titan_moe.moe.moving import Moving
from titan_moe.moe.region import FusedRoutedExperts
from titan_moe.phase_names import OTHER
from titan_moe.phases import Phases, nodes_of
from titan_moe.pipeline import Pipeline

MOVED = ("dispatch", "combine")
LAYER = r"(?:mtp_)?layers\.\d+"

PHASES = {
    r"tok_embeddings": "embedding",
    rf"norm|{LAYER}\.(?:attention_norm|ffn_norm|enorm|hnorm|mtp_norm)": "norms",
    rf"{LAYER}\.attention": "attention",
    rf"{LAYER}\.feed_forward": "dense",
    rf"{LAYER}\.moe\.shared_experts": "shared_expert",
    rf"{LAYER}\.moe\.routed_experts\.inner_experts": "experts",
    rf"{LAYER}\.eh_proj": "mtp",
}
"""Of modules, by a pattern of their names"""

JOINS = "CatBackward"
MOVES = (JOINS, "_GatherRows", "_SumRows", "_SelectCopies")
MOVES += tuple(f"{half}_{way}" for half in ("start", "wait") for way in MOVED)
"""Parts of the names of the nodes that make up a dispatch or a combine, and of the one where its chunks join"""

FSDP_CALLS = ("unshard", "wait_for_unshard", "pre_forward", "post_forward", "pre_backward", "post_backward")
FSDP_CALLS += ("finalize_backward",)
"""Where FSDP2 gathers parameters, waits for them, and reduces gradients"""


def watch(phases: Phases, model_parts: Iterable[nn.Module], pipeline: Pipeline | None) -> None:
    """Tell `phases` what this rank's stages do, from now on. Call it when they are sharded and compiled."""
    for part in model_parts:
        for module, name in timed_modules(part):
            call = module._compiled_call_impl or module._call_impl
            module._compiled_call_impl = phases.around(call, name)
        for module in part.modules():
            if isinstance(module, FusedMoE):
                module.route = phases.around(module.route, "router")  # the router, load counts, auxiliary losses
                _watch_dispatcher(phases, module.routed_experts)
        _watch_fsdp(phases, part)
    if pipeline is not None:
        _watch_pipeline(phases, pipeline)


def timed_modules(part: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """Modules whose calls are phases, and which."""
    compiled: list[str] = []
    for fqn, module in part.named_modules():
        name = canonical_fqn(fqn)
        if any(fqn.startswith(f"{outer}.") for outer in compiled):
            continue
        if module._compiled_call_impl is not None:
            compiled.append(fqn)
            if re.fullmatch(LAYER, name):
                yield module, "dense"
        for pattern, phase in PHASES.items():
            if re.fullmatch(pattern, name):
                yield module, phase


def _watch_dispatcher(phases: Phases, routed: FusedRoutedExperts) -> None:
    dispatcher: Any = routed.dispatcher
    assert dispatcher is not None, "there are no ranks to dispatch to yet"
    dispatcher.plan = phases.inside(dispatcher.plan, "dispatch")
    dispatcher.start_dispatch = _timed_moving(phases, dispatcher.start_dispatch, "dispatch")
    dispatcher.start_combine = _timed_moving(phases, dispatcher.start_combine, "combine")


def _timed_moving(phases: Phases, start: Callable[..., Moving], phase: str) -> Callable[..., Any]:
    """`start`, and what is done with the Moving that it returns, as one phase, though other things run in between."""
    start = phases.inside(start, phase)
    wait, advance = phases.around(Moving.wait, phase, exchange_nodes), phases.inside(Moving.advance, phase)
    return lambda *args: TimedMoving(start(*args), wait, advance)


@dataclass(slots=True)
class TimedMoving:
    """A Moving with other calls in the place of its own. (Put into the Moving itself they would refer to it, and what
    it holds would live until Python's garbage collector runs.)"""

    moving: Moving
    wait_for: Callable[[Moving], Any]
    advance_by: Callable[[Moving], None]

    def wait(self) -> Any:
        return self.wait_for(self.moving)

    def advance(self) -> None:
        self.advance_by(self.moving)


def exchange_nodes(result: Any) -> Iterator[Node]:
    """The nodes of what a Moving returned, and behind them those that start an exchange: between the two backward may
    do something else too, and it is in the latter that it waits (moe/exchange.py)."""
    for node in nodes_of(result):
        yield node
        left: list[Node | None] = [node]
        while left:
            first = left.pop()
            if first is None or not any(word in first.name() for word in MOVES):
                continue
            if "start_" in first.name():
                yield first
            chunks = len(first.next_functions) if JOINS in first.name() else 1
            left += [behind for behind, _ in first.next_functions[:chunks]]


def _watch_fsdp(phases: Phases, part: nn.Module) -> None:
    reductions: dict[int, Reductions] = {}
    for group in param_groups(part):
        calls: Any = group
        for name in FSDP_CALLS:
            setattr(calls, name, phases.inside(getattr(calls, name), "fsdp"))
        if isinstance(reduce := group._reduce_scatter_comm, GlooReduce):
            reductions[id(reduce.reductions)] = reduce.reductions
    for each in reductions.values():  # on a CPU backward ends with a wait for the last of them
        each.finish = phases.inside(each.finish, "fsdp")  # type: ignore[method-assign]


def _watch_pipeline(phases: Phases, pipeline: Pipeline) -> None:
    """What a schedule does outside of its stages is to wait: "pipeline". A weights' pass of its own runs pieces of
    many phases' graphs, of which most have lost their beginning: all of it is "wgrad"."""
    for stage in pipeline.stages:
        stage.forward_one_chunk = phases.inside(stage.forward_one_chunk, OTHER)
        stage.backward_one_chunk = phases.backward()(stage.backward_one_chunk)
        stage.backward_weight_one_chunk = phases.whole("wgrad")(stage.backward_weight_one_chunk)
    pipeline.schedule.step = phases.inside(pipeline.schedule.step, "pipeline")
    # Before the first step, tokens without content pass through the stages: nothing of theirs counts.
    learn_shapes = phases.whole("pipeline")(pipeline.schedule._initialize_pp_stages)
    pipeline.schedule._initialize_pp_stages = in_flight.unnoted()(learn_shapes)
