"""Text to token ids: every byte its own id (built in, no file needed), or a Hugging Face `tokenizer.json`.

A document becomes [bos] text [eos]. eos is required: without it a model never learns where a text ends.
"""

import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import tokenizers

# Looked for among a tokenizer's added tokens when no tokenizer_config.json names them; the first that exists is taken.
BOS_NAMES = ("<s>", "<bos>", "<|begin_of_text|>", "<|startoftext|>", "<｜begin▁of▁sentence｜>")
EOS_NAMES = ("</s>", "<eos>", "<|end_of_text|>", "<|endoftext|>", "<｜end▁of▁sentence｜>")


class ByteTokenizer:
    """Ids 0-255 are the bytes of the text, so any file in any encoding has a lossless tokenization."""

    bos_id, eos_id, vocab_size = 256, 257, 258
    identity = "bytes"  # what the data fingerprint in a checkpoint knows a tokenizer by

    def encode_document(self, text: bytes) -> np.ndarray:
        ids = np.empty(len(text) + 2, dtype=np.int64)
        ids[0], ids[1:-1], ids[-1] = self.bos_id, np.frombuffer(text, dtype=np.uint8), self.eos_id
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        # Ids past vocab_size are left out too: a model whose embedding is larger than the tokenizer can emit them.
        return bytes(i for i in ids if i < 256).decode("utf-8", errors="replace")


class JsonTokenizer:
    """A Hugging Face fast tokenizer, without the transformers package."""

    def __init__(self, file: Path):
        config_file = file.with_name("tokenizer_config.json")
        try:
            content = file.read_bytes()
            self._tokenizer = tokenizers.Tokenizer.from_buffer(content)
            config = json.loads(config_file.read_bytes()) if config_file.exists() else {}
        except Exception as error:  # what the tokenizers package raises for a broken file is not part of its interface
            raise ValueError(f"{file} or its tokenizer_config.json is unreadable: {error}. Download again") from error
        # A tokenizer.json carries the truncation and padding of whoever saved it: both would silently change documents.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        # A text that mentions "</s>" must not end its document: special tokens in a text are ordinary characters.
        self._tokenizer.encode_special_tokens = True
        self._file = file
        self.eos_id = self._special_id(config.get("eos_token"), EOS_NAMES)
        # A config that says null, or add_bos_token = false (GPT-2's kind): this model never saw one before a text.
        no_bos = config.get("add_bos_token") is False or config.get("bos_token", "") is None
        self.bos_id = None if no_bos else self._special_id(config.get("bos_token"), BOS_NAMES)
        if self.eos_id is None:
            raise ValueError(
                f"{file} has no end-of-document token: no added token {' '.join(EOS_NAMES)}, and no eos_token in a "
                'tokenizer_config.json beside it. Put the model\'s there, or one with {"eos_token": "<its name>"}'
            )
        self._start = [] if self.bos_id is None else [self.bos_id]
        self.vocab_size = max(self._tokenizer.get_vocab(with_added_tokens=True).values()) + 1  # ids can have gaps
        self.identity = f"{hashlib.blake2b(content).hexdigest()} {self.bos_id} {self.eos_id}"

    def _special_id(self, named: str | dict | None, usual_names: tuple[str, ...]) -> int | None:
        name = named["content"] if isinstance(named, dict) else named
        if name is None:
            added = {token.content: id for id, token in self._tokenizer.get_added_tokens_decoder().items()}
            return next((added[usual] for usual in usual_names if usual in added), None)
        if self._tokenizer.token_to_id(name) is None:
            raise ValueError(f"tokenizer_config.json names {name!r}, which {self._file} lacks: use files of one model")
        return self._tokenizer.token_to_id(name)

    def __reduce__(self):
        # Pickling a tokenizers.Tokenizer loses encode_special_tokens: a data worker that is not forked reads the file.
        return JsonTokenizer, (self._file,)

    def encode_document(self, text: bytes) -> np.ndarray:
        # A batch of one: the call that leaves out character offsets, which is 1.5 times as fast.
        ids = self._tokenizer.encode_batch_fast([text.decode(errors="replace")], add_special_tokens=False)[0].ids
        return np.array(self._start + ids + [self.eos_id], dtype=np.int64)

    def decode(self, ids: Iterable[int]) -> str:
        return self._tokenizer.decode(list(ids))


Tokenizer = ByteTokenizer | JsonTokenizer


def build_tokenizer(hf_assets_path: str, rows: int) -> Tokenizer:
    """`hf_assets_path`: folder with a tokenizer.json, that file, or empty for bytes; `rows`: those of the embedding."""
    if not hf_assets_path:
        tokenizer: Tokenizer = ByteTokenizer()
    else:
        path = Path(os.path.expanduser(hf_assets_path))
        file = path / "tokenizer.json" if path.is_dir() else path
        if not file.is_file():
            remedy = "Name a folder with a tokenizer.json, or that file; leave it empty for the byte-level tokenizer"
            raise ValueError(f"model.hf_assets_path = {hf_assets_path!r}: there is no file {file}. {remedy}")
        tokenizer = JsonTokenizer(file)
    if tokenizer.vocab_size > rows:
        raise ValueError(
            f"model.vocab_size = {rows}: the tokenizer has {tokenizer.vocab_size} tokens, more than the embedding has "
            f"rows; set model.vocab_size to at least {tokenizer.vocab_size}"
        )
    return tokenizer
