"""All sources of a run, and a record of what they are, by which the next start notices that something changed.

Rank 0 lists and tells the others, so that a file that appears in between cannot give two ranks different orders, and
one process asks the file system or the hub. A fingerprint covers the names and sizes of all files and, of each, its
first, middle and last 16 KiB: enough to notice another file, cheap enough to take at every start.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from titan_moe.config import Config, DataSource
from titan_moe.mixture import count_shards
from titan_moe.sources.listing import File, Source, list_source
from titan_moe.sources.piece import open_as_listed
from titan_moe.sources.split import split
from titan_moe.whole_file import replacing

SAMPLE_BYTES = 1 << 14
FILE_NAME = "data.json"  # in the run folder
NUM_SHARDS = "training.dataloader.num_shards"


@dataclass(frozen=True, slots=True)
class Listing:
    training: list[Source]
    validation: list[Source] | None
    """None: no validation"""

    files: dict[str, dict[str, str]]
    """For each dataset, what its files are: name -> size and digest"""

    written: dict[str, dict[str, int]] = field(default_factory=dict)
    """For each dataset, when each of its files was last written to, in ns"""

    settings: dict[str, float] = field(default_factory=dict)
    """Keys that, as the files do, decide about the order of the samples"""

    validation_sets: dict[str, Source] = field(default_factory=dict)
    """Those of validation.sets, by their names"""

    def summary(self) -> list[dict[str, Any]]:
        """For run.json."""
        return [
            {
                "part": part,
                "dataset": source.dataset,
                "kind": source.kind,
                "weight": source.weight,
                "revision": source.revision,
                "files": len(source.files),
                "bytes": sum(file.size for file in source.files),
                "fingerprint": source.fingerprint,
            }
            for part, sources in self._parts().items()
            for source in sources
        ]

    def everything(self) -> list[Source]:
        return [source for sources in self._parts().values() for source in sources]

    def _parts(self) -> dict[str, list[Source]]:
        sets = {f"validation, {name}": [source] for name, source in self.validation_sets.items()}
        return {"training": self.training, "validation": self.validation or [], **sets}


class Unlisted(ValueError):
    """What is wrong with each source that cannot be listed."""

    def __str__(self) -> str:
        return "\n".join(self.args)


def list_all(config: Config) -> Listing:
    """The sources of [training] and, where enabled, of [validation]: its own, or some held out of the former."""
    loading, patience = config.training.dataloader, config.comm.train_timeout_seconds / 2

    def listed(spec: DataSource, seed: int) -> Source:
        return list_source(spec, text_field=loading.text_field, on_error=loading.on_error, seed=seed, patience=patience)

    def all_listed(specs: Sequence[DataSource], seed: int) -> list[Source]:
        found = []
        for spec in specs:
            try:
                found.append(listed(spec, seed))
            except ValueError as error:
                problems.append(str(error))
        return found

    problems: list[str] = []
    specs = config.training.mixture or [DataSource(dataset=config.training.dataset)]
    training, validation = all_listed(specs, config.debug.seed), None
    if config.validation.enable and config.validation.dataset:
        # Another seed: not training's synthetic text.
        validation = all_listed([DataSource(dataset=config.validation.dataset)], -1)
    specs = [
        DataSource(dataset=each.dataset, text_field=each.text_field, on_error=each.on_error)
        for each in (config.validation.sets if config.validation.enable else [])
    ]
    sets = all_listed(specs, -1)
    if problems:
        raise Unlisted(*dict.fromkeys(problems))
    _refuse_twice(training, {f"validation source {i}": source for i, source in enumerate(validation or [], start=1)})
    for each, source in zip(config.validation.sets, sets):  # one set may be part of another
        _refuse_twice(training, {f'validation set "{each.name}"': source})
    sources = (*training, *(validation or []), *sets)
    files = {source.dataset: _digests(source.files) for source in sources}
    written = {source.dataset: {file.name: file.written for file in source.files} for source in sources}
    if config.validation.enable and validation is None:
        halves = [split(source, config.validation.holdout) for source in training]
        training, validation = [half[0] for half in halves], [half[1] for half in halves]

    def printed(source: Source) -> Source:
        return replace(source, fingerprint=_fingerprint(source, files[source.dataset]))

    settings: dict[str, float] = {"training.seq_len": config.training.seq_len, "debug.seed": config.debug.seed}
    # As many as there are: with few pieces, more change nothing.
    shards = max(count_shards(loading.num_shards, len(source.pieces)) for source in training)
    settings[NUM_SHARDS] = shards
    if len(training) > 1:
        settings |= {f"training.mixture[{i}].weight": source.weight for i, source in enumerate(training)}
    held_out = None if validation is None else list(map(printed, validation))
    named = {each.name: printed(source) for each, source in zip(config.validation.sets, sets)}
    return Listing(list(map(printed, training)), held_out, files, written, settings, named)


def _refuse_twice(training: list[Source], validation: dict[str, Source]) -> None:
    """A file in two sources would be trained on more often than its weight says, or validated on what was learnt.
    `validation`: by what a message calls each."""
    seen: dict[str, str] = {}
    for name, source in ({f"training source {i}": x for i, x in enumerate(training, start=1)} | validation).items():
        owner = f'{name} ("{source.dataset}")'
        for file in source.files:
            if (other := seen.setdefault(file.path, owner)) != owner:
                again = "; give it more weight there if it is to come up more often" if name not in validation else ""
                raise ValueError(f"{file.path} is in {other} and in {owner}: leave it to one of them{again}")


def _fingerprint(source: Source, files: dict[str, str]) -> str:
    """Of what decides which tokens the source has: not of the path to its files, nor of its weight. Nor of on_error: a
    position counts broken documents too, so a run that stopped at one goes on without it."""
    digest = hashlib.blake2b(digest_size=8)
    options = (source.kind, source.text_field, source.add_bos, source.add_eos, source.revision)
    digest.update(json.dumps([options, files], sort_keys=True).encode(errors="surrogatepass"))
    for piece in source.pieces:  # which of them: a part may be held out for validation
        digest.update(f"{piece.unit}\0{piece.size}\n".encode(errors="surrogateescape"))
    return digest.hexdigest()


def _digests(files: Sequence[File]) -> dict[str, str]:
    found = {}
    for file in files:
        digest = hashlib.blake2b(digest_size=8)
        with open_as_listed(file.path, file.size) as content:
            for start in sorted({0, max((file.size - SAMPLE_BYTES) // 2, 0), max(file.size - SAMPLE_BYTES, 0)}):
                content.seek(start)
                digest.update(content.read(SAMPLE_BYTES))
        found[file.name] = f"{file.size} bytes, {digest.hexdigest()}"
    return found


# ---------------------------------------------------------------------------------------------------------------------
# Between two starts of a run


def save(listing: Listing, folder: Path) -> None:
    """Write the record into the run folder: whole, or not at all."""
    record: dict[str, Any] = {"sources": listing.summary(), "settings": listing.settings}
    record |= {"files": listing.files, "written": listing.written}
    with replacing(folder / FILE_NAME) as file:
        file.write_text(json.dumps(record, indent=1) + "\n")


def changes(listing: Listing, folder: Path) -> list[str]:
    """What is different from the record in the run folder; nothing where there is none. Of the training data only:
    nobody has a position in validation's, which may change, be left out, or be evaluated more often. Where held-out
    documents decide which others are trained on, it shows in the training sources."""
    try:
        before = json.loads((folder / FILE_NAME).read_bytes())
        was = _training(before["sources"])
        files_before: dict[str, dict[str, str]] = before["files"]
        settings: dict[str, float] = before.get("settings", {})  # older records have none
        found = [
            f"{key} was {settings[key]}, now {value}"
            for key, value in listing.settings.items()
            if key in settings and settings[key] != value
        ]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return []
    now = _training(listing.summary())
    if [fingerprint for _, fingerprint in was] == [fingerprint for _, fingerprint in now]:
        return found
    found = [change for change in found if not change.startswith(NUM_SHARDS)]  # may follow from the number of files
    if len(was) != len(now):
        return [f"it had {len(was)} sources ({', '.join(name for name, _ in was)}), now {len(now)}"]
    for (old, old_print), (new, new_print) in zip(was, now):
        if old_print == new_print:
            continue
        details = _files_changed(files_before.get(old, {}), listing.files[new])
        if not details:
            details = "how it is read has: its name, options, [validation], or the revision on the hub"
        found.append(f'training source "{new}" changed: {details}')
    return found


def doubts(listing: Listing, folder: Path) -> list[str]:
    """Files that were written to since the record was, though nothing that a digest covers is different."""
    try:
        before: dict[str, dict[str, int]] = json.loads((folder / FILE_NAME).read_bytes()).get("written", {})
    except (OSError, ValueError):
        return []
    return [
        file.path
        for source in listing.training
        for file in source.files
        if file.size > 3 * SAMPLE_BYTES and before.get(source.dataset, {}).get(file.name, file.written) != file.written
    ]


def _training(summary: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """(dataset, fingerprint) of each training source."""
    return [(entry["dataset"], entry["fingerprint"]) for entry in summary if entry["part"] == "training"]


def _files_changed(before: dict[str, str], now: dict[str, str]) -> str:
    parts = {
        "gone": [name for name in before if name not in now],
        "new": [name for name in now if name not in before],
        "changed": [f"{n} ({before[n]} -> {now[n]})" for n in now if n in before and before[n] != now[n]],
    }
    shown = [
        f"{what}: {', '.join(names[:3])}" + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        for what, names in parts.items()
        if names
    ]
    return "; ".join(shown)
