"""The tokenizer's files in an exported folder: copies of the model's own, or the built-in one as a tokenizer.json."""

import json
import shutil
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from titan_moe.tokenizer import ByteTokenizer, JsonTokenizer, find_tokenizer

COPIED = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "tokenizer.model"),
    *("vocab.json", "merges.txt", "chat_template.jinja", "generation_config.json"),
)


def check(hf_assets_path: str) -> None:
    """Raises ValueError if there is no tokenizer to copy."""
    if hf_assets_path:
        find_tokenizer(hf_assets_path)


def write(hf_assets_path: str, folder: Path) -> tuple[int | None, int | None]:
    """Returns the ids of bos and eos, for config.json. Raises ValueError or OSError."""
    if not hf_assets_path:
        _write_bytes(folder)
        return ByteTokenizer.bos_id, ByteTokenizer.eos_id
    source = find_tokenizer(hf_assets_path)
    for name in COPIED:
        if (file := source.with_name(name)).is_file():
            shutil.copyfile(file, folder / name)
    tokenizer = JsonTokenizer(source)
    return tokenizer.bos_id, tokenizer.eos_id


def _write_bytes(folder: Path) -> None:
    """ByteTokenizer for the tokenizers package: GPT-2's alphabet has a character for each byte, and here none is ever
    merged with another."""
    vocabulary = {_character(byte): byte for byte in range(256)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = [("bos_token", "<bos>", ByteTokenizer.bos_id), ("eos_token", "<eos>", ByteTokenizer.eos_id)]
    for _, token, number in special:
        tokenizer.add_special_tokens([token])
        assert tokenizer.token_to_id(token) == number, token
    tokenizer.save(str(folder / "tokenizer.json"))
    content = {"tokenizer_class": "PreTrainedTokenizerFast", **{key: token for key, token, _ in special}}
    (folder / "tokenizer_config.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _character(byte: int) -> str:
    """Itself where that can be printed, and the others one after the other from 256 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    if byte in printable:
        return chr(byte)
    return chr(256 + sum(other not in printable for other in range(byte)))
