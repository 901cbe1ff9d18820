"""The documentation holds: every command on a page runs, or has an entry below that says where it is tested or why it
cannot run here; links lead somewhere; what is generated is current.

A new command needs an entry in COMMANDS, or `test_every_command_has_an_entry` fails.
"""

import ast
import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from scripts import config_docs, file_map, region_picture
from tests.shell_blocks import PAGES, REPO, bash, clone, commands, fenced, shell_blocks, text_of
from titan_moe.config_check import check
from titan_moe.config_file import read
from titan_moe.dry_run import check as dry_run_check


@dataclass
class Runs:
    """In the order of its page, in a copy of the repository that the page has to itself."""

    slow: bool = False


@dataclass
class RunBy:
    """Another test runs it, or what it would."""

    by: str


@dataclass
class Reads:
    """It needs what is not here. Its configuration is read and checked for so many GPUs (default: plan.gpus)."""

    why: str
    gpus: int | None = None


How = Runs | RunBy | Reads

COMMANDS: dict[str, dict[str, How]] = {
    "README.md": {
        "./run_train.sh train_configs/debug_model.toml\n": RunBy("tests/test_readme.py::test_the_first_command"),
        "./run_tests.sh": RunBy("tests/test_readme.py::test_the_second_command_runs_the_tests"),
        "--plan.hardware=GB300": Runs(),
        "hf download Qwen/Qwen3-30B-A3B": RunBy("tests/huggingface/test_commands.py::test_a_folder_becomes_a_run"),
    },
    "CONTRIBUTING.md": {
        "pre-commit install": RunBy("tests/test_readme.py::test_the_second_command_runs_the_tests"),
        "python -m scripts.support_table": RunBy("tests/test_docs.py::test_every_generator_is_listed_for_contributors"),
    },
    "docs/backends.md": {"--moe.experts=loop": Runs(slow=True)},
    "docs/benchmarks.md": {
        "--suite layer,step": RunBy("tests/benchmarks/test_suites.py"),
        "--suite all --quick": RunBy("tests/benchmarks/test_suites.py"),
    },
    "docs/checkpoints.md": {
        "outputs/kept": Runs(slow=True),
        "titan_moe.sample": RunBy("tests/huggingface/test_sample.py"),
    },
    "docs/cluster.md": {
        "NNODES=2": Reads("two nodes", gpus=2),
        "--segment=16": Reads("SLURM", gpus=256),
        "docker build": RunBy("tests/test_container.py::test_instructions_are_dockers"),
        "docker run": Reads("a container engine", gpus=8),
        "enroot import": Reads("a container engine, and SLURM with pyxis", gpus=256),
    },
    "docs/coming_from_torchtitan.md": {"tests/torchtitan_0_2_2": Runs()},
    "docs/configuration.md": {"--print_config": Runs()},
    "docs/data.md": {
        "hf download": Reads("downloads from huggingface.co"),
        "titan_moe.tokenize": Runs(),
    },
    "docs/development.md": {
        "python -m pytest": Runs(slow=True),
        "--moe.dispatcher=allgather": RunBy("tests/test_development.py::test_the_dispatcher"),
        "--moe.experts=bmm": RunBy("tests/test_development.py::test_the_experts"),
        "--model.name=qwen3_raw": RunBy("tests/test_development.py::test_the_family"),
        "tables/a.csv": RunBy("tests/test_development.py::test_the_kind_of_data"),
    },
    "docs/dry_run.md": {"RANK=3": Reads("takes minutes; tests/dry_run has smaller models")},
    "docs/faults.md": {"tests/faults/test_guards.py": RunBy("tests/faults/test_guards.py::test_a_bad_step")},
    "docs/files.md": {"grep": Runs()},
    "docs/hugging_face.md": {
        "hf download Qwen/Qwen3-30B-A3B": RunBy("tests/huggingface/test_commands.py::test_a_folder_becomes_a_run"),
        "--checkpoint.upcycle": RunBy("tests/huggingface/test_upcycle.py::test_the_first_loss_is_the_dense_models"),
    },
    "docs/moe_region.md": {"for dispatcher in": Runs(slow=True)},
    "docs/overlap.md": {"--moe.overlap=half_batch": Runs(slow=True)},
    "docs/parallelism.md": {
        "ZBVZeroBubble": Runs(slow=True),
        "--training.seq_len=32768": RunBy(
            "tests/distributed/test_train.py::test_a_sequence_of_32k_on_two_context_ranks"
        ),
    },
    "docs/planner.md": {"--plan.hardware=GB300": Runs()},
    "docs/precision.md": {"--precision.recipe=mxfp8": Runs(slow=True)},
    "docs/profiling.md": {
        "--profiling.step=15": Runs(slow=True),
        "python - <<'END'": Runs(slow=True),
        "nsys profile": Reads("needs a GPU", gpus=8),
    },
    "docs/planner_search.md": {"--plan.toml=best.toml": Runs(slow=True)},
    "docs/quickstart.md": {
        "--training.local_batch_size 4": Runs(),
        "titan_moe.tokenize": Runs(slow=True),
        "outputs/mine --checkpoint.enable": Runs(slow=True),
        "titan_moe.report": Runs(slow=True),
        "--plan\n": Runs(),
    },
    "docs/optimizer.md": {"--optimizer.name=Muon": RunBy("tests/distributed/test_train.py::test_muon_is_resumed")},
    "docs/research.md": {"--metrics.log_freq=1": Runs(slow=True)},
    "docs/scaling.md": {"--plan.scale=1024,16384": Runs(), "--plan.calibrate=outputs/one": Runs(slow=True)},
    "docs/telemetry.md": {"titan_moe.report": Runs(slow=True)},
}
"""Page -> words that tell a command block from the page's others -> what becomes of it"""

PREPARED = {"docs/data.md": 'mkdir -p my_texts && echo \'{"text": "some text"}\' > my_texts/a.jsonl'}
"""What a page takes for granted"""

CASES = [(page, block) for page in PAGES for block in shell_blocks(page)]
STARTS = (
    "./run_t",
    "python -m titan",
    "python3 -m titan",
    "python benchmarks",
    "sbatch ",
    "torchrun ",
    "NGPU=",
    "RANK=",
)


def entries(page: str, block: str) -> list[How]:
    return [how for words, how in COMMANDS.get(page, {}).items() if words in block]


# ---------------------------------------------------------------------------------------------------------------------
# Commands


@pytest.mark.parametrize(("page", "block"), CASES)
def test_every_command_has_an_entry(page: str, block: str) -> None:
    found = entries(page, block)
    assert len(found) == 1, f"{page}: {len(found)} entries of COMMANDS in tests/test_docs.py are for\n{block}"


def test_every_entry_has_a_command() -> None:
    """And each is where a reader takes it for one: in a block marked as shell."""
    for page, known in COMMANDS.items():
        for words in known:
            assert sum(words in block for block in shell_blocks(page)) == 1, f"{page}: {words}"
    for page in PAGES:
        for language, block in fenced(page):
            if language not in ("bash", "sh", "diff"):
                assert not any(line.startswith(STARTS) for line in block.splitlines()), f"{page}:\n{block}"


@pytest.mark.parametrize("page", [page for page in COMMANDS if Runs() in COMMANDS[page].values()])
def test_commands_run(page: str, tmp_path: Path) -> None:
    run(page, tmp_path, Runs())


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in COMMANDS if Runs(slow=True) in COMMANDS[page].values()])
def test_slow_commands_run(page: str, tmp_path: Path) -> None:
    run(page, tmp_path, Runs(slow=True))


def run(page: str, folder: Path, how: Runs) -> None:
    """The page's commands of that kind one after the other."""
    clone(folder)
    bash(PREPARED.get(page, "true"), folder)
    for block in shell_blocks(page):
        if entries(page, block) == [how]:
            output = bash(block, folder, OMP_NUM_THREADS="1")  # threads of several processes would wait for each other
            trains = "./run_train.sh" in block and "--plan" not in block and "--print_config" not in block
            assert not trains or "step:" in output, f"{block}\n{output}"


@pytest.mark.parametrize(("page", "words"), [(page, words) for page, known in COMMANDS.items() for words in known])
def test_what_cannot_run_here_is_sound(page: str, words: str) -> None:
    how = COMMANDS[page][words]
    (block,) = [block for block in shell_blocks(page) if words in block]
    if isinstance(how, RunBy):
        file, _, name = how.by.partition("::")
        assert f"def {name}" in (REPO / file).read_text(encoding="utf-8"), f"{how.by} is not there"
    if isinstance(how, Reads):
        for argv in configurations(block):
            loaded = read(argv)
            world = how.gpus or loaded.config.plan.gpus
            assert world, f"for how many GPUs is {argv}?"
            problems = list(loaded.problems)
            if loaded.config.comm.mode == "fake_backend":  # as titan_moe.dry_run does
                loaded.config.comm.mode = "default"
                problems += dry_run_check.problems(loaded.config)
            assert problems + check(loaded.config, world, accelerator=True) == [], argv


def configurations(block: str) -> list[list[str]]:
    """What each run in a block is configured by. CONFIG.toml and [...] stand for any."""
    found = []
    for words in commands(block):
        starts = [i for i, word in enumerate(words) if word.endswith(("run_train.sh", "train.slurm"))]
        if starts:
            argv = [word for word in words[starts[0] + 1 :] if not re.match(r"\[|\.\.\.\]|--doctor|--plan$", word)]
            debug = "train_configs/debug_model.toml"
            found.append([debug if word == "CONFIG.toml" else word for word in argv] or [debug])
    return found


INLINE = re.compile(r"`((?:\w+=\S+ )*(?:python3?|\./run_t\w+\.sh|\.venv/bin/python) [^`]+)`")


@pytest.mark.parametrize("page", PAGES)
def test_commands_inside_sentences_name_what_is_there(page: str) -> None:
    """Scripts and modules exist, and know the options."""
    prose = re.sub(r"^```.*?^```$", "", text_of(page), flags=re.DOTALL | re.MULTILINE)
    for command in INLINE.findall(prose):
        words = re.sub(r"^(\w+=\S+ )+", "", command).split()
        python = words[0].rpartition("/")[2] in ("python", "python3")
        program = words[0] if not python else words[2] if words[1] == "-m" else words[1]
        if program in ("pytest", "./run_train.sh", "./run_tests.sh"):
            paths = [word.split("::")[0] for word in words if word.startswith(("tests/", "train_configs/"))]
            assert all((REPO / path).exists() for path in paths), f"{page}: {command}"
            continue
        source = source_of(program)
        assert source, f"{page}: {command}: there is no {program}"
        for word in words:
            option = word.split("=")[0]
            if option.startswith("--") and "." not in option:
                assert f'"{option}"' in source or option[2:].replace("-", "_") in source, f"{page}: {command}: {option}"


def source_of(program: str) -> str:
    """Of a script, a module, or a package that can be run; empty if there is none."""
    path = REPO / (program if program.endswith(".py") else program.replace(".", "/"))
    for file in (path, path.with_suffix(".py"), path / "__main__.py"):
        if file.is_file():
            return file.read_text(encoding="utf-8")
    return ""


# ---------------------------------------------------------------------------------------------------------------------
# Links


def anchors(page: Path) -> set[str]:
    """Of headings, as GitHub makes them."""
    found: set[str] = set()
    prose = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    for heading in re.findall(r"^#+ (.+)$", prose, flags=re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        anchor = re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-")
        n = 1
        while anchor in found:
            anchor, n = f"{anchor.removesuffix(f'-{n - 1}')}-{n}", n + 1
        found.add(anchor)
    return found


def links(page: str) -> list[str]:
    prose = re.sub(r"^```.*?^```$", "", text_of(page), flags=re.DOTALL | re.MULTILINE)
    prose = re.sub(r"`[^`\n]*`", "", prose)
    return re.findall(r"\]\(\s*([^)\s]+)\s*\)", prose)


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    for link in links(page):
        if re.match(r"\w+:", link):
            parts = urlsplit(link)
            assert parts.scheme == "https" and "." in parts.netloc, f"{page}: {link}"
            continue
        name, _, anchor = link.partition("#")
        target = (REPO / page).parent / name if name else REPO / page
        assert target.exists(), f"{page}: {link}: there is no {target}"
        if anchor:
            assert anchor in anchors(target), f"{page}: {link}: {target.name} has {', '.join(sorted(anchors(target)))}"


def test_every_page_is_reached_from_readme() -> None:
    reached, left = set[str](), ["README.md"]
    while left:
        page = left.pop()
        reached.add(page)
        for link in links(page):
            target = (REPO / page).parent / link.partition("#")[0]
            if target.suffix == ".md" and target.is_file():
                name = str(target.resolve().relative_to(REPO.resolve()))
                left += [name] if name not in reached and name not in left else []
    assert set(PAGES) <= reached, f"no way leads to {', '.join(sorted(set(PAGES) - reached))}"


def test_pages_that_the_code_names_are_there() -> None:
    files = [REPO / "train.py", *REPO.glob("*.sh"), *(REPO / "train_configs").glob("*.toml")]
    files += [path for folder in ("titan_moe", "scripts") for path in (REPO / folder).rglob("*.py")]
    for file in files:
        for name in re.findall(r"\bdocs/[\w/]+\.(?:md|png)", file.read_text(encoding="utf-8")):
            assert (REPO / name).exists(), f"{file}: {name}"


def test_every_page_has_a_command_or_a_picture() -> None:
    """Or a snippet, which is tested too."""
    for page in sorted({*PAGES} - {"CHANGELOG.md"}):
        shown = {language for language, _ in fenced(page)} & {"bash", "sh", "python"}
        assert shown or re.search(r"^!\[.*\]\(.*\)", text_of(page), flags=re.MULTILINE), page


# ---------------------------------------------------------------------------------------------------------------------
# What is generated, or names code


@pytest.mark.parametrize("path", [config_docs.PAGE, config_docs.README], ids=str)
def test_the_tables_of_keys_are_current(path: Path) -> None:
    page = text_of(str(path))
    assert config_docs.renewed(page) == page, "python -m scripts.config_docs"


def test_every_section_is_explained() -> None:
    assert set(config_docs.SECTION_TEXTS) == set(config_docs.SECTIONS), "SECTION_TEXTS of scripts/config_docs.py"


def test_the_map_of_files_is_complete_and_nearly_current() -> None:
    """Lines within a fifth: the map need not change with every commit."""
    lost = [name for name in file_map.files() if file_map.part_of(name) is None]
    assert not lost, f"PARTS of scripts/file_map.py has no place for {', '.join(lost)}"
    shown = dict(re.findall(r"^\| ([^|]+?) \| ([\d,]+) \| ", marked("README.md", "parts"), flags=re.MULTILINE))
    close_to(shown, file_map.sizes())
    rows = re.findall(
        r"^\| \[(\S+)\]\(\.\./\S+\) \| ([\d,]+) \| \S", marked("docs/files.md", "files"), flags=re.MULTILINE
    )
    ours = [name for name in file_map.files() if not name.startswith(("tests/", "scripts/", "benchmarks/"))]
    close_to(dict(rows), {name: file_map.lines(name) for name in ours})


def marked(page: str, block: str) -> str:
    return text_of(page).split(f"<!-- python -m scripts.file_map: {block} -->")[1].split("<!-- end -->")[0]


def close_to(shown: dict[str, str], true: dict[str, int]) -> None:
    renew = "python -m scripts.file_map"
    assert shown.keys() == true.keys(), f"{renew}: {', '.join(sorted(shown.keys() ^ true.keys()))}"
    for name, lines in shown.items():
        assert abs(int(lines.replace(",", "")) - true[name]) <= max(10, 0.2 * true[name]), f"{renew}: {name}"


def test_the_picture_of_the_region_is_of_todays_plan() -> None:
    assert region_picture.shown() == region_picture.summary(region_picture.ways()), "python -m scripts.region_picture"


def test_numbers_of_the_console_line_are_computed_where_the_page_says() -> None:
    section = text_of("docs/telemetry.md").split("## The console line")[1].split("\n## ")[0]
    rows = [line.split("|")[3] for line in section.splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 10
    for row in rows:
        file = ""
        for name in re.findall(r"`([\w./]+)`", row):
            if name.endswith(".py"):
                file = name
            elif name != "clip_grad_norm_":  # torchtitan's
                assert name in definitions(file), f"{file} has no {name}"


def test_every_generator_is_listed_for_contributors() -> None:
    """The commands in the marks of generated parts, and those that draw."""
    listed = text_of("CONTRIBUTING.md").split("## Generated text")[1].split("\n## ")[0]
    for page in PAGES:
        for command in re.findall(r"<!-- (python [^:>]+?)(?:: \w+)? -->", text_of(page)):
            assert command in listed, f"{page}: {command}"
    for script in re.findall(r"scripts[./](\w+)", listed):
        assert (REPO / "scripts" / f"{script.removesuffix('.py')}.py").exists(), script
    assert "scripts.region_picture" in listed


def definitions(file: str) -> set[str]:
    tree = ast.parse((REPO / file).read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)}


def test_the_snippet_for_stock_torchtitan_runs(tmp_path: Path) -> None:
    (snippet,) = [block for language, block in fenced("docs/torchtitan.md") if language == "python"]
    (tmp_path / "snippet.py").write_text(snippet)
    output = bash(f"PYTHONPATH={REPO} python {tmp_path / 'snippet.py'}", tmp_path)
    assert re.search(r"FusedMoE \[(\d+, ){7}\d+\]", output)
