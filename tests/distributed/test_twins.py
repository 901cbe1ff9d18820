"""The twin of every shipped configuration trains: its structure and its layout, on as many processes as there are."""

import pytest

from tests.distributed.harness import REPO, Case, Outcome, run_cases
from titan_moe import config_file
from titan_moe.config import Config

FILES = [path.stem for path in sorted((REPO / "train_configs").glob("*.toml")) if path.stem != "debug_model"]
# Two processes leave these like another: experts over servers of 8 like experts, and so on.
LIKE_ANOTHER = ("deepseek_v3_671b_gb200", "deepseek_v3_671b_h100", "qwen3_30b_a3b")


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)])
def twins(request, tmp_path_factory) -> tuple[int, dict[str, Outcome]]:
    """(processes, what each twin left). Four train all of them."""
    argv = ["--model.scale_down", "--training.steps=3", "--training.dataset=synthetic"]
    argv += ["--checkpoint.no_enable", "--metrics.no_enable_tensorboard", "--training.dataloader.num_workers=0"]
    names = [name for name in FILES if request.param == 4 or name not in LIKE_ANOTHER]
    cases = {name: Case(argv, base=[f"train_configs/{name}.toml"]) for name in names}
    return request.param, run_cases(request.param, cases, tmp_path_factory.mktemp("twins"))


def trained(outcome: Outcome) -> Config:
    return config_file.load([str(outcome.folder / "config.toml")])


def test_every_twin_trains_its_files_structure(twins):
    ranks, outcomes = twins
    for name, outcome in outcomes.items():
        metrics, twin = outcome.metrics, trained(outcome)
        assert list(metrics) == [1, 2, 3], name
        assert metrics[3]["loss"] < metrics[1]["loss"] < 7 and metrics[1]["grad_norm"] > 0, name
        assert ("mtp_loss" in metrics[1]) == (twin.model.num_mtp_layers == 1), name
        file = config_file.load([str(REPO / "train_configs" / f"{name}.toml")])
        assert (twin.model.name, twin.model.flavor) == (file.model.name, file.model.flavor)
        assert twin.activation_checkpoint == file.activation_checkpoint
        assert twin.moe.sequence_loss_coeff == file.moe.sequence_loss_coeff
        degrees = [
            (getattr(twin.parallelism, f"{axis}_degree"), getattr(file.parallelism, f"{axis}_degree"))
            for axis in ("pipeline_parallel", "context_parallel", "expert_parallel")
        ]
        assert all(small <= whole for small, whole in degrees), name
        # Each kind of parallelism that a file has is there, but for experts where a pipeline has taken both ranks.
        split = [min(2, whole) for _, whole in degrees]
        assert [min(2, small) for small, _ in degrees[:2]] == split[:2], name
        assert degrees[2][0] == (1 if ranks == 2 and split[0] == 2 else min(degrees[2][1], ranks // split[0])), name


def test_a_saved_twin_is_a_configuration_of_its_own(twins):
    """Its resolved file says all of it, so it resumes on the same number of processes without being scaled again."""
    ranks, outcomes = twins
    for outcome in outcomes.values():
        twin = trained(outcome)
        assert not twin.model.scale_down and config_file.check(twin, ranks) == []
