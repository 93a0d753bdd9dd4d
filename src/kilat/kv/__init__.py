"""Key/value caches: where keys and values lie, and how new ones are written; rotary tables."""

from kilat.kv.cache import Cache
from kilat.kv.contiguous import ContiguousCache
from kilat.kv.paged import PagedCache
from kilat.kv.ring import RingCache
from kilat.kv.rotary import Rotary

__all__ = ["Cache", "ContiguousCache", "PagedCache", "RingCache", "Rotary"]
