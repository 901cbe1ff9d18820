"""Text to token ids: every byte its own id (built in, no file needed), or the tokenizer of a Hugging Face folder.

A document becomes [bos] text [eos], unless its source says otherwise. A tokenizer without eos is refused: without it a
model never learns where a text ends. Documents are encoded in batches, which spares calls; spreading them over cores is
the data workers' business, so the tokenizers package is asked to keep to one.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import tokenizers

from titan_moe.sources.piece import Fault

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# Looked for among a tokenizer's added tokens when no tokenizer_config.json names them; the first that exists is taken.
BOS_NAMES = ("<s>", "<bos>", "<|begin_of_text|>", "<|startoftext|>", "<｜begin▁of▁sentence｜>")
EOS_NAMES = ("</s>", "<eos>", "<|end_of_text|>", "<|endoftext|>", "<｜end▁of▁sentence｜>")


class ByteTokenizer:
    """Ids 0-255 are the bytes of the text, so any file in any encoding has a lossless tokenization."""

    bos_id, eos_id, vocab_size = 256, 257, 258
    identity = "bytes"  # what the data fingerprint in a checkpoint knows a tokenizer by

    def encode(self, texts: Sequence[bytes], bos: bool = True, eos: bool = True) -> list[np.ndarray | Fault]:
        encoded: list[np.ndarray | Fault] = []
        for text in texts:
            ids = np.empty(bos + len(text) + eos, dtype=np.int32)
            ids[bos : bos + len(text)] = np.frombuffer(text, dtype=np.uint8)
            if bos:
                ids[0] = self.bos_id
            if eos:
                ids[-1] = self.eos_id
            encoded.append(ids)
        return encoded

    def decode(self, ids: Iterable[int]) -> str:
        # Ids past vocab_size are left out too: a model whose embedding is larger than the tokenizer can emit them.
        return bytes(i for i in ids if i < 256).decode("utf-8", errors="replace")


class JsonTokenizer:
    """A Hugging Face fast tokenizer, without the transformers package."""

    def __init__(self, file: Path):
        content, self._tokenizer = _load(file)
        config, self._config_name = _special_tokens(file)
        # A tokenizer.json carries the truncation and padding of whoever saved it: both would silently change documents.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        # A text that mentions "</s>" must not end its document: special tokens in a text are ordinary characters.
        self._tokenizer.encode_special_tokens = True
        self._file = file
        self.eos_id = self._special_id("eos_token", config, EOS_NAMES)
        # A config that says null, or add_bos_token = false (GPT-2's kind): this model never saw one before a text.
        no_bos = config.get("add_bos_token") is False or config.get("bos_token", "") is None
        self.bos_id = None if no_bos else self._special_id("bos_token", config, BOS_NAMES)
        if self.eos_id is None:
            raise ValueError(
                f"{file} has no end-of-document token: no added token {' '.join(EOS_NAMES)}, and no eos_token in a "
                'tokenizer_config.json beside it. Put the model\'s there, or one with {"eos_token": "<its name>"}'
            )
        self.vocab_size = max(self._tokenizer.get_vocab(with_added_tokens=True).values()) + 1  # ids can have gaps
        self.identity = f"{hashlib.blake2b(content).hexdigest()} {self.bos_id} {self.eos_id}"

    def _special_id(self, key: str, config: dict, usual_names: tuple[str, ...]) -> int | None:
        named = config.get(key)
        name = named.get("content") if isinstance(named, dict) else named
        if not isinstance(name, str) and named is not None:
            raise ValueError(
                f"{self._file.with_name(self._config_name)}: {key} = {json.dumps(named)} is neither a token's name nor "
                '{"content": "<its name>"}; put the model\'s there'
            )
        if name is None:
            added = {token.content: id for id, token in self._tokenizer.get_added_tokens_decoder().items()}
            return next((added[usual] for usual in usual_names if usual in added), None)
        if self._tokenizer.token_to_id(name) is None:
            raise ValueError(f"{self._config_name} names {name!r}, which {self._file} lacks: use files of one model")
        return self._tokenizer.token_to_id(name)

    def __reduce__(self):
        # Pickling a tokenizers.Tokenizer loses encode_special_tokens: a data worker that is not forked reads the file.
        return JsonTokenizer, (self._file,)

    def encode(self, texts: Sequence[bytes], bos: bool = True, eos: bool = True) -> list[np.ndarray | Fault]:
        decoded = [_decode(text) for text in texts]
        good = [text for text in decoded if isinstance(text, str)]
        try:
            done = iter(self._tokenizer.encode_batch_fast(good, add_special_tokens=False))  # fast: no character offsets
        except Exception as error:  # a plain one, of a model that lacks a token for what it does not know
            raise ValueError(
                f"{self._file} cannot encode a text: {error}. Give its model an unk_token, in its vocabulary, for "
                "what it does not know, or take another tokenizer"
            ) from error
        start = [self.bos_id] if bos and self.bos_id is not None else []
        end = [self.eos_id] if eos else []
        return [
            np.array(start + next(done).ids + end, dtype=np.int32) if isinstance(text, str) else text
            for text in decoded
        ]

    def decode(self, ids: Iterable[int]) -> str:
        return self._tokenizer.decode(list(ids))


Tokenizer = ByteTokenizer | JsonTokenizer


def _decode(text: bytes) -> str | Fault:
    try:
        return text.decode()
    except UnicodeDecodeError as error:
        what = f"is not UTF-8: byte 0x{text[error.start]:02x}, {error.reason}"
        return Fault(f"{what}; convert the file, or use the byte-level tokenizer, which takes any bytes", error.start)


def _load(file: Path) -> tuple[bytes, tokenizers.Tokenizer]:
    """tokenizer.json, or GPT-2's pair: vocab.json with merges.txt beside it."""
    try:
        content = file.read_bytes()
        if file.name != "vocab.json":
            return content, tokenizers.Tokenizer.from_buffer(content)
        merges = file.with_name("merges.txt")
        tokenizer = tokenizers.ByteLevelBPETokenizer.from_file(str(file), str(merges))
        tokenizer.add_special_tokens([name for name in EOS_NAMES if tokenizer.token_to_id(name) is not None])
        return content + merges.read_bytes(), tokenizer._tokenizer
    except Exception as error:  # what the tokenizers package raises for a broken file is not part of its interface
        raise ValueError(f"{file} is unreadable: {error}. Download again") from error


def _special_tokens(file: Path) -> tuple[dict, str]:
    """What a folder says about bos and eos, and the name of the file that does."""
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        path = file.with_name(name)
        try:
            config = json.loads(path.read_bytes()) if path.exists() else {}
        except ValueError as error:
            raise ValueError(f"{path} is unreadable: {error}. Download again") from error
        if not isinstance(config, dict):
            raise ValueError(f"{path} is unreadable: it holds no object. Download again")
        if "eos_token" in config or "bos_token" in config or "add_bos_token" in config:
            return config, name
    return {}, "tokenizer_config.json"


def build_tokenizer(hf_assets_path: str, rows: int) -> Tokenizer:
    """`hf_assets_path`: a Hugging Face folder, a tokenizer.json, or empty for bytes; `rows`: those of the embedding."""
    tokenizer = JsonTokenizer(find_tokenizer(hf_assets_path)) if hf_assets_path else ByteTokenizer()
    if tokenizer.vocab_size > rows:
        raise ValueError(
            f"model.vocab_size = {rows}: the tokenizer has {tokenizer.vocab_size} tokens, more than the embedding has "
            f"rows; set model.vocab_size to at least {tokenizer.vocab_size}"
        )
    return tokenizer


def find_tokenizer(hf_assets_path: str) -> Path:
    path = Path(os.path.expanduser(hf_assets_path))
    if path.is_file():
        return path
    for needed in (["tokenizer.json"], ["vocab.json", "merges.txt"]):
        if all((path / name).is_file() for name in needed):
            return path / needed[0]
    found = f"model.hf_assets_path = {hf_assets_path!r}: there is no file {path / 'tokenizer.json'}"
    if others := sorted(path.glob("*.model")):
        raise ValueError(
            f"{found}, only {others[0].name}, which has to be converted once: transformers.AutoTokenizer."
            "from_pretrained(folder).save_pretrained(folder) writes the other"
        )
    raise ValueError(
        f"{found}. Name a folder with a tokenizer.json, or that file; leave it empty for the byte-level tokenizer"
    )
