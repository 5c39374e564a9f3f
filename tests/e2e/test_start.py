"""What is refused when an engine starts, and how the connector is found."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from e2e.harness import Answer, Engine, engine, prompt, transfer_config
from kvwire.errors import ConfigError, LayoutUnsupported


def test_found_by_name(server, baseline, monkeypatch):
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    from kvwire.vllm import plugin

    monkeypatch.setattr(KVConnectorFactory, "_registry", dict(KVConnectorFactory._registry))
    plugin.register()
    plugin.register()
    tokens = prompt(200)
    (right,) = baseline("llama", tokens)
    config = transfer_config(server.address)
    del config["kv_connector_module_path"]
    running = Engine("llama", config)
    try:
        assert running.run(tokens) == [Answer(right, 0, "length")]
        assert running.run(tokens) == [Answer(right, 192, "length")]
    finally:
        running.close()


def test_vllm_loads_the_entry_point():
    code = (
        "from importlib.metadata import entry_points;"
        "(found,) = [each for each in entry_points(group='vllm.general_plugins') if each.name == 'kvwire'];"
        "found.load(); import sys; assert 'vllm' not in sys.modules and 'grpc' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)


def test_latent_attention_on_this_cpu_is_refused(server):
    with pytest.raises(LayoutUnsupported, match="latent attention"):
        refused("deepseek", transfer_config(server.address), block_size=None)


@pytest.mark.usefixtures("engine_environment")
def test_a_setting_that_does_not_exist():
    with pytest.raises(ConfigError, match=r"did you mean kvwire\.address"):
        refused("llama", transfer_config("unix:/tmp/x", adress="y"))


def refused(model, config, **options):
    """Starts an engine that refuses to, and cleans up what it has begun."""
    from vllm.distributed import cleanup_dist_env_and_memory

    try:
        Engine(model, config, **options)
    finally:
        cleanup_dist_env_and_memory()


def test_a_server_with_another_chunk_size_is_not_used(server, baseline):
    """The first engine has settled on 64 tokens; with blocks of 128 one runs without, and says why."""
    tokens = prompt(200)
    (right,) = baseline("llama", tokens)
    with engine("llama", server) as first:
        first.run(tokens)
    with engine("llama", server, block_size=128) as second:
        assert [second.run(tokens)[0] for _ in range(2)] == [Answer(right, 0, "length")] * 2
        assert "64" in second.scheduler_connector._scheduler.adapter.degraded_reason
    with engine("llama", server) as third:
        assert third.run(tokens) == [Answer(right, 192, "length")]


def test_an_engine_leaves_nothing_behind(server):
    before = set(threading.enumerate())
    with engine("llama", server) as running:
        running.run(prompt(200))
    left = [
        thread.name for thread in threading.enumerate() if thread not in before and "kvwire" in thread.name
    ]
    assert not left
    assert not server.status().registrations


def test_another_vllm_is_told_so_in_one_line(server, monkeypatch, caplog):
    import vllm

    monkeypatch.setattr(vllm, "__version__", "0.99.1")
    tokens = prompt(200)
    with caplog.at_level("WARNING", "kvwire"), engine("llama", server) as running:
        assert [running.run(tokens)[0].cached for _ in range(2)] == [0, 192]
    said = [record.getMessage() for record in caplog.records if "tried with" in record.getMessage()]
    assert said == ["kvwire: the connector was tried with vLLM 0.32 and not with this one, 0.99.1"]
