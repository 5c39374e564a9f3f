"""Finding cached chunks at any position of a prompt. Pure; used by the cache server and the coordinator."""

from __future__ import annotations

from kvwire.blend.index import BlendChunk, BlendHit, BlendIndex

__all__ = ["BlendChunk", "BlendHit", "BlendIndex"]
