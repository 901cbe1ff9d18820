"""The page in a real browser, where there is one: it draws without a word on the console, and reaches for nothing."""

import base64
import hashlib
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from titan_moe.report import charts
from titan_moe.report.page import make
from titan_moe.report.read import Series, read

from .folders import line, loads, phases, write

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on PATH")]


def browse(page: Path, profile: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    assert CHROMIUM is not None
    return subprocess.run(
        [
            CHROMIUM,
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
            "--virtual-time-budget=5000",
            "--enable-logging=stderr",
            f"--user-data-dir={profile}",
            *arguments,
            page.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=120,
    )


def console(done: subprocess.CompletedProcess[str]) -> list[str]:
    return [each for each in done.stderr.splitlines() if "CONSOLE" in each]


def drawn(dom: str) -> bool:
    """Whether the last line of the page's scripts has run."""
    return 'data-drawn="' in dom


@pytest.mark.parametrize("case", ["empty", "bare", "one step", "everything", "three", "watched"])
def test_draws_without_complaint(tmp_path, case):
    steps = [1] if case == "one step" else range(1, 40)
    everything = {} if case == "bare" else {**loads([4, 0, 1]), **phases(experts=1.0, attention=0.3)}
    lines = [line(step, skipped_steps=int(step > 20), **everything) for step in steps]
    folder = tmp_path / "empty" if case == "empty" else write(tmp_path / "run", lines)
    folder.mkdir(exist_ok=True)
    page = tmp_path / "page.html"
    page.write_text(make([read(folder)] * (3 if case == "three" else 1), 600.0 if case == "watched" else None))
    done = browse(page, tmp_path / "profile", "--dump-dom")
    assert done.returncode == 0 and drawn(done.stdout) and console(done) == []
    canvases = done.stdout.count("<canvas")
    assert canvases == 0 if case == "empty" else canvases >= 8


def told_by(page: Path, whole: str, profile: Path, expression: str) -> list:
    """What a script at the end of the page would get for `expression`, when all is drawn: numbers, in lists."""
    told = f"setTimeout(() => (document.documentElement.dataset.told = JSON.stringify({expression})), 500);"
    scripts = whole.split("<script>")[1].split("</script>")[0]
    digests = [base64.b64encode(hashlib.sha256(each.encode()).digest()).decode() for each in (scripts, scripts + told)]
    page.write_text(whole.replace(scripts, scripts + told).replace(*digests))
    done = browse(page, profile, "--dump-dom")
    assert console(done) == []
    (found,) = re.findall(r'data-told="(.*?)"', done.stdout)
    return json.loads(found)


def test_axes_suit_their_values(tmp_path):
    """Of a curve that is 0 all the time uPlot would label an axis up to 100, of ranks an axis with halves."""
    lines = [line(step, moe_dead=0, tps=0.0, step_s=0.25 * step, slowest_rank=step % 2) for step in range(1, 9)]
    run = read(write(tmp_path / "run", lines))
    wanted = "curveCharts.map((each) => [each.u.scales.y.max, each.u.axes[1]._splits])"
    told = told_by(tmp_path / "page.html", make([run]), tmp_path / "profile", wanted)
    axes = dict(zip([chart.title for chart in charts.charts([run])[0]], told))
    assert axes["Dead experts"][0] == axes["Throughput"][0] == 1 and 2 <= axes["Step time"][0] <= 3
    assert axes["Which rank is slowest"][1] == axes["Dead experts"][1] == [0, 1]
    assert 0.5 in axes["Step time"][1]


def test_a_mistake_in_the_page_would_be_noticed(tmp_path):
    """The check of the check: a script that throws, and one that the policy forbids."""
    page = tmp_path / "page.html"
    whole = make([read(write(tmp_path / "run", [line(1)]))])
    page.write_text(whole.replace("</body>", "<script>alert(1)</script></body>"))
    assert any("Content Security Policy" in each for each in console(browse(page, tmp_path / "profile", "--dump-dom")))
    page.write_text(whole.replace('"charts":', '"chart":'))
    done = browse(page, tmp_path / "profile", "--dump-dom")
    assert not drawn(done.stdout) and console(done)


def test_the_spike_of_one_step_is_on_the_screen(tmp_path):
    """Of 100,000 steps: in the picture's columns around it, the loss chart has ink far above the curve."""
    image = pytest.importorskip("PIL.Image")
    run = read(write(tmp_path / "run", [line(1)]))
    run.series = {"loss": Series()}
    run.steps.extend(range(2, 100_001))
    run.series["loss"].steps.extend(range(1, 100_001))
    run.series["loss"].values.extend([2.0] * 100_000)
    found = []
    for spike in (2.0, 14.0):
        run.series["loss"].values[49_999] = spike
        (tmp_path / "page.html").write_text(make([run]))
        done = browse(
            tmp_path / "page.html",
            tmp_path / "profile",
            "--window-size=800,900",
            f"--screenshot={tmp_path / 'page.png'}",
        )
        assert console(done) == []
        with image.open(tmp_path / "page.png") as picture:
            pixels, (width, height) = picture.convert("RGB").load(), picture.size
        # Columns with a long run of bluish pixels from top to bottom: the spike, and nothing else.
        blue = [sum(pixels[x, y][2] - pixels[x, y][0] > 40 for y in range(height)) for x in range(width)]
        found.append(sum(count > 100 for count in blue))
    assert found[0] == 0 and 1 <= found[1] <= 4
