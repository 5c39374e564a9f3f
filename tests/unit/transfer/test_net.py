from __future__ import annotations

import socket

import pytest

from kvwire.errors import ConfigError, DataPathUnavailable
from kvwire.transfer import net
from kvwire.transfer.ucx_options import UcxOptions

UP, LOOPBACK = 0x1, 0x8


@pytest.fixture
def host(tmp_path, monkeypatch):
    """Loopback, a container bridge, a card that is down, one without an address, and a real one."""
    links = {"lo": UP | LOOPBACK, "docker0": UP, "eth0": UP, "eth1": 0, "wifi": UP}
    addresses = {"lo": "127.0.0.1", "docker0": "172.17.0.1", "eth0": "10.1.2.3", "eth1": "10.9.9.9"}
    for name, flags in links.items():
        folder = tmp_path / "net" / name
        folder.mkdir(parents=True)
        (folder / "flags").write_text(hex(flags))
    (tmp_path / "net" / "docker0" / "bridge").mkdir()
    monkeypatch.setattr(net, "_SYS", tmp_path)
    monkeypatch.setattr(socket, "if_nameindex", lambda: list(enumerate(links, 1)))
    monkeypatch.setattr(net, "_ipv4", lambda name: [addresses[name]] if name in addresses else [])
    monkeypatch.setattr(net, "_ipv6", lambda name: [])
    return tmp_path


def test_bl71_loopback_and_bridges_are_never_offered_to_other_hosts(host):
    assert net.advertisable_devices() == ["eth0"]
    assert UcxOptions("remote").ucx_config(with_cma=True)["NET_DEVICES"] == "eth0"


def test_bl71_rdma_ports_come_first(host):
    (host / "infiniband" / "mlx5_0" / "ports" / "1").mkdir(parents=True)
    assert net.advertisable_devices() == ["mlx5_0:1", "eth0"]
    net.check_devices(["mlx5_0:1", "lo"], "--ucx-devices")


def test_bl71_a_setting_wins_and_a_wrong_name_lists_the_real_ones(host):
    assert UcxOptions("remote", devices=("lo",)).ucx_config(with_cma=True)["NET_DEVICES"] == "lo"
    with pytest.raises(ConfigError, match=r"no network device eth7\. It has: lo, docker0, eth0, eth1, wifi"):
        UcxOptions("remote", devices=("eth0", "eth7")).ucx_config(with_cma=True)


def test_bl71_host_that_nobody_can_reach(host, monkeypatch):
    monkeypatch.setattr(net, "_ipv4", lambda name: [])
    with pytest.raises(DataPathUnavailable, match="--ucx-devices"):
        UcxOptions("remote").ucx_config(with_cma=True)


def test_interfaces_of_this_host():
    found = {each.name: each for each in net.list_interfaces()}
    assert found["lo"].is_loopback
    assert not found["lo"].is_advertisable
    assert "127.0.0.1" in found["lo"].addresses


def test_local_engines_use_shared_memory_only_and_cma_only_where_it_is_safe():
    assert UcxOptions("local").ucx_config(with_cma=True)["TLS"] == "posix,sysv,cma,self"
    assert UcxOptions("local").ucx_config(with_cma=False)["TLS"] == "posix,sysv,self"
    assert UcxOptions("local", "client").ucx_config(with_cma=True)["RNDV_SCHEME"] == "put_zcopy"
    assert (
        UcxOptions("local", extra=(("RNDV_SCHEME", "am"),)).ucx_config(with_cma=True)["RNDV_SCHEME"] == "am"
    )
