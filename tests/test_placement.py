"""placement.py against the meshes that torchtitan builds over fake process groups of hundreds of ranks: its notes come
exactly where groups of those meshes cross NVLink domains, or pipeline neighbours lie far apart."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise

import titan_moe.runtime as runtime

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from titan_moe import launch, placement
from titan_moe.config import Config
from titan_moe.mesh_check import EP, PP, TP

FAKE = (
    'name = "fake"\narchitecture = "hopper"\nbf16_tflops = 1\nhbm_gb = 1\nhbm_tb_s = 1\n'
    "nvlink_gb_s = 1\nnvlink_domain = 12\nnic_gb_s = 1\n"
)


def configuration(hardware: str, **degrees: int) -> Config:
    config = Config()
    config.plan.hardware = hardware
    names = {"ep": "expert", "pp": "pipeline", "tp": "tensor"}
    for name, degree in degrees.items():
        setattr(config.parallelism, f"{names[name]}_parallel_degree", degree)
    return config


@contextmanager
def fake_ranks(world_size: int) -> Iterator[None]:
    dist.init_process_group("fake", rank=0, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def groups(config: Config, world_size: int) -> dict[str, torch.Tensor]:
    """All groups of each kind, a row each, from torchtitan's own meshes."""
    with fake_ranks(world_size):
        dims = runtime.build_meshes(config)
        whole = {EP: ("sparse", "ep"), TP: ("dense", "tp"), PP: ("sparse", "pp")}
        found = {}
        for key, (mesh_name, axis) in whole.items():
            mesh = dims._global_meshes[mesh_name]
            ranks = mesh.mesh.movedim(mesh.mesh_dim_names.index(axis), -1).flatten(0, -2)
            assert ranks.numel() == world_size
            own = dims._single_axis_meshes[axis].mesh.tolist()  # what this rank communicates in
            assert own in ranks.tolist()
            found[key] = ranks
        return found


def crossing(found: dict[str, torch.Tensor], domains: Sequence[str], per_node: int) -> set[str]:
    """Keys whose groups are not where they should be, straight from the groups."""
    bad = {key for key in (EP, TP) if any(len({domains[r] for r in group}) > 1 for group in found[key].tolist())}
    for chain in found[PP].tolist():
        for here, there in pairwise(chain):
            if domains[here] != domains[there] and here % per_node != there % per_node:
                bad.add(PP)
    return bad


def noted(config: Config, domains: Sequence[str], per_node: int) -> set[str]:
    return {note.split(" = ")[0] for note in placement.notes(config, domains, per_node)}


SOUND = [  # hardware, nodes, ranks per node, NVLINK_DOMAINS, degrees
    ("GB300", 64, 4, " ".join(str(node // 16) for node in range(64)), {"ep": 64}),  # 64 GPUs of each rack of 72
    ("GB300", 64, 4, " ".join(str(node // 16) for node in range(64)), {"ep": 32, "pp": 8}),
    ("GB300", 18, 4, "", {"ep": 8, "tp": 2}),
    ("H100", 32, 8, "", {"ep": 8, "pp": 4}),
    ("H100", 32, 8, "", {"ep": 8, "pp": 16, "tp": 4}),
    ("fake", 16, 3, "", {"ep": 12, "pp": 2}),
    ("fake", 8, 3, "", {"ep": 4, "pp": 2}),
]
FAR = [
    ("GB300", 72, 4, "", {"ep": 32}, {EP}),  # racks used whole: 72 is no multiple of 32
    ("GB300", 64, 4, " ".join(str(node % 4) for node in range(64)), {"ep": 32}, {EP}),  # nodes of racks in turns
    ("H100", 32, 8, "", {"ep": 16, "tp": 16}, {EP, TP}),
    ("H100", 32, 8, "", {"ep": 4, "pp": 64}, {PP}),  # two stages on a node
    ("H100", 3, 8, "", {"ep": 4, "pp": 2}, {PP}),  # a stage of a node and a half
    ("fake", 8, 3, "", {"ep": 8}, {EP}),
    ("fake", 8, 3, "", {"pp": 4}, set()),  # neighbours in one domain
]


@pytest.mark.parametrize(
    ("hardware", "nodes", "per_node", "domains", "degrees", "bad"), [(*s, set()) for s in SOUND] + FAR
)
def test_notes_say_what_torchtitans_meshes_show(tmp_path, hardware, nodes, per_node, domains, degrees, bad):
    if hardware == "fake":
        (tmp_path / "fake.toml").write_text(FAKE)
        hardware = str(tmp_path / "fake.toml")
    config = configuration(hardware, **degrees)
    of_ranks = placement.domains_of_ranks(config, nodes, per_node, {"NVLINK_DOMAINS": domains})
    shown = crossing(groups(config, nodes * per_node), of_ranks, per_node)
    assert noted(config, of_ranks, per_node) == shown == bad


def test_the_arithmetic_and_the_way_out():
    config = configuration("GB300", ep=32)
    (note,) = placement.notes(config, placement.domains_of_ranks(config, 72, 4, {}), 4)
    assert "3 of 9 groups" in note and "(ranks 64 to 95 in 2)" in note
    assert "a multiple of 32 ranks (8 nodes: sbatch --segment=8), at most 2 x 32 = 64 of 72" in note
    config = configuration("H100", ep=16)
    (note,) = placement.notes(config, placement.domains_of_ranks(config, 4, 8, {}), 8)
    assert "the largest domain has 8 of this run's ranks: choose at most that" in note


def test_four_of_a_servers_gpus_do_not_reach_another_server():
    config = configuration("H100", ep=8)
    assert noted(config, placement.domains_of_ranks(config, 2, 4, {}), 4) == {EP}


def test_the_launcher_says_it_once_and_starts(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.toml").touch()
    argv = ["a.toml", "--plan.hardware=H100", "--parallelism.expert_parallel_degree=8"]
    env = {"NNODES": "4", "NGPU": "4", "RUN_ID": "r1"}

    def said(**more: str) -> str:
        assert launch.main(argv, env | more) == 0
        return capsys.readouterr().err

    assert "note: parallelism.expert_parallel_degree = 8: 2 of 2 groups" in said()
    assert "note:" not in said(NODE_RANK="1")  # the first node has said it
    assert "note:" not in said(NVLINK_DOMAINS="a a b b")
    assert "2 in 2" not in said(NVLINK_DOMAINS="a b a b") and "(ranks 0 to 7 in 2)" in said(NVLINK_DOMAINS="a b a b")
    assert launch.main(argv, {**env, "NVLINK_DOMAINS": "a b"}) == 2
    assert "names 2 nodes, but NNODES = 4" in capsys.readouterr().err
    assert launch.main(["a.toml", "--plan.hardware=H1000"], {}) == 2
    assert 'plan.hardware "H1000": is not known' in capsys.readouterr().err
