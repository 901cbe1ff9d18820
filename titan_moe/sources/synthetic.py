"""Made-up text that a model can learn: every document follows from its name."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from titan_moe.sources.piece import Piece, hashed_bytes

DOCUMENTS = 4096  # 10 MB


@dataclass(frozen=True, slots=True)
class SyntheticPiece(Piece):
    """Words that follow one another by fixed odds, some of them ending a line."""

    def documents(self, first: int = 0) -> Iterator[bytes]:
        if first == 0:
            yield self.read()

    def read(self) -> bytes:
        words, followers = _language()
        start, *draws = hashed_bytes(1 + self.size // 3, self.name)  # the shortest word has 3 bytes
        word, text = start, bytearray(words[start])
        for draw in draws:
            word = followers[word][draw % 8]
            text += words[word]
        return bytes(text[: self.size])

    def where(self, document: int, at: int = 0) -> str:
        return self.name


def pieces(seed: int) -> list[SyntheticPiece]:
    draws = [int.from_bytes(hashed_bytes(8, "size", seed, i), "little") for i in range(DOCUMENTS)]
    sizes = [64 + (draw >> 8) % (256 << draw % 7) for draw in draws]  # 64 to 16,447 bytes, short ones more often
    return [SyntheticPiece(f"synthetic/{seed}/{i}", size) for i, size in enumerate(sizes)]


@cache
def _language() -> tuple[list[bytes], list[list[int]]]:
    """256 words and what follows each: four others at odds of 4 : 2 : 1 : 1, so 1.75 bits a word once known."""
    words, followers = [], []
    for i in range(256):
        length, end, *letters = hashed_bytes(10, "word", i)
        stem = bytes(b"etaoinshrdlucmfw"[letter % 16] for letter in letters[: 2 + length % 7])
        words.append(stem + (b".\n" if end % 16 == 0 else b" "))
        a, b, c, d = hashed_bytes(4, "followers", i)
        followers.append([a, a, a, a, b, b, c, d])
    return words, followers
