""".parquet: every row a document, its text in one column.

A row group is cut into up to 16 ranges of rows, so that a single file fills several shards. A range that does not begin
its group has to decode what comes before it, some 8 times a group in all: far less than tokenizing once.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from titan_moe.sources.lines import text_of_field
from titan_moe.sources.piece import Fault, FilePiece

RANGES = 16
BATCH_ROWS = 256


@dataclass(frozen=True, slots=True)
class RowPiece(FilePiece):
    """`start` and `end` are rows of the row group."""

    row_group: int
    rows_before: int  # of the row group, in the file
    text_field: str

    @property
    def unit(self) -> str:
        return f"{self.name}:{self.row_group}:{self.start}"

    def documents(self, first: int = 0) -> Iterator[bytes | Fault]:
        import pyarrow as pa  # here and below: a third of a second, which other sources need not wait for
        import pyarrow.parquet as pq

        row, first = 0, self.start + first
        with self.open() as file:
            try:
                batches = pq.ParquetFile(file).iter_batches(
                    BATCH_ROWS, row_groups=[self.row_group], columns=[self.text_field], use_threads=False
                )
                for batch in batches:
                    if row + batch.num_rows > first:
                        # As bytes: whether they are UTF-8 is the tokenizer's business, and no reason to lose a batch.
                        column = batch.column(0).cast(pa.large_binary()).slice(max(first - row, 0))
                        for text in column.slice(0, self.end - max(first, row)).to_pylist():
                            yield text_of_field({self.text_field: text}, self.text_field)
                    row += batch.num_rows
                    if row >= self.end:
                        return
            except (pa.ArrowException, OSError) as error:
                where, why = f"{self.path}, row group {self.row_group}", " ".join(str(error).split())
                raise ValueError(f"{where}: cannot be read: {why}. Get the file again") from error

    def where(self, document: int, at: int = 0) -> str:
        return f"{self.path}, row {self.rows_before + self.start + document}"


def pieces(name: str, path: str, size: int, piece_bytes: int, text_field: str) -> list[RowPiece]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            metadata, schema = file.metadata, file.schema_arrow
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{path} is no .parquet that can be read: {error}. Get the file again") from error
    if text_field not in schema.names:
        there = ", ".join(schema.names[:8])
        raise ValueError(f'{path} has no column "{text_field}"; its columns are: {there}. Name one with text_field')
    if schema.names.count(text_field) > 1:
        raise ValueError(f'{path} has several columns "{text_field}"; rename them, and name one with text_field')
    kind = schema.field(text_field).type
    if not any(is_text(kind) for is_text in (pa.types.is_string, pa.types.is_large_string, pa.types.is_binary)):
        raise ValueError(f'{path}: column "{text_field}" holds {kind}, not text; name another with text_field')
    found, before = [], 0
    for i in range(metadata.num_row_groups):
        group = metadata.row_group(i)
        column = next(c for c in map(group.column, range(group.num_columns)) if c.path_in_schema == text_field)
        rows, weight = group.num_rows, column.total_uncompressed_size
        count = max(min(-(-weight // piece_bytes), RANGES, rows), 1)
        ends = [rows * k // count for k in range(count + 1)] if rows else []
        found += [
            RowPiece(name, max(weight // count, 1), path, start, end, size, i, before, text_field)
            for start, end in pairwise(ends)
        ]
        before += rows
    return found
