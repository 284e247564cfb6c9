"""Where the results of a job go."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from .fields import SpecError, option


@dataclass(frozen=True, kw_only=True)
class OutputSpec:
    """The output of a job. path: None, or "-": standard output"""

    path: str | None = option(
        None,
        ".jsonl, .csv, .tsv or .parquet; .gz may follow. Without it: JSON lines to standard output.",
        "output", flags="-o --output", metavar="FILE", journal=False,
    )  # fmt: skip
    keep_order: bool = option(False, "Results in input order, instead of as they come.", journal=False)
    overwrite: bool = option(False, "Start again, replacing the output.", journal=False)
    resume: bool = option(
        False,
        "Continue an interrupted job, and fail if there is none. (Without this option a job with a journal is"
        " resumed too.)",
        journal=False,
    )
    grown: bool = option(
        False, "The input may have become longer since: go on with the records behind those that are done.",
        journal=False,
    )  # fmt: skip
    report: str | None = option(
        None, "Write an HTML page about the job: its trie, its batches.", metavar="FILE", journal=False
    )
    quiet: bool = option(False, "No progress and no summary.", journal=False)
    scores: Literal["label", "all"] | None = option(
        None,
        "Which probabilities have a column of their own. label: the label's, p; all: every label's too, p_LABEL."
        "  [default: label for CSV and Parquet; else the objects of JSON lines]",
        one_of=(None, "label", "all"),
    )
    json_columns: bool = option(
        False,
        "Each property of a JSON answer becomes a column of its own, beside text. Needs --json-schema or"
        " --json-object.",
    )

    @property
    def file(self) -> Path | None:
        """Return the file of the output, which has a journal beside it; None: standard output."""
        return None if self.path is None or self.path == "-" else Path(self.path)

    def check(self) -> None:
        """Raise SpecError for options that exclude each other."""
        if self.file is None and (self.resume or self.overwrite or self.grown):
            raise SpecError("--resume, --overwrite and --grown need an output file: add -o FILE", field="output")
        if self.resume and self.overwrite:
            raise SpecError("--resume and --overwrite exclude each other", field="overwrite")
