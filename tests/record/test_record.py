"""The recorder itself: two recordings of one tree are equal, and what differs is said."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from .__main__ import main
from .normal import joined_events, normal

ROOT = Path(__file__).resolve().parents[2]
# A job, and the requests of a small server.
ONLY = ["--only", "jobs/score-full", "--only", "gated/*"]
SCRIPT = """
import sys
from tests.record.__main__ import main
sys.exit(any(main(["--out", folder, *sys.argv[3:]]) for folder in sys.argv[1:3]))
"""


def test_two_recordings_are_equal_and_a_change_is_said(tmp_path, capsys):
    folders = [tmp_path / "one", tmp_path / "two"]
    command = [sys.executable, "-c", SCRIPT, *map(str, folders), *ONLY]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    compared = ["--compare", *map(str, folders)]
    assert main(compared) == 0
    assert capsys.readouterr().out == ""

    files = sorted(str(path.relative_to(folders[1])) for path in folders[1].rglob("*") if path.is_file())
    assert "jobs/score-full" in files and "gated/rerank" in files and len(files) > 8
    job = (folders[1] / "jobs" / "score-full").read_text()
    assert "status 0\n" in job and '"logprobs": [' in job
    assert "\nstatus 200\n" in (folders[1] / "gated" / "v1-completions-most").read_text()

    answer = folders[1] / "gated" / "rerank"
    answer.write_text(answer.read_text().replace("relevance_score", "score"))
    (folders[1] / "gated" / "embeddings").unlink()
    assert main(compared) == 1
    said = capsys.readouterr().out
    assert "=== gated/rerank" in said and '+   "score": ' in said
    assert f"=== gated/embeddings: only in {folders[0]}" in said
    assert "score-full" not in said


def test_pieces_of_a_stream_are_joined():
    def stream(*texts):
        events = [f'data: {{"index": 0, "text": "{text}", "logprobs": {{"tokens": ["{text}"]}}}}' for text in texts]
        return "\n\n".join([*events, "data: [DONE]", ""])

    joined = joined_events(stream("a", "b", "c"))
    assert '"text": "abc"' in joined and '["a", "b", "c"]' in joined and joined.endswith("data: [DONE]\n\n")
    assert joined_events(stream("abc")) != joined_events(stream("abd"))


def test_what_cannot_be_equal():
    one, two = "0123456789abcdef01234567", "ffffffffffffffff01234567"
    assert normal(f"cmpl-{one} cmpl-{two} {one}", {}) == "cmpl-<id 1> cmpl-<id 2> <id 1>"
    assert normal('"created": 1790000000, 3.5 s, "0.012345678901234567890123456"', {}) == (
        '"created": "<time>", <seconds>, "0.012345678901234567890123456"'
    )
