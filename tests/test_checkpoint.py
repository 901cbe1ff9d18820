"""What a user reads when a checkpoint cannot be loaded; that saving and loading work is shown by tests/distributed."""

import pytest

from titan_moe.checkpoint import load


class Checkpointer:
    def __init__(self, error: Exception) -> None:
        self.error = error

    def load(self, step: int) -> bool:
        raise self.error


@pytest.mark.parametrize("text", ["Missing key in checkpoint state_dict: x.", "Size mismatch between saved 1 and 2"])
def test_another_models_checkpoint_is_refused_with_the_way_out(text):
    with pytest.raises(ValueError, match=r"another model.*config.toml in the run folder") as refusal:
        load(Checkpointer(RuntimeError(text)), -1)
    assert text in str(refusal.value.__cause__)


def test_other_faults_are_not_dressed_up():
    with pytest.raises(RuntimeError, match="disk on fire"):
        load(Checkpointer(RuntimeError("disk on fire")), -1)
