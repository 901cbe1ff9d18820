"""What is kept away from training: a share of the documents of a source, always the same ones."""

import hashlib
from collections import Counter
from dataclasses import replace
from itertools import compress

from titan_moe.sources.listing import Source
from titan_moe.sources.piece import hashed_bytes
from titan_moe.sources.text import TextPiece

HEAD_BYTES = 1 << 12  # how much of files of one size is compared, to keep copies on one side


def split(source: Source, holdout: float) -> tuple[Source, Source]:
    """(training, validation): about a share `holdout` of the units is kept away from training, always the same ones.

    A unit is a file of text, or a piece of a source whose lines, rows or documents stand for themselves. Its side
    follows from its name, whatever else is listed, and byte-identical text files are always on one side: files of one
    size that begin alike follow the first of them. That reads HEAD_BYTES of each file that shares its size with
    another, and nothing of the rest. Pieces of a text stay together, unless it is the only one.
    """
    if not 0 < holdout < 1:
        raise ValueError(f"validation.holdout = {holdout}: a share of the documents, so it must be between 0 and 1")
    pieces = source.pieces
    one_file = len({piece.unit for piece in pieces}) == 1
    files = [piece for piece in pieces if isinstance(piece, TextPiece) and piece.start == 0]
    files_of_size = Counter(file.file_size for file in files)
    first_alike: dict[tuple[int, bytes], str] = {}
    leader: dict[str, str] = {}  # name of a file -> name of the file whose side it takes
    for file in files:
        if files_of_size[file.file_size] > 1:
            head = hashlib.blake2b(file.read(HEAD_BYTES), digest_size=16).digest()
            leader[file.name] = first_alike.setdefault((file.file_size, head), file.name)

    def place(index: int) -> float:
        piece = pieces[index]
        of_one_file = piece.start if isinstance(piece, TextPiece) else index
        key = of_one_file if one_file else leader.get(piece.unit, piece.unit)
        return int.from_bytes(hashed_bytes(6, "split", key), "little") / 2**48

    places = [place(i) for i in range(len(pieces))]
    lowest, highest = min(places), max(places)
    if lowest == highest:
        raise ValueError(
            f'validation.holdout = {holdout}: there is nothing to keep away from training in "{source.dataset}", all '
            "text found is one short file or copies of it. Add text, name other text in validation.dataset, or set "
            "validation.enable = false"
        )
    # The lowest is always held out and the highest always trained on, so that a small corpus has both.
    held_out = [place != highest and (place < holdout or place == lowest) for place in places]
    return (
        replace(source, pieces=list(compress(pieces, (not held for held in held_out)))),
        replace(source, pieces=list(compress(pieces, held_out))),
    )
