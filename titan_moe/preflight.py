"""What is wrong with the files that a run will read, as far as can be told without reading all of them.

Called before torchrun, so that a missing field or another vocabulary costs no process group; and again by rank 0.
"""

import logging
from collections.abc import Sequence
from pathlib import Path

from titan_moe.config import Config
from titan_moe.config_check import model_flavor
from titan_moe.packing import Encoder
from titan_moe.sources import record
from titan_moe.sources.listing import Source
from titan_moe.sources.piece import Fault
from titan_moe.sources.record import Listing, Unlisted, list_all
from titan_moe.tokenizer import Tokenizer, build_tokenizer

logger = logging.getLogger(__name__)


def data_problems(config: Config, folder: Path) -> list[str]:
    """For `launch`: a list, empty when all is well. `folder`: of the run, which may have trained on other files."""
    found, tokenizer, listing = [], None, None
    try:
        tokenizer = build_tokenizer(config.model.hf_assets_path, model_flavor(config).vocab_size)
    except ValueError as error:
        found.append(str(error))
    try:
        listing = list_all(config)
        found += resume_problems(config, listing, folder)
    except Unlisted as error:
        found += error.args
    except ValueError as error:
        found.append(str(error))
    if tokenizer is not None and listing is not None:
        found += source_problems(listing, tokenizer)
    return found


def list_sources(config: Config, tokenizer: Tokenizer, folder: Path) -> Listing:
    """For rank 0 of a run: all its sources, or a ValueError with everything that is wrong with them."""
    listing = list_all(config)
    if problems := resume_problems(config, listing, folder) + source_problems(listing, tokenizer):
        raise ValueError("\n".join(problems))
    if doubts := record.doubts(listing, folder):
        more = f" and {len(doubts) - 3} more" if len(doubts) > 3 else ""
        logger.warning(
            f"Data files were written to since this run began: {', '.join(doubts[:3])}{more}. Their sizes are what "
            "they were, and so are their first, middle and last bytes: they are taken for the same"
        )
    return listing


def resume_problems(config: Config, listing: Listing, folder: Path) -> list[str]:
    """A run that goes on from a checkpoint has a position in the files that it began with."""
    if not config.checkpoint.enable or not any((folder / config.checkpoint.folder).glob("step-*")):
        return []
    return [
        f"the data of the run in {folder} is not what it was: {change}. Put it back to resume, or start a new run from "
        "the weights: checkpoint.initial_load_path with another job.dump_folder"
        for change in record.changes(listing, folder)
    ]


def source_problems(listing: Listing, tokenizer: Tokenizer) -> list[str]:
    """Token ids of another tokenizer; a first document that cannot be used."""
    found = []
    for source in listing.everything():
        if source.kind == "tokens":
            found += _other_tokenizer(source, tokenizer)
            if source.add_bos is not None or source.add_eos is not None:
                found.append(
                    f'training.mixture, "{source.dataset}": add_bos and add_eos are decided when token ids are written '
                    "(python -m titan_moe.tokenize --help); leave them out"
                )
            continue
        if source.add_bos and tokenizer.bos_id is None:
            found.append(
                f'training.mixture, "{source.dataset}": add_bos = true, but the tokenizer has no bos token; leave it '
                "out, or name one as bos_token in its tokenizer_config.json"
            )
        elif source.kind != "hub" and source.on_error == "raise":
            found += _first_document(source, tokenizer)
    return list(dict.fromkeys(found))  # a source that is split for validation comes twice


def _other_tokenizer(source: Source, tokenizer: Tokenizer) -> Sequence[str]:
    made = source.made_by
    if made["tokenizer"] == tokenizer.identity:
        return []
    return [
        f'dataset = "{source.dataset}": its ids are of another tokenizer, with a vocabulary of {made["vocab_size"]} '
        f'(model.hf_assets_path was "{made["hf_assets_path"]}"), than this run\'s, with {tokenizer.vocab_size}. Set '
        "model.hf_assets_path to that tokenizer, or write the ids again with python -m titan_moe.tokenize"
    ]


def _first_document(source: Source, tokenizer: Tokenizer) -> Sequence[str]:
    """A wrong text_field shows in the first line already."""
    piece, encoder = source.pieces[0], Encoder(source, tokenizer)
    for number, document in enumerate(piece.documents()):
        (encoded,) = encoder.encode([document])
        if isinstance(encoded, Fault):
            return [f"{piece.where(number, encoded.at)}: {encoded.reason}"]
        if encoded.size:
            break
    return []
