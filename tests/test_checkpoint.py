"""What a user reads when a checkpoint cannot be loaded; that saving and loading work is shown by tests/distributed."""

import pytest

from titan_moe.checkpoint import load


class Checkpointer:
    def __init__(self, error: Exception) -> None:
        self.error = error

    def load(self, step: int) -> bool:
        raise self.error


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("Missing key in checkpoint state_dict: layers.4.ffn_norm.weight.", "another model: put .model. back"),
        ("Size mismatch between saved torch.Size([2]) and current: torch.Size([3])", "another model: put .model. back"),
        ("Missing key in checkpoint state_dict: dataloader.shard.16.", "fewer shards or sources: put .*training"),
        (
            "Missing key in checkpoint state_dict: optimizer.state.norm.weight.step.",
            "only weights .* move it away .* checkpoint.initial_load_path",
        ),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused_with_the_way_out(text, reason):
    with pytest.raises(ValueError, match=rf"cannot be resumed, .*{reason}.*config.toml") as refusal:
        load(Checkpointer(RuntimeError(text)), -1)
    assert text in str(refusal.value.__cause__)


def test_other_faults_are_not_dressed_up():
    with pytest.raises(RuntimeError, match="disk mismatch"):
        load(Checkpointer(RuntimeError("disk mismatch")), -1)
