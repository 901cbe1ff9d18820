"""`python -m titan_moe.report RUN [RUN ...]`: a page about runs, from their folders alone.

Writes report.html into the first run's folder, or --out FILE. With --png a picture of the main charts beside it, with
--text a summary for a terminal instead of a page, with --watch again every few seconds until the runs have ended. Ends
with status 0, or 2 and a sentence where there is no such folder or nothing can be written. Imports no torch: a folder
copied to a laptop will do.
"""

import argparse
import os
import sys
from pathlib import Path

from titan_moe.report import text, watch
from titan_moe.report.read import Run, read
from titan_moe.whole_file import replacing

PNG = "report.png"


def main(argv: list[str]) -> int:
    arguments = _arguments(argv)
    try:
        if arguments.watch is not None and not arguments.watch >= watch.SHORTEST:
            raise ValueError(f"--watch={arguments.watch:g}: must be at least {watch.SHORTEST:g} seconds")
        folders = list(dict.fromkeys(arguments.runs))
        if arguments.watch is None:
            _write([read(folder) for folder in folders], arguments, None)
        else:
            watch.watch(folders, arguments.watch, lambda runs, refresh: _write(runs, arguments, refresh))
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    except OSError as error:
        print(f"{error.filename}: cannot be written: {error.strerror}; give another place with --out", file=sys.stderr)
        return 2
    return 0


def _arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m titan_moe.report", description="A page about one or several runs.")
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run folder, as under outputs/")
    parser.add_argument("--out", metavar="FILE", help="the page; default: report.html in the first run's folder")
    parser.add_argument("--png", action="store_true", help="also a picture of the main charts, beside the page")
    parser.add_argument("--text", action="store_true", help="print a summary, write no page")
    parser.add_argument(
        "--watch",
        nargs="?",
        const=10.0,
        type=float,
        metavar="SECONDS",
        help="write it again every so many seconds (default 10) until the runs have ended; the page follows by itself",
    )
    return parser.parse_args(argv)


def _write(runs: list[Run], arguments: argparse.Namespace, refresh: float | None) -> None:
    """`refresh`: as the page is going to be written again after so many seconds."""
    if arguments.text:
        if refresh is not None and sys.stdout.isatty():
            print("\033[H\033[2J", end="")  # the same place again
        try:
            print("\n\n".join(text.summary(run) for run in runs), flush=True)
        except BrokenPipeError:  # as of `| head`
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    else:
        from titan_moe.report import page

        out = Path(arguments.out) if arguments.out else runs[0].folder / "report.html"
        if not out.exists() or refresh is None:  # once while watching
            print(out, flush=True)
        content = page.make(runs, refresh).encode()
        with replacing(out) as file:
            file.write_bytes(content)
    if arguments.png:
        from titan_moe.report import picture

        picture.draw(runs, (Path(arguments.out).parent if arguments.out else runs[0].folder) / PNG)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
