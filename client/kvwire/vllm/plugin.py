"""Makes vLLM know the connector by name: --kv-transfer-config '{"kv_connector": "KvwireConnector", ...}'."""

from __future__ import annotations

from typing import Final

NAME: Final = "KvwireConnector"


def register() -> None:
    """The entry point in the group `vllm.general_plugins`. vLLM calls it in every process, even twice."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    try:
        KVConnectorFactory.register_connector(NAME, "kvwire.vllm.connector", NAME)
    except ValueError:
        # It is known already.
        return
