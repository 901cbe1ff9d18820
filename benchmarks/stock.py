"""torchtitan's training step on a CPU: the frozen baseline of the `step` suite.

    python benchmarks/stock.py train_configs/debug_model.toml [--section.key=value ...]

trains and prints the loss of each step. Model, FSDP2, loss, optimizer, schedule and the order of a step are
torchtitan 0.3.0's, by its classes; `train_step` follows its Trainer's. What has to differ on a CPU: attention, because
FlexAttention has no backward there, is torch's scaled dot-product attention with a dense mask; gloo gets a plain sum
(runtime.py). Flavor, initial weights, data, dtype and threads are those of our run with the same configuration.

`attention` and `moe` put ours in, one at a time: what each is worth.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

sys.path.insert(0, str(Path(__file__).parents[1]))
from titan_moe import runtime  # isort: skip - before torchtitan: it tells torchtitan about CPUs

import torch
import torch.nn.functional as F
from torch import Tensor
from torchtitan.components.loss import IGNORE_INDEX, ChunkedLossWrapper
from torchtitan.components.optimizer.optimizer import default_adamw, register_moe_load_balancing_hook
from torchtitan.config import CompileConfig, TrainingConfig
from torchtitan.distributed import utils as dist_utils
from torchtitan.models.deepseek_v3 import parallelize_deepseekv3
from torchtitan.protocols.module import Module
from torchtitan.tools.logging import init_logger, logger
from torchtitan.tools.utils import set_default_dtype

from titan_moe import attention as our_attention
from titan_moe import config_file, families
from titan_moe.config import Config
from titan_moe.data import build_dataloader
from titan_moe.inputs import model_inputs, to_device
from titan_moe.model import init_weights, moe_settings
from titan_moe.moe.layer import fuse
from titan_moe.optimizer import build_lr_schedulers, build_optimizers
from titan_moe.sources.record import list_all
from titan_moe.tokenizer import build_tokenizer

Whose = Literal["torchtitan", "ours"]


class PlainAttention(Module):
    """torch's scaled dot-product attention; `attention_masks` is [B, 1, L, L]."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        pass

    def __init__(self, config: Config):
        super().__init__()

    def forward(self, q_BLNH, k_BLNH, v_BLNH, *, attention_masks, scale=None, enable_gqa=False):
        q, k, v = (x.transpose(1, 2) for x in (q_BLNH, k_BLNH, v_BLNH))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=attention_masks, scale=scale, enable_gqa=enable_gqa)
        return out.transpose(1, 2)


def build_model(config: Config, attention: Whose, moe: Whose):
    """On the meta device."""
    tree = families.tree(config_file.model_flavor(config), config.training.seq_len)
    families.set_sharding(tree, enable_ep=False)
    for layer in tree.layers:
        if runtime.DEVICE_TYPE == "cpu":  # on a GPU both are FlexAttention
            node = PlainAttention if attention == "torchtitan" else our_attention.DenseAttention
            layer.attention.inner_attention = node.Config()
        if layer.moe is not None:
            layer.moe.load_balance_coeff = config.moe.load_balance_coeff or None
            if moe == "ours":
                layer.moe = fuse(layer.moe, **moe_settings(config))
    with torch.device("meta"), set_default_dtype(getattr(torch, config.training.dtype)):
        return tree.build()


class StockRun:
    """A training whose steps are taken one by one."""

    def __init__(self, config: Config, attention: Whose = "torchtitan", moe: Whose = "torchtitan") -> None:
        self.config, self.attention = config, attention
        self.device = runtime.init_process_group(config, Path(config.job.dump_folder))
        self.dims = dims = runtime.build_meshes(config)
        runtime.set_seed(config, dims, self.device)
        flavor, t = config_file.model_flavor(config), config.training
        tokenizer = build_tokenizer(config.model.hf_assets_path, flavor.vocab_size)
        loader = build_dataloader(
            config,
            sources=list_all(config).training,
            tokenizer=tokenizer,
            dp_rank=0,
            dp_degree=1,
            local_batch_size=t.local_batch_size,
            seed=config.debug.seed,
        )
        self.batches = iter(loader)
        self.model = model = build_model(config, attention, moe)
        parallelize_deepseekv3(
            model,
            parallel_dims=dims,
            training=TrainingConfig(
                mixed_precision_param=t.mixed_precision_param, mixed_precision_reduce=t.mixed_precision_reduce
            ),
            parallelism=runtime.titan_parallelism(config),
            compile_config=CompileConfig(enable=False),
            ac_config=None,
            dump_folder="",
        )
        runtime.prepare_for_backend(model)
        model.to_empty(device=self.device)
        init_weights(model, config.debug.seed)
        model.train()
        self.loss_fn = ChunkedLossWrapper.Config().build()
        self.loss_fn.set_lm_head(model.lm_head)
        model._skip_lm_head = True
        o = config.optimizer
        if moe == "ours":
            self.optimizers = build_optimizers(config, [model], dims)
        else:
            self.optimizers = default_adamw(
                lr=o.lr, betas=(o.beta1, o.beta2), eps=o.eps, weight_decay=o.weight_decay
            ).build(model_parts=[model])
            register_moe_load_balancing_hook(self.optimizers, [model], dims)
        self.lr_schedulers = build_lr_schedulers(config, self.optimizers)
        self.spmd_context = dist_utils.get_spmd_context(parallel_dims=dims)

    def step(self) -> Tensor:
        """One optimizer step; returns the loss."""
        self.optimizers.zero_grad()
        batch = to_device(next(self.batches), self.device)
        valid_tokens = (batch[1] != IGNORE_INDEX).sum()
        tokens_BL, labels_BL, kwargs = model_inputs(self.model, batch, self.dims, "none")
        if self.attention == "torchtitan" and runtime.DEVICE_TYPE == "cpu":
            documents = kwargs["attention_masks"]
            index_L = torch.arange(tokens_BL.shape[1])
            kwargs["attention_masks"] = our_attention.mask(documents.start_BL, index_L, index_L)
        with self.spmd_context():
            pred = self.model(tokens_BL, **kwargs)
            loss, _ = self.loss_fn(pred, labels_BL, valid_tokens, positions=kwargs["positions"])
            del pred
            loss.backward()
        dist_utils.clip_grad_norm_(
            list(self.model.parameters()), self.config.training.max_norm, foreach=True, pp_mesh=None, ep_enabled=False
        )
        self.optimizers.step()
        self.lr_schedulers.step()
        return loss.detach()


def main(argv: list[str]) -> None:
    runtime.default_environment(argv)
    config = config_file.load(argv, 1)
    init_logger()
    logger.setLevel("WARNING")
    run = StockRun(config)
    for step in range(1, config.training.steps + 1):
        print(f"step: {step:2}  loss: {float(run.step()):8.5f}", flush=True)
    runtime.leave_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
