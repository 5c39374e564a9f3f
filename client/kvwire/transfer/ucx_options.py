"""How a UCX engine is set up, for peers on this host and on others.

What made the difference where it was measured:

- Peer error handling takes CMA away, so it is off between processes of one host and on between hosts.
- The receiver chooses how a large message moves. A server reads out of the client's staging memory, which
  lies in huge pages: 0.8 of memcpy. A client would have to read out of the arena, page by page of 4 KiB: 0.4.
  There the server writes instead: 0.6. Out of huge pages reading would be faster, but the client's thread has
  to scatter as well, and then it is slower on the whole.
- TCP needs large segments: with 2 MiB a sender takes a sixth less time than with 512 KiB. Both sides must
  have the same size: UCX loses what is larger than the receiver's. The "put" scheme is twice as cheap without
  error handling; with it, it is not available, and asking for it makes UCX send large messages eagerly, into
  memory that nobody has offered.
- TCP connects without waiting: UCX waits in the thread that moves everybody's bytes, for minutes where a
  firewall drops what is sent.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from kvwire.errors import DataPathUnavailable
from kvwire.transfer import net

Kind: TypeAlias = Literal["local", "remote"]
Role: TypeAlias = Literal["client", "server"]

_TCP: Final = {"TLS": "^sm", "TCP_TX_SEG_SIZE": "2m", "TCP_RX_SEG_SIZE": "2m", "TCP_CONN_NB": "y"}


@dataclass(frozen=True, slots=True)
class UcxOptions:
    """How one engine is to be.

    `lanes` is the number of its threads: more copy beside each other, where a host has processors to spare.
    `devices` are UCX device names for remote peers; empty means all that other hosts can reach.

    `extra` holds further UCX settings without the prefix `UCX_`; they win over the built-in ones. Variables
    UCX_* of the environment apply where neither says something.
    """

    kind: Kind
    role: Role = "client"
    devices: tuple[str, ...] = ()
    extra: tuple[tuple[str, str], ...] = ()
    setting: str = "--ucx-devices"
    lanes: int = 1

    @property
    def handles_peer_errors(self) -> bool:
        return self.kind == "remote"

    def ucx_config(self, *, with_cma: bool) -> dict[str, str]:
        """The settings of the context. Raises ConfigError for a device that does not exist."""
        # Pieces go by rendezvous: an eager message is copied where nobody waits for it yet, and is "sent" too
        # soon.
        common = {"RNDV_THRESH": "8192", "MAX_RNDV_RAILS": "1"}
        if self.kind == "local":
            config = {
                "TLS": "posix,sysv,cma,self" if with_cma else "posix,sysv,self",
                "RNDV_SCHEME": "put_zcopy" if self.role == "client" else "get_zcopy",
            }
        else:
            config = _TCP | {"NET_DEVICES": ",".join(self._devices())}
        return common | config | dict(self.extra)

    def _devices(self) -> list[str]:
        if self.devices:
            net.check_devices(self.devices, self.setting)
            return list(self.devices)
        found = net.advertisable_devices()
        if not found:
            raise DataPathUnavailable(
                f"No network device of this host can be reached from others; name one with {self.setting}.",
                path="ucx-remote",
                setting=self.setting,
            )
        return found
