"""`prefold serve --calibration`: answers to a calibrated question are corrected, and another question of its name is
refused."""

from __future__ import annotations

import httpx
import pytest
from serving import serving

from prefold import InputError

QUESTIONS = {"tone": {"type": "choice", "criteria": {"calm": None, "angry": None}}}
OTHER = {"type": "score", "criteria": ["a", "b"]}


def test_a_server_applies_a_calibration(llm, tmp_path):
    states = [f"text {i}" for i in range(40)]
    plain = llm.decide(states, QUESTIONS)
    other = {"calm": "angry", "angry": "calm"}
    gold = [one["tone"].value if i % 3 else other[one["tone"].value] for i, one in enumerate(plain)]
    made = llm.calibrate(states, QUESTIONS, {"tone": gold}, precision=0.6)
    file = tmp_path / "c.json"
    made.save(file)
    body = {"model": "dummy", "state": states[0], "questions": {**QUESTIONS, "other": OTHER}}
    with serving(llm, calibration=str(file)) as server, httpx.Client(base_url=server.url) as client:
        response = client.post("/v1/systemone", json=body).json()
        found, diagnostics = response["answers"], response["diagnostics"]
        want = llm.decide(states[0], body["questions"], calibration=made)["tone"]
        assert found["tone"]["probabilities"] == pytest.approx(want.probabilities, abs=1e-4)
        assert found["tone"]["probabilities"] != pytest.approx(plain[0]["tone"].probabilities, abs=1e-2)
        assert diagnostics["tone"]["review"] is want.review and "review" not in diagnostics["other"]
        body["questions"]["tone"] = {"type": "choice", "criteria": {"calm": None, "furious": None}}
        refused = client.post("/v1/systemone", json=body)
        assert refused.status_code == 400 and "made with the options calm, angry" in refused.text
    file.write_text(file.read_text().replace('"prompt": "', '"prompt": "x'))
    with pytest.raises(InputError, match="made with another prompt"), serving(llm, calibration=str(file)):
        pass
