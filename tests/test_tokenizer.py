"""Bytes and tokenizer.json: whole documents in, bos and eos around them, and a way out when a file is wrong."""

import json
import pickle
import re
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers

from tests.pieces import write_tokenizer
from titan_moe.sources.piece import Fault
from titan_moe.tokenizer import ByteTokenizer, JsonTokenizer, build_tokenizer

ROWS = 200_000  # of an embedding that no tokenizer here outgrows


def encode(tokenizer: JsonTokenizer | ByteTokenizer, text: bytes) -> np.ndarray:
    (ids,) = tokenizer.encode([text])
    assert isinstance(ids, np.ndarray)
    return ids


@given(st.binary(max_size=100))
def test_bytes_are_lossless(text: bytes) -> None:
    tokenizer = build_tokenizer("", ROWS)
    ids = encode(tokenizer, text)
    assert ids.dtype == np.int32 and ids[0] == tokenizer.bos_id == 256 and ids[-1] == tokenizer.eos_id == 257
    assert bytes(ids[1:-1].tolist()) == text and ids.max() < tokenizer.vocab_size == 258


def test_bytes_decode() -> None:
    tokenizer = build_tokenizer("", ROWS)
    assert tokenizer.decode(encode(tokenizer, "Grüße 漢字".encode())) == "Grüße 漢字"
    assert tokenizer.decode([104, 105, 257, 300]) == "hi"  # a model with a larger embedding can emit any id


def test_bytes_are_fast() -> None:
    tokenizer, text = build_tokenizer("", ROWS), bytes(range(256)) * 4096
    start = time.perf_counter()
    for _ in range(10):
        encode(tokenizer, text)
    assert 10 * len(text) / (time.perf_counter() - start) > 10e6


@pytest.mark.parametrize("named", ["folder", "file"])
def test_json_round_trip(tmp_path: Path, named: str) -> None:
    write_tokenizer(tmp_path, ["<s>", "</s>"])
    tokenizer = build_tokenizer(str(tmp_path if named == "folder" else tmp_path / "tokenizer.json"), ROWS)
    ids = encode(tokenizer, "Grüße 漢字\n".encode())
    assert ids.dtype == np.int32 and ids[0] == tokenizer.bos_id == 256 and ids[-1] == tokenizer.eos_id == 257
    assert tokenizer.decode(ids) == "Grüße 漢字\n" and tokenizer.vocab_size == 258


def test_invalid_utf8_is_a_fault_in_its_place(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, ["</s>"])
    tokenizer = build_tokenizer(str(tmp_path), ROWS)
    first, fault, last = tokenizer.encode([b"a", b"ab\xffc", b"b"])
    assert isinstance(first, np.ndarray) and isinstance(last, np.ndarray)
    assert tokenizer.decode(first) == "a" and tokenizer.decode(last) == "b"
    assert isinstance(fault, Fault) and fault.at == 2 and fault.reason.startswith("is not UTF-8: byte 0xff")


def test_special_tokens_in_a_text_do_not_end_its_document(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, ["<s>", "</s>"])
    tokenizer = build_tokenizer(str(tmp_path), ROWS)
    for each in (tokenizer, pickle.loads(pickle.dumps(tokenizer))):  # as in a data worker that is not forked
        ids = encode(each, b"x</s>y<s>").tolist()
        assert ids.count(each.eos_id) == ids.count(each.bos_id) == 1 and len(ids) == 9 + 2


def test_truncation_and_padding_of_the_file_are_not_applied(tmp_path: Path) -> None:
    tokenizer = write_tokenizer(tmp_path, ["</s>"])
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=64)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert encode(build_tokenizer(str(tmp_path), ROWS), b"0123456789").size == 10 + 1


@pytest.mark.parametrize(
    ("config", "bos", "eos"),
    [
        (None, "<s>", "</s>"),
        ({}, "<s>", "</s>"),
        ({"bos_token": "<b>", "eos_token": "<e>"}, "<b>", "<e>"),
        ({"bos_token": {"content": "<b>"}, "eos_token": {"content": "<e>", "special": True}}, "<b>", "<e>"),
        ({"bos_token": None, "eos_token": "<e>"}, None, "<e>"),
        ({"bos_token": "<b>", "eos_token": "<e>", "add_bos_token": False}, None, "<e>"),
        ({"bos_token": "<b>", "eos_token": None}, "<b>", "</s>"),
    ],
)
def test_which_tokens_begin_and_end_a_document(tmp_path: Path, config: dict | None, bos: str, eos: str) -> None:
    reference = write_tokenizer(tmp_path, ["<s>", "</s>", "<b>", "<e>"], config)
    tokenizer = build_tokenizer(str(tmp_path), ROWS)
    assert tokenizer.bos_id == (None if bos is None else reference.token_to_id(bos))
    assert tokenizer.eos_id == reference.token_to_id(eos)
    start = [] if bos is None else [tokenizer.bos_id]
    text = [reference.token_to_id("h"), reference.token_to_id("i")]
    assert encode(tokenizer, b"hi").tolist() == [*start, *text, tokenizer.eos_id]


def test_identity_tells_tokenizers_apart(tmp_path: Path) -> None:
    identities = {build_tokenizer("", ROWS).identity}
    for i, added in enumerate([["</s>"], ["<s>", "</s>"]]):
        (tmp_path / str(i)).mkdir()
        write_tokenizer(tmp_path / str(i), added)
        identities |= {build_tokenizer(str(tmp_path / str(i)), ROWS).identity for _ in range(2)}
    (tmp_path / "1" / "tokenizer_config.json").write_text('{"bos_token": null}')
    assert len(identities | {build_tokenizer(str(tmp_path / "1"), ROWS).identity}) == 4


@pytest.mark.parametrize("batch", [1, 3])
def test_a_batch_is_its_documents(tmp_path: Path, batch: int) -> None:
    write_tokenizer(tmp_path, ["<s>", "</s>"])
    texts = ["Grüße".encode(), b"x", "漢字 </s>".encode()]
    for tokenizer in (build_tokenizer("", ROWS), build_tokenizer(str(tmp_path), ROWS)):
        for bos, eos in ((True, True), (False, True), (True, False), (False, False)):
            together = tokenizer.encode(texts[:batch], bos, eos)
            for ids, text in zip(together, texts, strict=False):
                whole = encode(tokenizer, text)
                assert np.array_equal(ids, whole[0 if bos else 1 : None if eos else -1])


def test_a_folder_of_gpt2s_kind(tmp_path: Path) -> None:
    """vocab.json and merges.txt, and bos and eos in special_tokens_map.json."""
    json_tokenizer = write_tokenizer(tmp_path, [])
    (tmp_path / "tokenizer.json").unlink()
    vocab = {**json_tokenizer.get_vocab(), "<|endoftext|>": 256}
    (tmp_path / "vocab.json").write_text(json.dumps(vocab))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    assert build_tokenizer(str(tmp_path), ROWS).eos_id == 256
    (tmp_path / "special_tokens_map.json").write_text('{"bos_token": null, "eos_token": "<|endoftext|>"}')
    tokenizer = build_tokenizer(str(tmp_path), ROWS)
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.vocab_size) == (None, 256, 257)
    assert encode(tokenizer, b"a b<|endoftext|>").size == 16 + 1  # also here, text is never a special token
    assert tokenizer.decode(encode(tokenizer, b"a b")) == "a b"


def test_a_sentencepiece_model_alone_has_to_be_converted(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").touch()
    with pytest.raises(ValueError, match=r"only tokenizer\.model, which has to be converted once: .*save_pretrained"):
        build_tokenizer(str(tmp_path), ROWS)


def test_errors_name_the_file_and_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no file .*nowhere.*leave it empty"):
        build_tokenizer(str(tmp_path / "nowhere"), ROWS)
    with pytest.raises(ValueError, match=r"no file .*tokenizer\.json.*leave it empty"):
        build_tokenizer(str(tmp_path), ROWS)
    write_tokenizer(tmp_path, ["[END]"])
    with pytest.raises(ValueError, match=r"no end-of-document token.*</s>.*tokenizer_config\.json"):
        build_tokenizer(str(tmp_path), ROWS)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<eot>"}')
    with pytest.raises(ValueError, match=r"'<eot>', which .*tokenizer\.json lacks"):
        build_tokenizer(str(tmp_path), ROWS)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "[END]"}')
    assert build_tokenizer(str(tmp_path), ROWS).bos_id is None
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ValueError, match="Download again"):
        build_tokenizer(str(tmp_path), ROWS)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer\.json .*Download again"):
        build_tokenizer(str(tmp_path), ROWS)


@pytest.mark.parametrize("key", ["eos_token", "bos_token"])
@pytest.mark.parametrize("named", [3, ["</s>"], {"id": 3}, {"content": 3}, True])
def test_a_token_that_has_no_name_is_named(tmp_path: Path, key: str, named: object) -> None:
    write_tokenizer(tmp_path, ["</s>"], {key: named})
    expected = f"{tmp_path}/tokenizer_config.json: {key} = {json.dumps(named)} is neither"
    with pytest.raises(ValueError, match=re.escape(expected)):
        build_tokenizer(str(tmp_path), ROWS)
    (tmp_path / "tokenizer_config.json").write_text(f'["{key}"]')
    with pytest.raises(ValueError, match=r"tokenizer_config\.json is unreadable: it holds no object"):
        build_tokenizer(str(tmp_path), ROWS)


@pytest.mark.parametrize("model", [models.WordLevel, models.WordPiece])
def test_a_word_that_the_tokenizer_does_not_know_and_has_no_token_for(tmp_path: Path, model: Callable) -> None:
    library = Tokenizer(model({"a": 0, "</s>": 1}))
    library.pre_tokenizer = pre_tokenizers.Whitespace()
    library.add_special_tokens(["</s>"])
    library.save(str(tmp_path / "tokenizer.json"))
    tokenizer = build_tokenizer(str(tmp_path), ROWS)
    assert encode(tokenizer, b"a a").tolist() == [0, 0, 1]
    with pytest.raises(ValueError, match=r"tokenizer\.json cannot encode a text: .*UNK.*take another tokenizer"):
        tokenizer.encode([b"a b"])


def test_a_tokenizer_larger_than_the_embedding_is_refused() -> None:
    with pytest.raises(ValueError, match=r"model.vocab_size = 257: the tokenizer has 258 tokens.*set .* at least 258"):
        build_tokenizer("", 257)
