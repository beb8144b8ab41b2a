"""What `import mlx_lm.models.spark2_5` yields while the plugin is enabled."""

from spark25_mlx.config import ModelArgs
from spark25_mlx.model import Model

__all__ = ["Model", "ModelArgs"]
