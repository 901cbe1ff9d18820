"""Import and export on ranks that each hold a part: what they load is what one rank loads, and computes what the model
in transformers does; what they write is what one rank writes; and a training from and to a Hugging Face folder goes
through train.py's own functions."""

from dataclasses import replace

import titan_moe.runtime  # noqa: F401

import pytest
import torch

from tests.distributed.harness import REPO
from tests.faults.checkpoint_run import Job
from tests.huggingface import mesh_run, peers
from tests.huggingface.peers import files
from titan_moe.config import Config, Model, Parallelism
from titan_moe.convert import main as convert
from titan_moe.huggingface.load import load

SHAPE = "deepseek_v3"
MESHES = {
    "EP 2 x FSDP 2": Parallelism(expert_parallel_degree=2),
    "EP 4, FSDP 2 x TP 2, alltoall": Parallelism(expert_parallel_degree=4, tensor_parallel_degree=2),
    "PP 2 x FSDP 2": Parallelism(pipeline_parallel_degree=2),
    "HSDP 2 x 2, EP 2": Parallelism(data_parallel_replicate_degree=2, expert_parallel_degree=2),
}


@pytest.mark.parametrize(
    "mesh", [next(iter(MESHES)), *(pytest.param(m, marks=pytest.mark.slow) for m in [*MESHES][1:])]
)
def test_ranks_load_and_write_what_one_does(mesh, tmp_path, group):
    theirs_alone = peers.peer(SHAPE)
    theirs_alone.save_pretrained(tmp_path / "theirs", max_shard_size="100KB")
    tokens_BL, positions_BL = peers.ids()
    torch.save(tokens_BL, tmp_path / "tokens.pt")
    config = peers.configuration(SHAPE, tmp_path / "theirs")
    config.training.local_batch_size, config.training.global_batch_size = 2, 8
    alone = peers.ours(config)
    load(tmp_path / "theirs", config, [alone], group)
    expected = peers.fingerprint(alone)

    config.parallelism = replace(MESHES[mesh])
    config.moe.dispatcher = "alltoall" if "alltoall" in mesh else "auto"
    job = Job(tmp_path / "store", mesh_run.on_mesh, config, tmp_path, world_size=4)
    assert job.hear() == ["done"] * 4
    job.end()
    ranks = [torch.load(tmp_path / f"rank-{rank}.pt") for rank in range(4)]
    assert set().union(*ranks) == expected.keys()
    for told in ranks:
        for name, value in told.items():
            assert torch.equal(value, expected[name]), name
    with torch.no_grad():
        logits_BLV = theirs_alone(tokens_BL, position_ids=positions_BL).logits
    left = [torch.load(path) for path in sorted(tmp_path.glob("logits-*.pt"))]
    assert len(left) == (0 if config.parallelism.pipeline_parallel_degree > 1 else 4)
    for rank, got_BLV in enumerate(left):  # with TP, a rank has its part of the vocabulary
        part = rank % config.parallelism.tensor_parallel_degree
        expected_BLV = logits_BLV.chunk(config.parallelism.tensor_parallel_degree, -1)[part]
        assert (got_BLV - expected_BLV).abs().max() < 1e-5 * logits_BLV.abs().max(), rank
    written, theirs = files(tmp_path / "hf"), files(tmp_path / "theirs")
    assert len(list((tmp_path / "hf").glob("model-*"))) > 4  # every rank has written
    assert written.keys() == theirs.keys()
    assert all(torch.equal(written[name], value) for name, value in theirs.items())


@pytest.mark.slow
def test_no_more_than_a_file_or_a_parameter_is_in_memory(tmp_path):
    """Beside a model of 400 MB: on import one mapped file of 68 MB, on export three times one weight's stack of 64 MB
    (the piece that was saved, the whole, a part in the other type)."""
    config = Config(model=Model(latent_norm_eps=1e-6, dim=512, moe_hidden_dim=512, num_experts=64, n_layers=3))
    config.checkpoint.enable, config.checkpoint.initial_load_path = True, str(tmp_path / "hf")
    job = Job(tmp_path / "store", mesh_run.memory, config, tmp_path)
    ((exporting, importing),) = job.hear()
    job.end()
    largest = max(path.stat().st_size for path in (tmp_path / "hf").glob("*.safetensors"))
    assert largest < 80e6 < sum(path.stat().st_size for path in (tmp_path / "hf").glob("*.safetensors"))
    assert importing < largest + 20e6
    assert exporting < 4 * 64 * 512 * 512 * 4


def test_a_training_from_a_folder_to_a_folder(tmp_path):
    """Two steps on EP 2: what it leaves in hf/ is what titan_moe.convert makes of its last checkpoint."""
    peers.peer(SHAPE).save_pretrained(tmp_path / "theirs")
    sizes = [f"--model.{key}={value}" for key, value in peers.OURS_MLA.items()]
    run = tmp_path / "run"
    argv = [str(REPO / "train_configs" / "debug_model.toml"), *sizes, f"--job.dump_folder={run}", "--training.steps=2"]
    argv += ["--training.dataset=synthetic", "--training.seq_len=32", "--training.mixed_precision_param=float32"]
    argv += ["--training.local_batch_size=2", "--training.global_batch_size=4", "--validation.enable=false"]
    argv += ["--checkpoint.enable", f"--checkpoint.initial_load_path={tmp_path / 'theirs'}", "--optimizer.lr=1e-3"]
    argv += ["--checkpoint.last_save_in_hf", "--checkpoint.export_dtype=bfloat16", "--lr_scheduler.warmup_steps=0"]
    argv += ["--parallelism.expert_parallel_degree=2"]
    job = Job(tmp_path / "store", mesh_run.training, argv, world_size=2)
    assert job.hear() == ["done", "done"]
    job.end()
    before, after = files(tmp_path / "theirs"), files(run / "hf" / "step-2")
    assert before.keys() == after.keys()
    for name, value in before.items():
        if "correction" not in name:
            change = (after[name].float() - value).norm() / value.norm()
            assert 1e-4 < change < 0.2, (name, change)
    assert convert([str(run / "checkpoint" / "step-2"), str(tmp_path / "out"), "--to", "hf", "--dtype=bfloat16"]) == 0
    for name, value in files(tmp_path / "out").items():
        assert torch.equal(after[name], value), name
    names = [sorted(path.name for path in folder.iterdir()) for folder in (tmp_path / "out", run / "hf" / "step-2")]
    assert names[0] == names[1]
