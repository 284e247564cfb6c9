"""How the input of a job is read."""

# ruff: noqa: RUF009  (a field that is made by a function of ours is a field)

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .fields import option

Format = Literal["jsonl", "csv", "tsv", "parquet"]
FORMATS: tuple[Format, ...] = ("jsonl", "csv", "tsv", "parquet")


@dataclass(frozen=True, kw_only=True)
class InputSpec:
    """The input of a job: its files, its columns, and how much is read.

    names: files, patterns and folders, or on the command line the texts themselves
    """

    names: tuple[str, ...] = ()
    prompt: str | None = option(None, 'The text: a column, or "...{column}...".', metavar="TEMPLATE")
    query: str | None = option(None, "The query: a column, or a template.  [default: query]", metavar="TEMPLATE")
    document: str | None = option(
        None, "The document: a column (a list is ranked as one), or a template.", metavar="TEMPLATE"
    )
    continuation: str | None = option(
        None,
        "What is scored: a column (a list is scored one by one), or a template. Without it, the prompt as a whole.",
        metavar="TEMPLATE",
    )
    tools: str | None = option(
        None, "Tools that the chat template is told of: a column, or @FILE (JSON) for all records.", metavar="COLUMN"
    )
    messages: str | None = option(None, "Chat messages, written by the model's chat template.", metavar="COLUMN")
    adapter_column: str | None = option(None, "The name of each record's adapter.", metavar="COLUMN")
    image: str | None = option(
        None,
        "The record's image, or a list of them: base64, a data URL, bytes, with --media-folder a path. Without a job:"
        " the path of an image.",
        metavar="COLUMN",
    )
    media_folder: str | None = option(
        None, "Images may be given as paths in this folder; nothing outside of it is read.", metavar="FOLDER"
    )
    id_column: str | None = option(None, "A column that the output repeats as id.", metavar="COLUMN", flags="--id")
    keep: tuple[str, ...] = option(
        (),
        "Further columns that the output repeats, under another name as NAME=COLUMN; '*': all. May be repeated.",
        metavar="A,B,...",
    )
    empty: Literal["error", "keep"] | None = option(
        None,
        "What an empty cell, null or NaN in a prompt is: an error of that record, or an empty text.  [default: error]",
        one_of=(None, "error", "keep"),
    )
    format: Format | None = option(
        None, "Format of the input.  [default: as its name says; standard input: jsonl]", "input_format",
        one_of=(None, *FORMATS), flags="--format", journal=False,
    )  # fmt: skip
    delimiter: str | None = option(
        None, "What parts the cells of CSV or TSV, such as ';' or tab.  [default: a comma; of TSV a tab]",
        metavar="CHAR",
    )  # fmt: skip
    max_cell_lines: int | None = option(
        None,
        "Lines that a quoted cell of CSV or TSV may have; a longer one is a broken quote. 0: any number."
        "  [default: 1000]",
        least=0,
    )
    media_bytes: int | None = option(None, "Size of an image's file.  [default: 20MB]")
    media_pixels: int | None = option(None, "Height times width of an image.  [default: 64000000]", least=1)
    limit: int | None = option(None, "Only the first N records.", least=1, journal=False)
    window: int = option(
        1 << 20, "Tokens held in memory at once; with --stream those that wait.", least=1, journal=False
    )
    stream: bool = option(
        False,
        "Run records as they come, the most alike first, instead of sorting the whole input: for input without end."
        " Shares less.",
        journal=False,
    )
