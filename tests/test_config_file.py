"""Configuration files and overrides: what is accepted arrives as written, what is not is named, all of it at once."""

import os
import subprocess
import sys
from dataclasses import is_dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from titan_moe import config_file, launch
from titan_moe.config import Config
from titan_moe.config_check import data_parallel_degree, gradient_accumulation_steps
from titan_moe.config_file import LEAVES, ConfigError, check, load, to_toml
from titan_moe.config_keys import build, get

ROOT = Path(__file__).parent.parent
CONFIGS = sorted((ROOT / "train_configs").glob("*.toml"))


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Writes a text to a file and returns its path as `load` takes it."""
    path = tmp_path_factory.mktemp("config") / "run.toml"

    def write(text: str | bytes) -> str:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return str(path)

    return write


def problems(*argv: str) -> list[str]:
    with pytest.raises(ConfigError) as error:
        load(list(argv))
    return error.value.problems


# ---------------------------------------------------------------------------------------------------------------------
# Files


def test_empty_file_is_the_defaults(file: Any) -> None:
    assert load([file("")]) == Config()


def test_five_mistakes_are_five_lines(file: Any) -> None:
    """Wrong type, renamed key, misspelt key, another renamed key, wrong choice: all named in one message."""
    path = file(
        '[optimizer]\nlr = "8e-4"\n[lr_scheduler]\nlr_min = 0.1\n[training]\nstpes = 10\n'
        '[checkpoint]\nenable_checkpoint = true\n[activation_checkpoint]\nmode = "selectiv"\n'
    )
    with pytest.raises(ConfigError) as error:
        load([path])
    assert str(error.value).splitlines() == [
        f"{path}: 5 mistakes",
        f"    {path}:2: optimizer.lr = '8e-4': expected float, got str",
        f"    {path}:4: lr_scheduler.lr_min was renamed to lr_scheduler.min_lr_factor",
        f"    {path}:6: unknown key training.stpes (did you mean training.steps?)",
        f"    {path}:8: checkpoint.enable_checkpoint was renamed to checkpoint.enable",
        f"    {path}:10: activation_checkpoint.mode = 'selectiv': choose from 'none', 'selective', 'full' "
        "(did you mean 'selective'?)",
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[training]\nsteps = true", "training.steps = True: expected int, got bool"),
        ("[training]\nsteps = 10.0", "training.steps = 10.0: expected int, got float"),
        ("[training]\nmax_norm = false", "training.max_norm = False: expected float, got bool"),
        ("[checkpoint]\nenable = 1", "checkpoint.enable = 1: expected bool, got int"),
        ("[job]\ndescription = 5", "job.description = 5: expected str, got int"),
        ("[model]\ndim = 'x'", "model.dim = 'x': expected int, got str"),
        ("[model]\ndim = 2026-11-29", "model.dim = datetime.date(2026, 11, 29): expected int, got date"),
        ("[model]\nflavor = '16b'", "'8x7B', '8x22B' (did you mean '16B'?)"),
        ("[model]\nscore_func = 3", "model.score_func = 3: choose from 'sigmoid', 'softmax'"),
        ("[compile]\ncomponents = 'loss'", "compile.components = 'loss': expected list, got str"),
        ("[compile]\ncomponents = ['loss', 'modle']", "choose from 'model', 'loss' (did you mean 'model'?)"),
        ("[compile]\ncomponents = [true]", "compile.components[0] = True: choose from 'model', 'loss'"),
        ("[compile]\ncomponents = [\n'loss',\n5,\n]", ":4: compile.components[1] = 5: choose from"),
        ("[training]\ndataloader = 4", "training.dataloader = 4: is a section; write [training.dataloader]"),
        ("[[training]]\nsteps = 4", "training = [{'steps': 4}]: is a section; write [training]"),
        ("steps = 4", "unknown key steps (steps lives in section [training] or [validation])"),
        ("[optimizer]\nwarmup_steps = 4", "unknown key optimizer.warmup_steps (warmup_steps lives in section [lr_sch"),
        ("[training]\nnum_workers = 4", "num_workers lives in section [training.dataloader])"),
        ("[lr_schedular]\nwarmup_steps = 4", "unknown section [lr_schedular] (did you mean [lr_scheduler]?)"),
        ("[moe.routing]\nx = 4", "unknown section [moe.routing]"),
        ("[training]\nsteps = 1\nsteps = 2", "is not valid TOML: Cannot overwrite a value"),
        ("[training\n", "is not valid TOML: "),
        ("x = " + "9" * 5000, "is not valid TOML: "),
        (b"[job]\ndescription = '\xff'", ":2: is not UTF-8 text: invalid start byte at byte 21"),
        ("x = " + "[" * 3000 + "]" * 3000, "is not valid TOML: "),
        ("[job]\ndescription = 'x'\n\n[job]\n", ":4: is not valid TOML: Cannot declare ('job',) twice"),
        ("[job]\ndescription = 'x'\ndescription = 'y'\n", "it is there already, in line 2"),
        ("[job]\ndescription = [\n'x' '\n", "is not valid TOML: "),
        ('"training.steps" = 5', 'unknown key "training.steps" (without the quotes it is training.steps)'),
        ('[training]\n"" = 5', 'unknown key training.""'),
        ('[training]\n"a\\nb" = 5', "unknown key training.a\\nb"),
        ("[training]\nbase = 'x.toml'", "base stands at the top of a file, before its first section"),
        ("[job]\ndescription = 5.0e" + "0" * 300, "job.description = 5.0: expected str, got float"),
        ("[training]\nsteps = '" + "ab" * 500 + "'", "bababa ... babababab': expected int, got str"),
    ],
)
def test_one_mistake_is_one_clear_line(file: Any, text: str | bytes, expected: str) -> None:
    (problem,) = problems(file(text))
    assert expected in problem


def test_a_key_we_lack_is_not_taken_for_another(file: Any) -> None:
    """Somebody who asks for sequence parallelism must not be talked into expert parallelism."""
    (problem,) = problems(file("[parallelism]\nsequence_parallel_degree = 2\n"))
    assert problem.endswith(":2: unknown key parallelism.sequence_parallel_degree")


def test_unreadable_files(tmp_path: Path) -> None:
    absent, huge, pipe = (tmp_path / name for name in ("absent.toml", "huge.toml", "pipe.toml"))
    assert problems(str(absent)) == [f"{absent}: cannot be read: No such file or directory"]
    assert problems(str(tmp_path)) == [f"{tmp_path}: cannot be read: Is a directory"]
    assert problems() == problems("--training.steps=5") == [config_file.USAGE]
    huge.write_bytes(b"#" * (1 << 20) + b"\n")
    assert problems(str(huge)) == [f"{huge}: has 1,048,577 bytes; a configuration has 1,048,576 at most"]
    os.mkfifo(pipe)
    assert "is no regular file, and every process has to read it again" in problems(str(pipe))[0]
    assert problems("a" * 300 + ".toml")[0].endswith("cannot be read: File name too long")
    # Overrides are read all the same, and what is wrong with them is told too.
    assert len(problems(str(absent), "--training.stpes=5", "--training.steps=x")) == 3


def test_integers_are_floats_where_floats_belong(file: Any) -> None:
    config = load([file("[training]\nmax_norm = 1\n[optimizer]\nlr = " + "9" * 400)])
    assert type(config.training.max_norm) is float and config.training.max_norm == 1.0
    assert check(config, 1) == ["optimizer.lr = inf: must be finite"]


def test_byte_order_mark_and_windows_line_ends(file: Any) -> None:
    assert load([file(b"\xef\xbb\xbf[training]\r\nsteps = 7\r\n")]).training.steps == 7


# ---------------------------------------------------------------------------------------------------------------------
# Overrides


@pytest.mark.parametrize(
    ("words", "path", "value"),
    [
        (["--training.steps=5"], "training.steps", 5),
        (["--training.steps", "5"], "training.steps", 5),
        (["--training.steps=5", "--training.steps=6"], "training.steps", 6),
        (["--training.local-batch-size=5"], "training.local_batch_size", 5),
        (["--lr-scheduler.warmup-steps", "5"], "lr_scheduler.warmup_steps", 5),
        (["--training.global_batch_size", "-1"], "training.global_batch_size", -1),
        (["--training.global_batch_size=-1"], "training.global_batch_size", -1),
        (["--training.dataloader.num_workers=2"], "training.dataloader.num_workers", 2),
        (["--optimizer.lr=1"], "optimizer.lr", 1.0),
        (["--optimizer.lr", "1e-3"], "optimizer.lr", 1e-3),
        (["--checkpoint.enable"], "checkpoint.enable", True),
        (["--checkpoint.enable", "--training.steps=5"], "checkpoint.enable", True),
        (["--checkpoint.enable=True"], "checkpoint.enable", True),
        (["--validation.enable", "false"], "validation.enable", False),
        (["--validation.no_enable"], "validation.enable", False),
        (["--job.description=5"], "job.description", "5"),
        (["--job.description="], "job.description", ""),
        (["--job.description", "a = b, c"], "job.description", "a = b, c"),
        (["--job.description=--x"], "job.description", "--x"),
        (["--job.description=none"], "job.description", "none"),
        (["--job.description=größer 模型 🚀"], "job.description", "größer 模型 🚀"),
        (["--model.flavor=16B"], "model.flavor", "16B"),
        (["--model.score_func=softmax"], "model.score_func", "softmax"),
        (["--model.dim=512"], "model.dim", 512),
        (["--model.dim=512", "--model.dim=none"], "model.dim", None),
        (["--lr_scheduler.decay_ratio", "None"], "lr_scheduler.decay_ratio", None),
        (["--activation_checkpoint.mode=none"], "activation_checkpoint.mode", "none"),
        (["--compile.components=loss"], "compile.components", ["loss"]),
        (["--compile.components", "loss,model"], "compile.components", ["loss", "model"]),
        (["--compile.components=loss, model"], "compile.components", ["loss", "model"]),
        (["--compile.components=['model']"], "compile.components", ["model"]),
        (["--compile.components="], "compile.components", []),
        (["--moe.recv_buffer=worst_case"], "moe.recv_buffer", "worst_case"),
        (["--moe.recv_buffer=2"], "moe.recv_buffer", 2.0),
        (["--moe.recv_buffer=1.25"], "moe.recv_buffer", 1.25),
    ],
)
def test_override_forms(file: Any, words: list[str], path: str, value: object) -> None:
    text = "[training]\nsteps = 3\n[lr_scheduler]\ndecay_ratio = 0.5\n[validation]\nenable = true\n"
    got = attrgetter(path)(load([file(text), *words]))
    assert got == value and type(got) is type(value)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--training.stpes=5"], "--training.stpes: unknown key training.stpes (did you mean training.steps?)"),
        (["--training.compile"], "--training.compile: training.compile was renamed to compile.enable"),
        (["--foo.bar=5"], "--foo.bar: unknown section [foo]"),
        (["--training.steps"], "--training.steps: needs a value"),
        (["--training.steps", "--checkpoint.enable"], "--training.steps: needs a value"),
        (["--training.no_steps"], "--training.no_steps: unknown key training.no_steps (did you mean training.steps?)"),
        (["--training.steps=ten"], "--training.steps=ten: expected int, got str"),
        (["--training.steps=none"], "--training.steps=none: expected int, got str"),
        (["--training.steps=5\nx = 6"], "--training.steps=5\\nx = 6: expected int, got str"),
        (["--checkpoint.enable=1"], "--checkpoint.enable=1: expected bool, got int"),
        (["--moe.recv_buffer=worst-case"], "(did you mean 'worst_case'?), or a number"),
        (["--moe.recv_buffer=true"], "--moe.recv_buffer=true: expected float, got bool"),
        (["--compile.components=loss,modle"], "choose from 'model', 'loss' (did you mean 'model'?)"),
        (["--training.dataloader=2"], "--training.dataloader: is a section; write --training.dataloader.KEY=VALUE"),
        (["--job.description=\udcff"], "command line: --job.description=\\udcff: is not UTF-8 text"),
        (["--base=other.toml"], 'base=other.toml: is for files; write base = "OTHER.toml" at the top of one'),
        (["-training.steps=5"], "'-training.steps=5': unexpected; overrides are written --section.key=value"),
        (["other.toml"], "run.toml, other.toml): give one, which may name a base"),
        (["--job.config_file=other.toml"], "2 configuration files"),
        (["--help"], "--help: unknown key help"),
        (["--compile.components=loss,x"], "--compile.components=loss,x: compile.components[1] = 'x': choose from"),
        (
            ["--metrics.save_for_all_ranks=1", "--model.converters=float8"],
            "--model.converters=float8: model.converters =",
        ),
    ],
)
def test_wrong_overrides(file: Any, words: list[str], expected: str) -> None:
    found = problems(file(""), *words)
    assert expected in found[0] and all(problem.startswith("command line: ") for problem in found)


def test_mistakes_in_file_and_overrides_come_together(file: Any) -> None:
    assert len(problems(file("[training]\nsteps = 'x'\nstpes = 3"), "stray", "--a.b=1", "--training.steps=y")) == 5


def test_config_file_option_of_torchtitan(file: Any) -> None:
    path = file("[training]\nsteps = 3")
    for words in (["--job.config_file", path], [f"--job.config_file={path}"], [f"--job.config-file={path}"]):
        assert load([*words, "--training.gc_freq=7"]) == load([path, "--training.gc_freq=7"])


@given(st.lists(st.text(max_size=8) | st.sampled_from(["--training.steps", "--a.b=", "--checkpoint.enable", "-1"])))
@settings(max_examples=50, deadline=None)
def test_any_command_line_is_read_or_refused(file: Any, words: list[str]) -> None:
    """No command line ends in anything but a configuration or a ConfigError."""
    try:
        load([file(""), *words])
    except ConfigError as error:
        assert error.problems


# ---------------------------------------------------------------------------------------------------------------------
# A base


def test_a_file_is_laid_over_its_base_key_by_key(tmp_path: Path) -> None:
    """Three files in two folders, each relative to the one that names it; a list replaces the list of the base."""
    (tmp_path / "common").mkdir()
    (tmp_path / "common" / "root.toml").write_text(
        "[training]\nsteps = 1\nseq_len = 64\n[compile]\ncomponents = ['model']\n[model]\ndim = 512\n"
    )
    (tmp_path / "common" / "middle.toml").write_text(
        "base = 'root.toml'\n[training]\nsteps = 2\nmax_norm = 2.0\n[compile]\ncomponents = ['loss']\n"
    )
    mine = tmp_path / "mine.toml"
    mine.write_text("base = 'common/middle.toml'\ntraining.steps = 3\nmodel.dim = 'none'\n")
    loaded = config_file.read([str(mine), "--training.max_norm=3"])
    training = loaded.config.training
    assert (training.steps, training.seq_len, training.max_norm) == (3, 64, 3.0)
    assert loaded.config.compile.components == ["loss"] and loaded.config.model.dim is None
    assert loaded.origins == {
        "training.steps": f"{mine}:2",
        "model.dim": f"{mine}:3",
        "training.max_norm": "command line",
        "compile.components": f"{tmp_path}/common/middle.toml:6",
        "training.seq_len": f"{tmp_path}/common/root.toml:3",
    }
    assert load([str(mine), "--training.seq_len=32"]).training.seq_len == 32


def test_bases_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    bases = {"a": "b", "b": "sub/../c", "c": "a", "self": "self", "lost": "gone", "broken": "bad"}
    for name, base in bases.items():
        Path(f"{name}.toml").write_text(f"\nbase = '{base}.toml'\n[training]\nstpes = 1\n")
    Path("bad.toml").write_text("[training\n")
    Path("sub").mkdir()
    *typos, circle = problems("a.toml")
    assert [typo.split(": ")[0] for typo in typos] == ["a.toml:4", "b.toml:4", "sub/../c.toml:4"]
    assert circle == (
        "sub/../c.toml:2: base = 'a.toml': goes round in a circle, a.toml -> b.toml -> sub/../c.toml -> sub/../a.toml"
    )
    assert problems("self.toml")[1].endswith("goes round in a circle, self.toml -> self.toml")
    assert problems("lost.toml")[1] == (
        "lost.toml:2: base = 'gone.toml': gone.toml: cannot be read: No such file or directory"
    )
    assert problems("broken.toml")[1].startswith("broken.toml:2: base = 'bad.toml': bad.toml:1: is not valid TOML: ")
    for base in ("5", "['a.toml', 'b.toml']", "''", '"a\\u0000"', "{x = 1}"):
        Path("mine.toml").write_text(f"base = {base}\n")
        (problem,) = problems("mine.toml")
        assert problem.startswith("mine.toml:1: base = ") and problem.endswith(": must name one other file")


def test_a_mistake_in_a_base_counts_even_where_it_is_overridden(tmp_path: Path) -> None:
    (tmp_path / "root.toml").write_text("[training]\nsteps = 'x'\n")
    mine = tmp_path / "mine.toml"
    mine.write_text("base = 'root.toml'\n[training]\nsteps = 3\n")
    assert problems(str(mine), "--training.steps=4") == [
        f"{tmp_path}/root.toml:2: training.steps = 'x': expected int, got str"
    ]


# ---------------------------------------------------------------------------------------------------------------------
# Where a problem is written


def test_cross_checks_name_the_lines_of_all_their_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("root.toml").write_text("\n[training]\nsteps = 50\nseq_len = 32768\n")
    Path("mine.toml").write_text("base = 'root.toml'\n[lr_scheduler]\ntotal_steps = 9\n")
    loaded = config_file.read(["mine.toml", "--parallelism.expert_parallel_degree=3"])
    degree, length, ends = loaded.located(check(loaded.config, 1))
    assert ends.startswith("mine.toml:3: lr_scheduler.total_steps = 9: must be at least training.steps = 50")
    assert ends.endswith(" (training.steps: root.toml:3)")
    # A default that does not fit points to what was set.
    assert length.startswith("root.toml:4: training.seq_len = 32768: longer than the rotary table, model.max_seq_len")
    assert degree.startswith("command line: parallelism.expert_parallel_degree = 3: must divide ")


def test_what_follows_from_a_reported_mistake_is_not_reported(file: Any) -> None:
    """total_steps = 9 is too few for the default of 10000 steps, which nobody asked for; that top_k is 0 stays true."""
    path = file("[training]\nsteps = 'ten'\n[lr_scheduler]\ntotal_steps = 9\n[optimizer]\nlr = 0\n")
    loaded = config_file.read([path])
    assert len(loaded.problems) == 1
    assert loaded.located(check(loaded.config, 1)) == [f"{path}:6: optimizer.lr = 0.0: must be greater than 0"]
    loaded = config_file.read([path, "--parallelism.expert_paralel_degree=2"])
    assert not loaded.located(["moe.dispatcher = x: does not go with parallelism.expert_parallel_degree = 1"])


# ---------------------------------------------------------------------------------------------------------------------
# Printing


def values_of(hint: Any) -> st.SearchStrategy[Any]:
    """Values of a type of the schema, among them those that are hard to print."""
    if isinstance(hint, type) and is_dataclass(hint):
        return st.builds(hint, **{name: values_of(inner) for name, inner in get_type_hints(hint).items()})
    if get_origin(hint) is Literal:
        return st.sampled_from(get_args(hint))
    if get_origin(hint) is list:
        return st.lists(values_of(get_args(hint)[0]), max_size=3)
    if get_args(hint):  # X | None
        return st.one_of([st.none() if arg is type(None) else values_of(arg) for arg in get_args(hint)])
    basic: dict[Any, st.SearchStrategy[Any]] = {
        bool: st.booleans(),
        int: st.integers(),
        float: st.floats(allow_nan=False),
        str: st.text(st.characters(exclude_characters="\0", codec="utf-8"))
        | st.sampled_from(['"', "\\", "\x7f", "\x01\x1b", "\r\n", "'''", "\u2028", "\ufeff", "🚀"]),
    }
    return basic[hint]


@given(values_of(Config), st.dictionaries(st.sampled_from([*LEAVES]), st.text() | st.just("a\nb # c\r[d]")))
@settings(max_examples=60, deadline=None)
def test_what_is_printed_reads_back_equal(file: Any, config: Config, origins: dict[str, str]) -> None:
    """Whatever the values, and whatever the names of the files that they come from."""
    if config.training.mixture:
        config.training.dataset = Config().training.dataset  # as it is read, because a mixture takes its place
    config.model.scale_down = False  # a twin is another configuration
    assert load([file(to_toml(config))]) == load([file(to_toml(config, origins))]) == config


def test_printed_form(file: Any) -> None:
    text = to_toml(load([file(""), "--optimizer.eps=1e-8", '--job.description=a "b"\n\x7f']))
    assert '[optimizer]\nname = "AdamW"\n' in text and "\neps = 1e-08\n" in text
    assert '\ndescription = "a \\"b\\"\\n\\u007f"\n' in text
    assert "[training.dataloader]\nnum_workers = 0\n" in text and "decay_ratio" not in text


def test_unset_is_the_default_of_whatever_can_be_unset() -> None:
    """Or leaving it out of the printed form would not read back as unset."""
    defaults = build({})
    optional = [key for key, hint in LEAVES.items() if type(None) in get_args(hint)]
    assert optional and all(get(defaults, key) is None for key in optional)


def test_print_config_prints_where_values_come_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """On stdout and nothing else there, status 0, also for a world that does not fit, and nothing is created."""
    monkeypatch.chdir(tmp_path)
    Path("mine \n.toml").write_text("base = 'root.toml'\n[job]\ndescription = 'größer 模型'\n")
    Path("root.toml").write_text("[training]\nsteps = 5\n[metrics]\nsave_for_all_ranks = true\n")
    argv = ["mine \n.toml", "--print_config", "--parallelism.expert_parallel_degree=64"]
    before = sorted(Path().iterdir())
    assert launch.main(argv, {"NGPU": "three"}) == 0
    out, err = capfd.readouterr()
    assert "\nsteps = 5  # root.toml:2\n" in out and "\nexpert_parallel_degree = 64  # command line\n" in out
    assert '\ndescription = "größer 模型"  # mine \\n.toml:3\n' in out and "\nseq_len = 2048\n" in out
    assert err.startswith("note: root.toml:4: metrics.save_for_all_ranks = True is ignored: ")
    assert sorted(Path().iterdir()) == before
    Path("printed.toml").write_text(out, encoding="utf-8")
    assert load(["printed.toml"]) == load([argv[0], argv[2]])
    assert launch.main([*argv, "--training.stpes=4", "--print-config"], {}) == 2
    out, err = capfd.readouterr()
    assert out == "" and "unknown key training.stpes" in err


# ---------------------------------------------------------------------------------------------------------------------
# Cross-field checks


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_shipped_configurations_load_and_fit_some_world(path: Path) -> None:
    config = load([str(path)])
    worlds = [2**n for n in range(14)]
    assert any(check(config, world) == [] for world in worlds), check(config, worlds[-1])


@pytest.mark.parametrize(
    ("words", "world", "expected"),
    [
        # degrees
        ("parallelism.data_parallel_replicate_degree=4", 6, "4: must divide the 6 processes"),
        ("parallelism.data_parallel_replicate_degree=4", 2, "; choose one of 1, 2"),
        ("parallelism.data_parallel_shard_degree=4", 6, "1 x 4 = 4, but there are 6 processes"),
        ("parallelism.data_parallel_shard_degree=-2", 1, "must be -1 or at least 1"),
        (
            "parallelism.expert_parallel_degree=8",
            4,
            "8: must divide data_parallel_shard_degree = 4; choose one of 1, 2, 4",
        ),
        ("parallelism.expert_parallel_degree=16", 16, "must divide model.num_experts = 8; choose one of 1, 2, 4, 8"),
        ("parallelism.expert_parallel_degree=3", 4, "data_parallel_shard_degree = 4 and model.num_experts = 8"),
        # batch
        (
            "training.global_batch_size=40",
            4,
            "local_batch_size x data-parallel degree = 8 x 4 = 32; choose 32 or 64, or",
        ),
        ("training.global_batch_size=8", 2, "8 x 2 = 16; choose 16, or -1"),
        ("training.global_batch_size=0", 2, "8 x 2 = 16; choose 16, or -1"),
        ("training.global_batch_size=-16", 2, "8 x 2 = 16; choose 16, or -1"),
        # lengths
        ("training.seq_len=32768", 1, "32768: longer than the rotary table, model.max_seq_len = 16384"),
        ("lr_scheduler.total_steps=99", 1, "must be at least training.steps = 10000"),
        ("validation.enable --validation.holdout=1.0", 1, "validation.holdout = 1.0: must be greater than 0 and less"),
        # files
        ("training.dataset=", 1, "training.dataset"),
        ("checkpoint.folder=", 1, "checkpoint.folder"),
        ("checkpoint.folder=/x", 1, "checkpoint.folder"),
        ("checkpoint.folder=x/../..", 1, "checkpoint.folder"),
        ("metrics.save_tb_folder=.", 1, "metrics.save_tb_folder"),
        ("checkpoint.create_seed_checkpoint", 1, "saves nothing without checkpoint.enable"),
        ("checkpoint.create_seed_checkpoint --checkpoint.enable --checkpoint.load_only", 1, "choose one"),
        # the model's own
        ("model.top_k=0", 1, "model.top_k = 0: must lie in 1 .. num_experts = 8"),
        # single numbers
        ("training.steps=0", 1, "training.steps = 0: must be at least 1"),
        ("checkpoint.keep_latest_k=1", 1, "must be 0 (keep all) or at least 2"),
        ("optimizer.beta2=1", 1, "optimizer.beta2 = 1.0: must be at least 0 and less than 1"),
        ("lr_scheduler.decay_ratio=1.1", 1, "lr_scheduler.decay_ratio = 1.1: must lie in 0 .. 1"),
        ("debug.seed=9223372036854775808", 1, "debug.seed = 9223372036854775808: must lie in 0 .. 2**63 - 1"),
        ("optimizer.lr=nan", 1, "optimizer.lr = nan: must be finite"),
        ("model.route_scale=inf", 1, "model.route_scale = inf: must be finite"),
        ("training.dataloader.num_workers=-1", 1, "training.dataloader.num_workers = -1: must be at least 0"),
    ],
)
def test_one_problem_with_its_arithmetic(file: Any, words: str, world: int, expected: str) -> None:
    (problem,) = check(load([file(""), *f"--{words}".split()]), world)
    assert expected in problem


def test_problems_of_all_kinds_come_together(file: Any) -> None:
    words = "--model.top_k=0 --training.seq_len=32768 --training.global_batch_size=3 --checkpoint.folder=/x"
    words += " --optimizer.lr=0"
    config = load([file(""), *words.split()])
    assert len(check(config, 1)) == 5
    config.training.local_batch_size = config.loss.num_chunks = 0  # without these less arithmetic, but all the rest
    assert len(check(config, 1)) == 6
    config.training.local_batch_size = config.loss.num_chunks = config.optimizer.lr = 1
    with pytest.raises(ConfigError, match="configuration for 1 processes: 3 mistakes\n    model.top_k"):
        config_file.raise_on_problems(config, 1)


def test_rules_name_existing_keys_once() -> None:
    from titan_moe.config_check import RULES

    named = [path for _, _, paths in RULES for path in paths.split()]
    assert len(named) == len(set(named)) and set(named) <= config_file.LEAVES.keys()


def test_good_combinations(file: Any) -> None:
    for words, world in [
        ("", 1),
        ("--parallelism.data_parallel_replicate_degree=2 --parallelism.expert_parallel_degree=4", 8),
        ("--training.global_batch_size=64", 4),
        ("--checkpoint.load_only --checkpoint.keep_latest_k=0 --lr_scheduler.decay_ratio=1", 1),
        ("--checkpoint.enable --checkpoint.create_seed_checkpoint --checkpoint.folder=a/b", 1),
        ("--validation.enable --validation.dataset=x --validation.holdout=0", 1),
        ("--lr_scheduler.total_steps=10000 --moe.load_balance_coeff=0", 1),
    ]:
        assert check(load([file(""), *words.split()]), world) == [], words


def test_degrees_and_accumulation(file: Any) -> None:
    """8 ranks as 2 copies of 4 shards; 8 x 8 sequences per pass, 192 per step: 3 passes."""
    config = load([file(""), "--parallelism.data_parallel_replicate_degree=2", "--training.global_batch_size=192"])
    assert data_parallel_degree(config, 8) == (2, 4)
    assert gradient_accumulation_steps(config, 8) == 3
    assert gradient_accumulation_steps(Config(), 8) == 1


def test_model_flavor_has_the_overrides() -> None:
    config = Config()
    plain = config_file.model_flavor(config)
    config.model.route_norm, config.model.dim = False, 512
    assert config_file.model_flavor(config) == replace(plain, route_norm=False, dim=512)


# ---------------------------------------------------------------------------------------------------------------------
# Imports


def test_needs_neither_torch_nor_torchtitan() -> None:
    code = "import sys, titan_moe.launch; print([name for name in ('torch', 'torchtitan') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
