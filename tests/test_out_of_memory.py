"""A run that has run out of memory shows its traceback and what would need less, as the planner sees it."""

import json

import titan_moe.runtime  # noqa: F401

import pytest
import torch
from torch.distributed.elastic.multiprocessing.errors import record

from titan_moe import config_file, out_of_memory
from titan_moe.machine_check import Machine, needed_bytes
from titan_moe.mistakes import readable

GPU = Machine(name="", memory=float("inf"), gpu=True)


def exhaust(argv: list[str]) -> None:
    torch.empty(2**60)  # bytes, more than any machine has


def gpu_error(argv: list[str]) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")


@pytest.mark.parametrize("main", [exhaust, gpu_error])
def test_torchrun_gets_the_traceback_and_the_advice(main, tmp_path, monkeypatch):
    """The allocator's own error on a CPU, and a GPU's, on rank 3: through the decorators of train.main."""
    file = tmp_path / "error.json"
    for name, value in {"TORCHELASTIC_ERROR_FILE": str(file), "RANK": "3", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    argv = ["train_configs/debug_model.toml", "--training.dataset=my texts/*.txt"]
    with pytest.raises(RuntimeError):
        record(readable(main))(argv)
    shown = json.loads(file.read_text())["message"]["extraInfo"]["py_callstack"]
    assert f"in {main.__name__}" in shown and "Traceback" in shown
    assert "Out of memory on rank 3. The planner expects " in shown
    assert '    activation_checkpoint.mode = "full": ' in shown and "    training.local_batch_size = 4: " in shown
    assert "./run_train.sh train_configs/debug_model.toml '--training.dataset=my texts/*.txt' --plan" in shown


def test_other_errors_get_no_advice():
    for error in (RuntimeError("size mismatch"), ValueError("out of memory"), OSError(28, "No space left on device")):

        @readable
        def main(argv: list[str], error: Exception = error) -> None:
            raise error

        with pytest.raises(type(error)) as raised:
            main([])
        assert not getattr(raised.value, "__notes__", [])
    assert out_of_memory.is_out_of_memory(MemoryError()) and out_of_memory.is_out_of_memory(
        OSError(12, "Cannot allocate memory")
    )


def test_what_is_suggested_is_what_the_planner_says_of_the_changed_run():
    """Read from the command line as it is written, it needs what was promised, and the same global batch is trained."""
    words = ["train_configs/deepseek_v3_671b_b200.toml"]
    config = config_file.load(words, 256)
    found = out_of_memory.less(config, 256, GPU)
    assert len(found) >= 3 and [each.bytes for each in found] == sorted(each.bytes for each in found)
    for each in found:
        key, _, value = each.change.partition(" = ")
        changed = config_file.load([*words, f"--{key}={value.strip(chr(34))}"], 256)
        assert needed_bytes(changed, 256, GPU) == each.bytes < needed_bytes(config, 256, GPU)
        assert changed.training.global_batch_size == config.training.global_batch_size


def test_a_configuration_that_cannot_be_planned_is_said_to_be_so():
    text = out_of_memory.advice(["no such file.toml"], 1, gpu=False)
    assert text.startswith("Out of memory on rank ") and "the planner cannot say what to change" in text
