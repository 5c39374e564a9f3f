"""`kvwire bench engine` with real engines: what it reports, never how fast."""

from __future__ import annotations

import json

import pytest

from kvwire.cli import app

pytestmark = [pytest.mark.timeout(300), pytest.mark.leakcheck("shm", "fds")]


def test_it_reports_what_two_real_engines_showed(capfd):
    assert (
        app.main(["bench", "engine", "--model", "tiny", "--prompt-tokens", "200", "--quick", "--json"]) == 0
    )
    printed = capfd.readouterr()
    found = json.loads(printed.out)
    assert found["ttft_vs_without"] > 0
    assert found["idle_steps_vs_without"] > 0
    assert found["ttft_vs_lmcache"] is None
    assert "--with-lmcache" in found["skipped"]["ttft_vs_lmcache"]
    assert found["reused_tokens"] == {"without": 0, "kvwire": 192}
    assert found["identical"] == {"without": True, "kvwire": True}
    assert found["rounds"] == 2
    assert all(found[name].keys() == {"without", "kvwire"} for name in ("ttft_ms", "steps_per_s"))
    assert "time to first token: round 2 of 2" in printed.err
