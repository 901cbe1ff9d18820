"""Which layers each pipeline stage holds: Megatron's layout strings, counts per stage, or a balanced split.

A layout string has one character per piece of the model - E embedding, t layer, m multi-token prediction (MTP) layer,
L loss head - and | between stages; x*n repeats the piece or (group) before it: `Et*4|(t*4|)*14tmL` is 16 stages, of
which the last holds one layer, the MTP layer and the head. With v stages per rank, stage i lies on rank i mod pp.
"""

import re
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One pipeline stage: layers with a dense feed-forward, MoE layers, MTP layers (MoE too), embedding, loss head."""

    dense: int
    moe: int
    mtp: int = 0
    embedding: bool = False
    head: bool = False

    @property
    def layers(self) -> int:
        return self.dense + self.moe + self.mtp


def expand(layout: str) -> list[str]:
    """The stages of a layout string, repetitions written out."""
    text = re.sub(r"\s", "", layout)
    if not re.fullmatch(r"[EtmL|()*0-9]*", text):
        raise ValueError(f'pp_layout "{layout}": only E, t, m, L, |, (), * and numbers have a meaning')
    before = ""
    while before != text:
        before = text
        text = re.sub(r"\(([^()]*)\)\*(\d+)", lambda m: m[1] * int(m[2]), text)
        text = re.sub(r"([EtmL|])\*(\d+)", lambda m: m[1] * int(m[2]), text)
    if "*" in text or "(" in text or ")" in text:
        raise ValueError(f'pp_layout "{layout}": unbalanced brackets, or a * without a number after it')
    return text.split("|")


def from_pieces(pieces: list[str], n_dense: int) -> tuple[Stage, ...]:
    """Stages of written-out layouts; the first `n_dense` layers are the dense ones."""
    stages: list[Stage] = []
    dense_left = n_dense
    for piece in pieces:
        dense = min(dense_left, piece.count("t"))
        dense_left -= dense
        stages.append(
            Stage(
                dense=dense,
                moe=piece.count("t") - dense,
                mtp=piece.count("m"),
                embedding="E" in piece,
                head="L" in piece,
            )
        )
    return tuple(stages)


def from_counts(counts: list[int], n_dense: int, mtp: int) -> tuple[Stage, ...]:
    """Stages of so many layers each; the first also has the embedding, the last MTP layers and the head."""
    pieces: list[str] = ["t" * count for count in counts]
    pieces[0] = "E" + pieces[0]
    pieces[-1] += "m" * mtp + "L"
    return from_pieces(pieces, n_dense)


def balanced(layers: int, stages: int, n_dense: int, mtp: int) -> tuple[Stage, ...]:
    """Stages that are as even as whole layers allow, when the embedding, each MTP layer and each head (one more with
    MTP) weigh as much as a layer."""
    heads = 1 + mtp
    slots = layers + 1 + mtp + heads
    sizes = [slots // stages + (i < slots % stages) for i in range(stages)]
    sizes[0] -= 1
    sizes[-1] -= mtp + heads
    while min(sizes) < 0:  # the last stage is full with less: the others take from the fullest
        sizes[sizes.index(max(sizes))] -= 1
        sizes[sizes.index(min(sizes))] += 1
    return from_counts(sizes, n_dense, mtp)


def parse(text: str, *, layers: int, n_dense: int, mtp: int, stages: int) -> tuple[tuple[Stage, ...], str]:
    """(stages, what was assumed) from a published description of the layout: a layout string anywhere in it, "8 per
    stage, last 5", or nothing usable (a balanced split). Raises ValueError if a string fits neither model nor pp x vp.
    """
    string = re.search(r"E[tmL|()*0-9]*\|[EtmL|()*0-9]*L", text)
    if string:
        found = from_pieces(expand(string[0]), n_dense)
        t, m = sum(s.dense + s.moe for s in found), sum(s.mtp for s in found)
        if len(found) == stages and t == layers and m != mtp and m + mtp == 1:
            # The same recipe with MTP switched on or off.
            pieces = [p.replace("m", "") for p in expand(string[0])]
            pieces[-1] = pieces[-1].replace("L", "m" * mtp + "L")
            return from_pieces(pieces, n_dense), f"{string[0]} with {mtp} MTP layers"
        if (len(found), t, m) != (stages, layers, mtp):
            raise ValueError(
                f'pp_layout "{string[0]}": has {len(found)} stages, {t} layers and {m} MTP layers, but pp x vp = '
                f"{stages} stages, and the model has {layers} layers and {mtp} MTP layers"
            )
        return found, ""
    counts = re.search(r"(\d+) per stage, last (\d+)", text)
    if counts and int(counts[1]) * (stages - 1) + int(counts[2]) == layers:
        return from_counts([int(counts[1])] * (stages - 1) + [int(counts[2])], n_dense, mtp), ""
    chunks = re.search(r"(\d+) chunks", text)
    if chunks and int(chunks[1]) == stages and layers % stages == 0:
        return from_counts([layers // stages] * stages, n_dense, mtp), ""
    if stages == 16 and layers == 61:
        return parse("Et*4|(t*4|)*14tmL", layers=layers, n_dense=n_dense, mtp=mtp, stages=16)[0], "16 stages of 4 slots"
    return balanced(layers, stages, n_dense, mtp), "" if stages == 1 else "an even split"
