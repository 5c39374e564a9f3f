"""`kvwire bench peer` with real engines: what it reports, never how fast."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from kvwire.cli import app
from kvwire.cli.bench.peer import plan

pytestmark = [pytest.mark.timeout(300), pytest.mark.leakcheck("shm", "fds"), pytest.mark.long]


def test_three_real_engines_say_the_same(capfd, monkeypatch):
    tiny = replace(plan.QUICK, stale_prompts=4, stale_lookups=4, shares=(0.0, 0.5))
    monkeypatch.setattr(plan, "QUICK", tiny)
    assert app.main(["bench", "peer", "--part", "engines", "--part", "stale", "--quick", "--json"]) == 0
    found = json.loads(capfd.readouterr().out)
    assert found["ttft_peer_vs_recompute"] > 0
    assert found["query_ttft_vs_without"] > 0
    assert found["query_round_vs_without"] > 0
    assert found["engines"]["identical"] is True
    assert found["engines"]["peer_tokens"] == 384
    assert found["experiment"]["identical_answers"] == found["experiment"]["answers"] == 3
    assert [each["stale_share"] for each in found["stale_ttft"]] == [0, 0.5]
    assert found["stale_ttft"][1]["fallback_chunks"] == 2 * 6
