"""What a CUDA graph of the whole step (cuda_graph.scope = "full") cannot hold. See config_check.py. No torch.

The reasons are in cuda_graph.py. What depends on the machine, such as the backend that "auto" comes to, is looked at
there when the model has been built.
"""

from titan_moe.config import Config

START = 'cuda_graph.scope = "full": '


def check(config: Config) -> list[str]:
    if config.cuda_graph.scope == "none":
        return []
    return [START + sentence for sentence in (*_schedule(config), *_region(config), *_python(config))]


def _schedule(config: Config) -> list[str]:
    p, found = config.parallelism, []
    if p.pipeline_parallel_degree > 1:
        found.append(
            f"parallelism.pipeline_parallel_degree = {p.pipeline_parallel_degree} sends between stages in the middle "
            'of a step, which is not recorded; set the scope to "none", or the degree to 1'
        )
    if p.fsdp_reshard_after_forward == "always":
        found.append(
            'parallelism.fsdp_reshard_after_forward = "always" makes the recording wait for gathers that were issued '
            'outside of it, which CUDA refuses; choose "default" or "never"'
        )
    return found


def _region(config: Config) -> list[str]:
    moe, ep, found = config.moe, config.parallelism.expert_parallel_degree, []
    if moe.dispatcher == "deepep":
        found.append('moe.dispatcher = "deepep" makes the host wait for the counts; choose "te_ep" or "hybridep"')
    elif ep > 1 and moe.recv_buffer == "exact":
        found.append(
            f'moe.recv_buffer = "exact" with parallelism.expert_parallel_degree = {ep} makes the host wait for the '
            'counts, and no two steps have the same shapes; choose "worst_case" or a factor'
        )
    if moe.experts == "loop":
        found.append('moe.experts = "loop" cuts slabs on the host, which has to know their sizes; choose "auto"')
    if config.training.mixed_precision_param == "float32":
        found.append(
            'training.mixed_precision_param = "float32" leaves only the experts "loop" on a GPU, which cut slabs on '
            'the host; set it to "bfloat16"'
        )
    return found


def _python(config: Config) -> list[str]:
    """What Python does anew in each step, where a replay runs none."""
    every, precision, found = config.guards.corruption_check_every, config.precision, []
    if every > 0:
        found.append(
            f"guards.corruption_check_every = {every} looks from Python at what each layer returns, and a replay calls "
            "no Python; leave one of them out"
        )
    if config.activation_offload.tensors:
        found.append(
            "activation_offload.tensors moves activations to buffers of the host that Python hands out in each step; "
            "leave one of them out"
        )
    if precision.recipe == "nvfp4" and precision.backend != "te":
        found.append(
            f'precision.recipe = "nvfp4" with precision.backend = "{precision.backend}" may be emulated, which draws '
            'on the host how it rounds, and every replay would round alike; set the backend to "te"'
        )
    return found
