"""Data is data: nothing of a dataset or a tokenizer is run or unpickled, a dataset on a hub leads to nothing but
itself, and names lead nowhere outside of the run folder.

That a run writes to its folder only is shown in test_resume.py, over all of its runs; of checkpoints, tests of theirs
tell.
"""

import io
import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.distributed.harness import REPO, SMALL_FP32
from tests.faults.corpora import written
from tests.pieces import TOKENIZER, documents_of, jsonl, listed, write, write_tokenizer
from titan_moe import run_folder, tokenize
from titan_moe.config import Config
from titan_moe.config_check import check
from titan_moe.tokenizer import build_tokenizer


class Bomb:
    """Leaves a file when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self.mark),)


@pytest.fixture
def mark(tmp_path: Path) -> Path:
    """What a bomb makes; a test fails if it is there in the end."""
    path = tmp_path / "bombed"
    pickle.loads(pickle.dumps(Bomb(path)))
    assert path.is_dir(), "it would not have gone off"
    path.rmdir()
    return path


# ---------------------------------------------------------------------------------------------------------------------
# Local files


def token_ids(folder: Path) -> Path:
    tokenize.write(listed(write(folder / "texts", {"a.txt": b"text"})), TOKENIZER, "", folder / "ids")
    return folder / "ids"


@pytest.mark.parametrize("name", ["tokens.npy", "offsets.npy"])
def test_pickled_arrays_of_token_ids_are_refused(name: str, tmp_path: Path, mark: Path) -> None:
    folder = token_ids(tmp_path)
    array = np.load(folder / name).astype(object)
    array[0] = Bomb(mark)
    for content in (pickled_npy(array), pickle.dumps(Bomb(mark))):
        (folder / name).write_bytes(content)
        with pytest.raises(ValueError, match=r"ids cannot be read: .*(Python objects|[Pp]ickle)"):
            listed(str(folder))
    assert not mark.exists()


def pickled_npy(array: np.ndarray) -> bytes:
    content = io.BytesIO()
    np.save(content, array, allow_pickle=True)
    return content.getvalue()


def test_a_pickle_in_a_parquet_schema_is_not_loaded(tmp_path: Path, mark: Path) -> None:
    """pyarrow once unpickled the type of a column (CVE-2023-47248)."""
    metadata = {
        b"ARROW:extension:name": b"arrow.py_extension_type",
        b"ARROW:extension:metadata": pickle.dumps(Bomb(mark)),
    }
    schema = pa.schema([pa.field("text", pa.string(), metadata=metadata), pa.field("n", pa.int64(), metadata=metadata)])
    pq.write_table(pa.table({"text": ["a", "b"], "n": [1, 2]}, schema), tmp_path / "a.parquet")
    assert documents_of(listed(str(tmp_path))) == [b"a", b"b"]
    assert not mark.exists()


@pytest.mark.parametrize("suffix", [".pkl", ".pickle", ".pt", ".bin", ".npy"])
def test_pickles_are_no_dataset(suffix: str, tmp_path: Path, mark: Path) -> None:
    """In a folder they are no documents; by name, at most text without a meaning."""
    (tmp_path / f"a{suffix}").write_bytes(pickle.dumps(Bomb(mark)))
    with pytest.raises(ValueError, match="no document found"):
        listed(str(tmp_path))
    try:
        documents_of(listed(str(tmp_path / f"a{suffix}")))
    except ValueError as error:
        assert suffix == ".npy" and "is not plain text" in str(error)
    assert not mark.exists()


def test_reading_every_kind_of_file_unpickles_nothing(told: dict[str, str]) -> None:
    """By Python's own audit events, which also tell of libraries' pickles."""
    assert told["audited"] == "['a pickle of the test itself']"


def test_a_tokenizers_folder_is_json(tmp_path: Path, mark: Path) -> None:
    """Code and pickles beside it, which its configuration names, stay where they are."""
    code = f"import os\nos.mkdir({str(mark)!r})\nclass Mine: pass\n"
    for name in ("tokenization_mine.py", "tokenizer.py", "__init__.py"):
        (tmp_path / name).write_text(code)
    for name in ("tokenizer.pkl", "vocab.pkl", "tokenizer.model"):
        (tmp_path / name).write_bytes(pickle.dumps(Bomb(mark)))
    config = {"tokenizer_class": "Mine", "auto_map": {"AutoTokenizer": ["tokenization_mine.Mine", None]}}
    write_tokenizer(tmp_path, ["</s>"], {**config, "eos_token": "</s>"})
    tokenizer = build_tokenizer(str(tmp_path), 300)
    assert tokenizer.decode(tokenizer.encode([b"text"])[0]) == "text"
    (tmp_path / "tokenizer.json").write_bytes(pickle.dumps(Bomb(mark)))
    with pytest.raises(ValueError, match=r"tokenizer\.json is unreadable: .*Download again"):
        build_tokenizer(str(tmp_path), 300)
    assert not mark.exists()


# ---------------------------------------------------------------------------------------------------------------------
# A hub

SCRIPT = """
import os, pickle, sys
folder, tokenizer, *datasets = sys.argv[1:]
found = []
sys.addaudithook(lambda event, _: found.append(event) if event == "pickle.find_class" else None)
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from tests.hub_server import serving
elsewhere = ThreadingHTTPServer(("127.0.0.1", 0), partial(SimpleHTTPRequestHandler, directory=folder))
Thread(target=elsewhere.serve_forever, daemon=True).start()
with serving({}) as server:
    os.environ |= {"HF_ENDPOINT": server.url, "HF_HOME": folder + "/cache", "no_proxy": "127.0.0.1"}
    os.environ |= {"HF_HUB_DISABLE_TELEMETRY": "1", "HF_DATASETS_TRUST_REMOTE_CODE": "1"}
    from tests.pieces import *
    from titan_moe.tokenizer import build_tokenizer
    import pyarrow.parquet
    del found[:]  # whatever imports do
    pickle.loads(pickle.dumps(json.JSONDecodeError))
    assert found == ["pickle.find_class"]
    found[:] = ["a pickle of the test itself"]
    mine = build_tokenizer(tokenizer, 300)
    for dataset in datasets:
        batches = iter(make_loader(listed(dataset), tokenizer=mine))
        for _ in range(20):
            next(batches)
    print(f"audited: {found}")

    mark, text, secret = folder + "/bombed", jsonl(["a", "b"]), folder + "/secret.jsonl"
    class Bomb:
        def __reduce__(self):
            return os.mkdir, (mark,)
    bomb, code = pickle.dumps(Bomb()), f"import os\\nos.mkdir({mark!r})\\n".encode()
    def readme(path):
        configs = [{"config_name": "default", "data_files": [{"split": "train", "path": path}]}]
        return f"---\\nconfigs: {json.dumps(configs)}\\n---\\n".encode()
    cases = {
        "script": {"script.py": code, "a.jsonl": text},
        "scripts": {"scripts.py": code},
        "pickles": {"train.pkl": bomb, "a.pickle": bomb, "a.pt": bomb},
        "absolute": {"README.md": readme(secret), "a.jsonl": text},
        "upwards": {"README.md": readme("../../../../../../../../../.." + secret), "a.jsonl": text},
        "url": {"README.md": readme(f"http://127.0.0.1:{elsewhere.server_port}/secret.jsonl"), "a.jsonl": text},
        "good": {"README.md": readme("data/*.jsonl"), "data/a.jsonl": text, "helper.py": code},
    }
    for name, files in cases.items():
        server.repository, server.files, server.sha = f"me/{name}", files, name.encode().hex().ljust(40, "0")
        try:
            outcome = documents_of(listed(f"hf:me/{name}"))
        except ValueError as error:
            outcome = f"refused: {error}"
        print(f"{name}: {outcome}")
    print(f"bombed: {os.path.exists(mark)}")
"""


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What a process said that read all kinds of files, and then from a hub that means harm."""
    folder = tmp_path_factory.mktemp("security")
    (folder / "secret.jsonl").write_bytes(jsonl(["secret"]))
    write_tokenizer(folder, ["<s>", "</s>"])
    datasets = written(folder / "data")
    datasets.pop("tokens")  # of another tokenizer; and they have tests above
    command = [sys.executable, "-c", SCRIPT, str(folder), str(folder), *datasets.values()]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return dict(line.split(": ", 1) for line in done.stdout.splitlines())


def test_a_dataset_on_a_hub_runs_no_code_and_unpickles_nothing(told: dict[str, str]) -> None:
    assert "Dataset scripts are no longer supported" in told["script"] and told["scripts"].startswith("refused: ")
    assert told["pickles"].startswith("refused: ") and told["bombed"] == "False"


def test_a_dataset_on_a_hub_leads_to_nothing_but_itself(told: dict[str, str]) -> None:
    """Its README may name any path or address as its data; on a cluster that would be whatever this user can read."""
    for name in ("absolute", "url"):
        assert told[name].startswith("refused: ") and "its data files lie outside of it" in told[name], told[name]
    assert told["upwards"].startswith("refused: ")
    assert told["good"] == "[b'a', b'b']"


# ---------------------------------------------------------------------------------------------------------------------
# Names

BAD_NAMES = ["../elsewhere", "/tmp/elsewhere", "a/b", "..", ".", "a\nb", "a b", "~", "$HOME"]


@pytest.mark.parametrize("run_id", BAD_NAMES)
def test_a_run_id_is_one_name(run_id: str) -> None:
    """Also where torchrun is called directly; run_train.sh asks launch.py, which says the same."""
    with pytest.raises(ValueError, match="RUN_ID = .*names a folder; use letters"):
        run_folder.choose(Config(), {"RUN_ID": run_id})


def test_a_configurations_name_is_made_one(tmp_path: Path) -> None:
    for path in ("../../../etc/x.toml", "..", "a b/c;d$(e).toml", f"{'x' * 300}.toml", "ünïcode.toml"):
        run_id = run_folder.new_run_id(path)
        assert run_folder.run_id_problem(run_id) is None and len(run_id) < 100
        assert run_folder.choose(Config(), {"RUN_ID": run_id}).parent == Path("outputs")


@pytest.mark.parametrize("key", ["checkpoint.folder", "metrics.save_tb_folder"])
@pytest.mark.parametrize("name", ["../elsewhere", "/tmp/elsewhere", "a/../../b", "", "."])
def test_folders_in_a_configuration_lie_in_the_run_folder(key: str, name: str) -> None:
    config = Config()
    section, field = key.split(".")
    setattr(getattr(config, section), field, name)
    assert any(problem.startswith(f'{key} = "{name}": must be') for problem in check(config, 1))


@pytest.mark.slow
def test_train_py_itself_refuses_a_run_id_that_leads_elsewhere(tmp_path: Path) -> None:
    environment = {**os.environ, "RUN_ID": "../../elsewhere", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(REPO / "train.py"), str(REPO / SMALL_FP32[0]), *SMALL_FP32[1:]]
    (tmp_path / "a" / "b").mkdir(parents=True)
    done = subprocess.run(
        command, cwd=tmp_path / "a" / "b", env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 2 and "RUN_ID = '../../elsewhere'" in done.stderr, done.stderr[-2000:]
    assert [path.name for path in tmp_path.rglob("*")] == ["a", "b"]
