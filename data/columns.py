"""Reads a document from each row of a Parquet file or of a dataset: the text in the column
`data.text_field`. With dots, that is also the path of a field inside a column of structs.

UTF-8 may be stored as strings or as bytes, plain or by a dictionary. The length of each value is
checked in Arrow's memory, before it becomes a Python string.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from configs.words import a_kind
from data.pieces import TOO_LONG, BadFile, Document, Piece

if TYPE_CHECKING:
    import pyarrow

ROWS = 256  # rows of a column that are read at a time, at most
BATCH_BYTES = 16 << 20  # of a column that are read at a time, about
Batches = Iterator[tuple[int, float, Any]]


def documents(piece: Piece, field: str, longest: int, batches: Batches) -> Iterator[Document]:
    """Give the documents of batches: (row of the first, share of the piece that has been read with
    it, column)."""
    for first, share, column in batches:
        done = round(share * piece.size)
        for row, value in enumerate(_values(column, longest), start=first):
            yield Document(row, *_text_of(value, field), done)


def _text_of(value: object, field: str) -> tuple[str, str]:
    """Take the text from a value. Returns (text, problem), one of which is empty."""
    if value is TOO_LONG:
        return "", TOO_LONG
    if value is None:
        return "", f'has null in the column "{field}"; data.skip_failed leaves some rows out'
    if not isinstance(value, bytes):
        return "", f'has no string in the column "{field}", but {a_kind(value)}'
    try:
        return value.decode("utf-8"), ""
    except UnicodeDecodeError as error:
        return "", f'is not UTF-8 text in the column "{field}" ({error!r:.200})'


def _values(column: pyarrow.Array | pyarrow.ChunkedArray, longest: int) -> Iterator[object]:
    """Give each value of a column: bytes of text, TOO_LONG, or a value of another type."""
    import pyarrow
    from pyarrow import types

    if isinstance(column, pyarrow.ChunkedArray):
        for chunk in column.chunks:
            yield from _values(chunk, longest)
        return
    if isinstance(column, pyarrow.ExtensionArray):  # JSON, say: strings under another name
        column = column.storage
    if types.is_dictionary(column.type):
        known = list(_values(column.dictionary, longest))
        for index in column.indices.to_pylist():
            yield None if index is None else known[index]
        return
    is_view = types.is_string_view(column.type) or types.is_binary_view(column.type)
    if types.is_string(column.type):
        column = column.cast(pyarrow.binary())
    elif types.is_large_string(column.type) or is_view:
        column = column.cast(pyarrow.large_binary())
    is_bytes = types.is_binary(column.type) or types.is_large_binary(column.type)
    if not longest or not is_bytes or column.nbytes <= longest:
        yield from column.to_pylist()
        return
    for value in column:
        is_too_long = value.is_valid and value.as_buffer().size > longest
        yield TOO_LONG if is_too_long else value.as_py()


def path_to(schema: pyarrow.Schema, field: str) -> list[str]:
    """Find a column: [its name], or the names on the way to it inside structs. Raises BadFile."""
    if field in schema.names:
        path = [field]
    else:
        path = field.split(".")
    if schema.names.count(path[0]) > 1:
        raise BadFile(f'has two columns "{path[0]}" (data.text_field): rename one')
    fields = list(schema)
    for name in path:
        by_name = {one.name: one for one in fields}
        if name not in by_name:
            names = ", ".join(schema.names[:20])
            raise BadFile(f'has no column "{field}" (data.text_field), but {names}')
        kind = by_name[name].type
        fields = list(kind) if hasattr(kind, "get_field_index") else []
    return path


def take(batch: Any, path: list[str]) -> Any:
    """Take the column at a path from a record batch or a table."""
    from pyarrow import compute

    column = batch.column(path[0])
    return compute.struct_field(column, path[1:]) if path[1:] else column


# --------------------------------------------------------------------------------------------------
# Parquet


def row_groups(content: Any) -> int:
    """Count the row groups of an opened file. Raises OSError."""
    from pyarrow import ArrowException, parquet

    try:
        return parquet.read_metadata(content).num_row_groups
    except ArrowException as error:
        raise OSError(str(error)) from error


def parquet_batches(content: Any, piece: Piece, field: str) -> Batches:
    """Read the row groups of a piece. Raises OSError for damage, BadFile without the column."""
    from pyarrow import ArrowException, parquet

    try:
        with parquet.ParquetFile(content, pre_buffer=False) as file:
            path = path_to(file.schema_arrow, field)
            groups = [file.metadata.row_group(group).num_rows for group in range(piece.stop)]
            row = sum(groups[: piece.start])
            for group in range(piece.start, piece.stop):
                end = row + groups[group]
                for batch in file.iter_batches(
                    _rows_at_a_time(file.metadata.row_group(group), path),
                    row_groups=[group],
                    columns=[field],
                    use_threads=False,
                ):
                    unread = (end - row - len(batch)) / max(groups[group], 1)
                    share = (group + 1 - piece.start - unread) / (piece.stop - piece.start)
                    yield row, share, take(batch, path)
                    row += len(batch)
    except ArrowException as error:
        raise OSError(str(error).splitlines()[0]) from error


def _rows_at_a_time(group: Any, path: list[str]) -> int:
    """Choose how many rows of a group are read at a time: few where values are large."""
    columns = [group.column(index) for index in range(group.num_columns)]
    wanted = ".".join(path)
    size = sum(one.total_uncompressed_size for one in columns if one.path_in_schema == wanted)
    return max(1, min(ROWS, BATCH_BYTES * group.num_rows // max(size, 1)))
