"""Files of torchtitan 0.2: all of its keys are known, and each of its DeepSeek-V3 files gives what is written here.

tests/torchtitan_0_2_2/ has what its three files set, and all keys of its schema with their defaults, in Python.
"""

import ast
from pathlib import Path

import pytest

from titan_moe import config_file, titan02, titan02_docs
from titan_moe.config import Config
from titan_moe.config_check import check
from titan_moe.config_file import LEAVES
from titan_moe.config_keys import get
from titan_moe.config_print import literal
from titan_moe.titan02 import CHANGED, DEFAULTS, FORMER, SAME, Ignored, Refused, Renamed, Translated

HERE = Path(__file__).parent / "torchtitan_0_2_2"
DEFAULTS_022 = {
    key: ast.literal_eval(value)
    for key, value in (line.split(" = ", 1) for line in (HERE / "defaults.txt").read_text().splitlines())
}


def read(tmp_path: Path, text: str, *words: str) -> config_file.Loaded:
    path = tmp_path / "run.toml"
    path.write_text(text)
    return config_file.read([str(path), *words])


def told(lines: list[str]) -> list[str]:
    """Without the place."""
    return [line.split(": ", 1)[1] for line in lines]


# ---------------------------------------------------------------------------------------------------------------------
# The three files


def test_debug_model() -> None:
    loaded = config_file.read([str(HERE / "debug_model.toml")])
    assert told(loaded.problems) == [
        "training.dataset = 'c4_test': is built into torchtitan only; name your own files, a data set of the hub as "
        '"hf:owner/name:split", or "python_stdlib" to try the trainer out'
    ]
    folder, flavor = told(loaded.notes)
    assert folder.startswith("job.dump_folder = './outputs': is the folder of this one run")
    assert flavor.startswith("model.flavor = 'debugmodel': is another model here than in torchtitan 0.2")


@pytest.mark.parametrize(("name", "ep"), [("deepseek_v3_16b", 8), ("deepseek_v3_671b", 1)])
def test_16b_and_671b(name: str, ep: int) -> None:
    """The data set is refused, and nothing else: with another one they are sound on 8 and 64 processes."""
    loaded = config_file.read([str(HERE / f"{name}.toml")])
    (dataset,) = told(loaded.problems)
    assert dataset.startswith("training.dataset = 'c4': is built into torchtitan only")
    (folder,) = told(loaded.notes)
    assert folder.startswith("job.dump_folder = './outputs'")

    config = config_file.load([str(HERE / f"{name}.toml"), "--training.dataset", "texts"])
    assert check(config, 8) == check(config, 64) == []
    assert config.parallelism.expert_parallel_degree == ep and config.training.dataset == "texts"
    assert (config.optimizer.lr, config.lr_scheduler.decay_type, config.compile.components) == (
        2.2e-4,
        "cosine",
        ["loss"],
    )


def test_236b() -> None:
    """0.2 ships no file of it; one is the 16B file with another flavor."""
    words = ["--training.dataset=texts", "--model.flavor=236B"]
    assert check(config_file.load([str(HERE / "deepseek_v3_16b.toml"), *words]), 64) == []


@pytest.mark.parametrize("path", sorted(HERE.glob("*.toml")), ids=lambda path: path.stem)
def test_every_value_that_exists_here_arrives(path: Path) -> None:
    """Each key of the three files is either a key here, with its value, or one whose fate the table tells."""
    config = config_file.load([str(path), "--training.dataset=texts"])
    lines = [line for line in path.read_text().splitlines() if " = " in line]
    section, arrived = "", 0
    for line in path.read_text().splitlines():
        section = line[1:-1] if line.startswith("[") else section
        name, _, value = line.partition(" = ")
        key = f"{section}.{name}"
        if value and key in LEAVES and key != "training.dataset":
            assert (
                config_file.load([str(path), "--training.dataset=texts", f"--{key}={value.strip(chr(34))}"]) == config
            )
            arrived += 1
        elif value:
            assert titan02.change(key) is not None
    assert len(lines) in (51, 52) and arrived > 30


# ---------------------------------------------------------------------------------------------------------------------
# All keys


def test_every_key_of_0_2_2_is_the_same_or_in_the_table() -> None:
    assert len(DEFAULTS_022) == 149
    unknown = [
        key for key in DEFAULTS_022 if key not in SAME and titan02.change(key) is None and key != "job.config_file"
    ]
    assert unknown == []
    assert set(SAME) <= LEAVES.keys() & DEFAULTS_022.keys() and not CHANGED.keys() & set(SAME)


def test_the_table_fits_the_schema() -> None:
    """A key renamed or translated leads to one that exists; what is ignored is no key here; what is refused for some
    values is one, and otherwise not."""
    for key, change in CHANGED.items():
        match change:
            case Renamed(to):
                assert to in LEAVES and key not in LEAVES
            case Translated(to, values):
                assert to in LEAVES and key not in LEAVES and values
            case Ignored():
                assert key not in LEAVES, f"{key} exists now: take it out of CHANGED"
            case Refused(unless=unless, only=only):
                assert bool(unless) != bool(only) and bool(only) == (key in LEAVES), key
            case titan02.Differs():
                assert key in LEAVES


def test_keys_that_there_were_lead_to_keys_that_there_are() -> None:
    for key, change in FORMER.items():
        assert change.to in LEAVES and key not in LEAVES and key not in CHANGED
    assert titan02.refusal("plan.precision", "mxfp8") == "plan.precision was renamed to precision.recipe"
    assert "plan.precision" not in titan02_docs.markdown()


def test_defaults_that_differ_are_listed() -> None:
    nothing = (None, "", [], -1)
    ours = Config()
    differ = {
        key: value
        for key, value in DEFAULTS_022.items()
        if key in LEAVES and get(ours, key) != value and not (value in nothing and get(ours, key) in nothing)
    }
    # Not worth a row: a text, a number of batches that was decided elsewhere, the seed in the sentence above the table.
    for key in ("job.description", "training.dataloader.prefetch_factor", "debug.seed"):
        del differ[key]
    assert differ == DEFAULTS


def test_a_file_of_all_defaults_of_0_2_2(tmp_path: Path) -> None:
    """As torchtitan saves it: what differs is refused by key, and the rest is read."""
    lines = [f"{key} = {literal(value)}" for key, value in DEFAULTS_022.items() if value is not None]
    loaded = read(tmp_path, "\n".join(lines))
    assert [problem.split(" = ")[0] for problem in told(loaded.problems)] == [
        "model.name",
        "training.dataset",
        "validation.dataset",
        "validation.steps",
    ]
    assert [note.split(" = ")[0] for note in told(loaded.notes)] == [
        "activation_checkpoint.selective_ac_option",
        "activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns",
        "validation.local_batch_size",
        "validation.seq_len",
        "validation.dataloader.num_workers",
        "validation.dataloader.persistent_workers",
        "validation.dataloader.pin_memory",
        "job.dump_folder",
        "model.flavor",
    ]


# ---------------------------------------------------------------------------------------------------------------------
# What happens to a key


@pytest.mark.parametrize(
    ("text", "force_balance"),
    [
        ("[debug]\nmoe_force_load_balance = true", "round_robin"),
        ("[training]\ndebug_moe_force_load_balance = true", "round_robin"),
        ("[debug]\nmoe_force_load_balance = false", "none"),
        ("[debug]\nmoe_force_load_balance = false\n[moe]\nforce_balance = 'balanced_random'", "balanced_random"),
    ],
)
def test_translations(tmp_path: Path, text: str, force_balance: str) -> None:
    loaded = read(tmp_path, text)
    assert loaded.problems == [] and loaded.config.moe.force_balance == force_balance
    assert len(loaded.notes) == (force_balance == "round_robin")


@pytest.mark.parametrize("value", ["1", '"true"', "[true]"])
def test_a_value_of_another_type_does_not_pass_for_a_harmless_one(tmp_path: Path, value: str) -> None:
    """True equals 1 in Python, and must not in a table of values."""
    (problem,) = told(read(tmp_path, f"[debug]\nmoe_force_load_balance = {value}").problems)
    assert "is moe.force_balance here; choose from False, True" in problem


def test_the_command_line_of_0_2(tmp_path: Path) -> None:
    words = "--metrics.save_for_all_ranks --model.converters=[] --profiling.no_enable_profiling "
    words += "--debug.moe_force_load_balance"
    loaded = read(tmp_path, "", *words.split())
    assert loaded.problems == [] and loaded.config.moe.force_balance == "round_robin"
    assert told(loaded.notes)[0].startswith("metrics.save_for_all_ranks = True is ignored: ")
    (problem,) = read(tmp_path, "", "--model.converters=float8,mx").problems
    assert problem.startswith("command line: --model.converters=float8,mx: model.converters = ")


def test_print_config_in_a_file_is_what_users_of_0_2_write(tmp_path: Path) -> None:
    assert read(tmp_path, "[job]\nprint_config = false").notes == []
    loaded = read(tmp_path, "[job]\nprint_config = true")
    assert loaded.problems == [] and "--print_config prints the configuration and stops" in loaded.notes[0]
    assert len(loaded.notes) == 1


def test_a_typo_in_a_section_of_0_2(tmp_path: Path) -> None:
    loaded = read(tmp_path, "[memory_estimation]\nenabel = true\n[quantize.linear.int4]\nx = 1\n")
    assert told(loaded.problems) == ["unknown key memory_estimation.enabel", "unknown section [quantize.linear.int4]"]


def test_the_docs_are_current() -> None:
    docs = Path(__file__).parents[1] / "docs" / "coming_from_torchtitan.md"
    assert docs.read_text(encoding="utf-8") == titan02_docs.markdown(), (
        "run `python -m titan_moe.titan02_docs > docs/coming_from_torchtitan.md`"
    )
