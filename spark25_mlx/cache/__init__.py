"""KV caches: exact under trimming, copying, batching, saving and in-place writes."""

from .full import FullKVCache
from .model_cache import adopt, can_trim, rewind_to, trim
from .quantized import QuantizedFullKVCache, quantized_cache
from .sliding import SlidingKVCache
from .snapshot import Snapshot, SnapshotPolicy
from .storage import LayerCache, for_batch
from .turbo import TurboFullKVCache

__all__ = [
    "CACHE_CLASSES",
    "FullKVCache",
    "LayerCache",
    "QuantizedFullKVCache",
    "SlidingKVCache",
    "Snapshot",
    "SnapshotPolicy",
    "TurboFullKVCache",
    "adopt",
    "can_trim",
    "for_batch",
    "quantized_cache",
    "rewind_to",
    "trim",
]

# mlx-lm's load_prompt_cache looks these up by name among the globals of mlx_lm.models.cache.
CACHE_CLASSES = (FullKVCache, SlidingKVCache, QuantizedFullKVCache, TurboFullKVCache)
